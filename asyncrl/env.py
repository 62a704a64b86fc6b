"""What a user writes: an environment as one small async class, or a plain reward function.

    class Guess(asyncrl.Env):
        async def reset(self, task):
            self.secret = task.data["secret"]
            return "Guess a number from 1 to 9: "

        async def step(self, action):
            right = action.text.strip() == self.secret
            return asyncrl.Step(observation="\\nWrong. Again: ", reward=float(right), done=right)

An ``Env`` object lives for one episode at a time and is never shared. Deadlines, retries, truncation and the ledger are
the runtime's; whatever a method raises becomes a failed trajectory with that reason, never the end of the run. What is
the machine's fault and not the task's (a sandbox that did not start, a service that is down) is raised as ``EnvDown``.

An engine that blocks is a ``SyncEnv``: the same three methods as plain functions, played in worker processes.

A program that drives the model itself is one coroutine function, whose second parameter is called ``agent``:

    async def rollout(task, agent):
        messages = [{"role": "user", "content": task.data["question"]}]
        reply = await agent.chat(messages)
        return float(task.data["answer"] in reply.text)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from asyncrl.core.types import Record, Task

__all__ = [
    "Action",
    "Agent",
    "Cost",
    "Env",
    "EnvDown",
    "EpisodeOver",
    "Message",
    "Observation",
    "Reply",
    "Response",
    "Step",
    "SyncEnv",
    "Task",
    "Tool",
    "ToolCall",
    "rows_by",
]

Message = Mapping[str, Any]
"""A chat message: ``{"role": "user", "content": "…"}``."""


Tool = Mapping[str, Any]
"""A tool as OpenAI's API describes it: ``{"type": "function", "function": {"name": …, "description": …, "parameters":
JSON schema}}``."""


RowParser = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""``task.data`` out of a row as its data set has it. Raises ``ValueError`` for one that it cannot use."""
_F = TypeVar("_F", bound=Callable[..., Any])


def rows_by(parse_row: RowParser) -> Callable[[_F], _F]:
    """Decorates a reward or rollout function whose rows go through ``parse_row`` when they are read, as an ``Env`` says
    by its ``parse_row``."""

    def mark(function: _F) -> _F:
        vars(function)["parse_row"] = parse_row
        return function

    return mark


class EnvDown(Exception):
    """The infrastructure failed, not the task: the episode is tried again elsewhere, and counted apart."""


class Observation(Record, frozen=True, kw_only=True):
    """What the model sees next: plain ``text``, or ``messages`` that the model's chat template renders. ``tools``, on
    the first observation of an episode, go to the template too, and calls of them are parsed for ``Action``."""

    text: str = ""
    messages: Sequence[Message] = ()
    tools: Sequence[Tool] = ()


class ToolCall(Record, frozen=True, kw_only=True):
    """One call that the model wrote. ``error`` says why it could not be read; then ``arguments`` is empty."""

    id: str
    name: str
    arguments: Mapping[str, Any] = {}
    error: str = ""


class Action(Record, frozen=True, kw_only=True):
    """One generation: decoded ``text`` (without special tokens), the sampled ``token_ids``, the ``tool_calls`` in it,
    and why it ended: ``stop`` (the model ended its turn) or ``length`` (it ran into a limit)."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str
    turn: int = 0
    tool_calls: Sequence[ToolCall] = ()


Response = Action
"""What a reward function of single-turn work is given."""


class Step(Record, frozen=True, kw_only=True):
    """Answer to an action. ``reward`` values of an episode add up; ``metrics`` of the last step are logged."""

    observation: Observation | str = ""
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = {}


class Cost(Record, frozen=True, kw_only=True):
    """What one environment object takes. ``per_process`` live ones may share a worker process (a ``SyncEnv``'s only);
    ``memory_mb`` of one counts towards the recipe's ``env.memory_mb``, 0: nothing worth counting. An object's first
    reset may take ``startup_s`` longer than ``env.reset_timeout_s``."""

    per_process: int = 1
    memory_mb: int = 0
    startup_s: float = 0.0


class Env:
    """Base class. Keyword arguments of ``__init__`` come from the recipe's ``env.kwargs``.

    ``reusable``: an object serves one episode after another, ``reset`` again without a ``close`` in between; it is
    closed at the end of its life, or after an episode that failed or was cut short. ``deterministic``: the same task
    and actions bring the same observations and rewards, which ``asyncrl env check`` then verifies; so an episode that a
    process did not live to end goes on in another, by the same actions. ``parse_row``, a
    static method: rows go through it when they are read, and those that give the same are taken once.
    """

    cost: ClassVar[Cost] = Cost()
    reusable: ClassVar[bool] = False
    deterministic: ClassVar[bool] = False

    async def reset(self, task: Task) -> Observation | str:
        """Begin an episode of ``task``; the first prompt."""
        raise NotImplementedError(f"{type(self).__name__} must define reset(task)")

    async def step(self, action: Action) -> Step:
        """Apply one generation."""
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    async def close(self) -> None:
        """Free what the episode holds. Called once after every episode (see ``reusable``), also after a failure or a
        cancellation."""


class SyncEnv:
    """``Env`` with plain methods, for engines that block, crash or are not thread-safe.

    Objects live in worker processes, ``cost.per_process`` in each, and calls into one process come one after another.
    A call that misses its deadline costs its process, which is killed and replaced; so does a crash.
    """

    cost: ClassVar[Cost] = Cost()
    reusable: ClassVar[bool] = False
    deterministic: ClassVar[bool] = False

    def reset(self, task: Task) -> Observation | str:
        """As ``Env.reset``."""
        raise NotImplementedError(f"{type(self).__name__} must define reset(task)")

    def step(self, action: Action) -> Step:
        """As ``Env.step``."""
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    def close(self) -> None:
        """As ``Env.close``. Not called where the process was killed: what outlives a process (a container, a remote
        session) needs a limit of its own."""


class EpisodeOver(Exception):
    """Raised to an agent program that asks for more than its episode may have. Left alone, it ends the episode with the
    rewards so far."""


class Reply(Record, frozen=True, kw_only=True):
    """What the model said: the whole ``text``, the ``tool_calls`` in it, and ``message``, which is appended to the
    messages. ``finish_reason`` as in ``Action``; ``logprobs`` belong to ``token_ids``."""

    text: str
    message: Message
    tool_calls: Sequence[ToolCall] = ()
    finish_reason: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    prompt_tokens: int = 0


class Agent(Protocol):
    """The model, as a rollout function has it for one episode.

    Requests may run side by side, unless the recipe has a critic (``gae``). One whose messages go on from an earlier
    request and its reply extends that token sequence; any other begins a new segment of the trajectory. All that was
    generated is trained with the episode's reward; the sampling temperature is the recipe's.
    """

    base_url: str
    """Of an OpenAI-compatible endpoint for this episode, with ``api_key``: the same model for programs in any language.
    Both are empty in simulation."""
    api_key: str
    metrics: dict[str, float]
    """Logged when the episode has ended."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """The reply to chat messages. Raises ``EpisodeOver`` at ``env.max_turns`` and ``rollout.max_tokens``, and
        ``ValueError`` for messages that the chat template refuses."""

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        """What follows plain text, or token ids."""

    async def over(self) -> None:
        """Wait until the episode has been asked for more than ``env.max_turns``, by whichever way."""

    def reward(self, value: float) -> None:
        """Credit the last reply. What the rollout function returns is added to the last one of all."""
