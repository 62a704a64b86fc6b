"""The model as an agent program sees it: one episode's requests, matched to token sequences (``env.Agent``).

A program sends whole conversations; which of them go on from which is found out here. A request whose messages begin
with those of an earlier one and its reply extends that one's token sequence by ids, so that what was sampled stays as
it was. Any other (a branch, a sub-agent, a history that the program rewrote) begins a new segment of the trajectory; a
branch copies the ids before it. Nothing is changed before a generation is there: a request that fails or is cancelled
leaves no trace, but counts towards ``max_turns``. The program's own time is what passes from the end of one request
until another begins or ends, on whatever branch; it is the environment's time of the turn that had ended last.

    chat(), complete()    wait for: a completion    woken by: LLMProxy; close() ends the wait
"""

from __future__ import annotations

import asyncio
import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from asyncrl.core.types import Record, Turn
from asyncrl.env import EpisodeOver, Message, Reply, Tool, ToolCall
from asyncrl.ports import EngineRejected
from asyncrl.runtime.conversation import ChatTemplate, Conversation, as_unicode
from asyncrl.runtime.generation import Completion, Prompt
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.reward import checked_reward
from asyncrl.runtime.tool_calls import parse_tool_calls, without_tool_calls
from asyncrl.runtime.trajectory_server import Start
from asyncrl.runtime.user_code import EpisodeFailed


class SessionLimits(Record, frozen=True, kw_only=True):
    """``max_turns`` generations in all; ``max_tokens`` of each segment. ``in_order``: segments follow each other in
    time, as a critic needs them. A conversation is then gone on with in a new segment once another had its turn, and a
    request beside another is refused."""

    max_turns: int
    max_new_tokens: int
    max_tokens: int
    in_order: bool = False


class ContextFull(EpisodeOver):
    """The conversation has reached ``rollout.max_tokens``; another one may go on."""


class _Point(Record, frozen=True, kw_only=True):
    """A place where a conversation can be continued: the first ``length`` ids of it. ``thoughts``: before it is
    something that the chat template may drop."""

    conversation: Conversation
    length: int
    version: int
    """Of the last token."""
    server: str
    thoughts: bool = False


class Session:
    """The ``Agent`` of one episode. ``on_busy`` hears when the first generation begins and when none is left."""

    def __init__(
        self,
        *,
        proxy: LLMProxy,
        template: ChatTemplate,
        limits: SessionLimits,
        start: Start,
        temperature: float,
        top_p: float,
        pinned: bool,
        on_busy: Callable[[bool], None],
    ) -> None:
        self._proxy = proxy
        self._template = template
        self._limits = limits
        self._start = start
        self._temperature = temperature
        self._top_p = top_p
        self._pinned = pinned
        self._on_busy = on_busy
        self._conversations: list[Conversation] = []
        self._last: Conversation | None = None
        """Whose last turn ended last."""
        self._idle_since: float | None = asyncio.get_running_loop().time()
        """When the last request ended, if none has begun since: the program's time from then on is not noted yet."""
        self._chats: dict[bytes, _Point] = {}
        """Where a list of messages, by its digest, can be continued."""
        self._texts: list[tuple[str, _Point]] = []
        self._scopes: set[asyncio.Timeout] = set()
        """Of the generations that are under way."""
        self._begun = 0
        self._early = 0.0
        """Reward from before the first generation."""
        self._over = False
        self._spent = asyncio.Event()
        self.base_url = ""
        self.api_key = ""
        self.metrics: dict[str, float] = {}
        self.reset_s = 0.0
        """The program's time before the first reply."""
        self.finish_reason = "stop"

    # --- what the program calls

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        messages = [plain_message(m) for m in messages]
        if not messages:
            raise ValueError("messages: empty; there is nothing to answer")
        digests = _digests(messages, tools)
        known = max((i for i, digest in enumerate(digests) if digest in self._chats), default=0)
        point = self._chats.get(digests[known])
        if point is not None and known == len(messages):
            raise ValueError("messages: the last one is the model's own reply; add what it is to answer")
        enough = self._limits.max_tokens
        if point is not None:
            ids, kept = self._template.extension(self._last_id(point), messages[known:], enough)
            if point.thoughts and not kept and self._template.drops():
                point = None
        if point is None:
            ids = self._template.start(messages, tools, enough)
        turn = self._begun
        completion, text, end = await self._turn(point, ids, max_tokens, stop)
        thoughts = self._template.has_thoughts(text) or (point is not None and point.thoughts)
        end = msgspec.structs.replace(end, thoughts=thoughts)
        calls = parse_tool_calls(text, self._template.parser, turn) if tools else []
        message = _reply_message(text, calls, self._template)
        whole = {"role": "assistant", "content": text}
        for said in (message, whole, without_stop(message, stop), without_stop(whole, stop)):
            self._chats[_digest(digests[-1], said)] = end
        return _reply(completion, text, message, calls, prompt_tokens=end.length - len(completion.output_ids))

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        point: _Point | None
        if isinstance(prompt, str):
            earlier = ((t, p) for t, p in reversed(self._texts) if prompt.startswith(t))
            known, point = next(earlier, ("", None))
            ids = self._template.encode(prompt[len(known) :], self._limits.max_tokens)
        else:
            if not all(0 <= i < self._template.tokenizer.vocab_size for i in prompt):
                raise ValueError("prompt: has ids outside the model's vocabulary")  # some servers die of them
            ids = array("i", prompt)
            points = (p for _, p in reversed(self._texts) if ids[: p.length] == p.conversation.ids[: p.length])
            point = next(points, None)
            if point is not None:
                ids = ids[point.length :]
            prompt = self._template.tokenizer.decode(list(prompt))
        completion, text, end = await self._turn(point, ids, max_tokens, stop)
        self._texts.append((prompt + text, end))
        message = {"role": "assistant", "content": text}
        return _reply(completion, text, message, [], prompt_tokens=end.length - len(completion.output_ids))

    async def over(self) -> None:
        await self._spent.wait()

    def reward(self, value: float) -> None:
        if self._over:
            raise EpisodeOver("the episode has ended")
        value = checked_reward("reward", value)
        if self._last is None:
            self._early += value
        else:
            self._last.add_reward(value)

    # --- what the player calls

    def credit_last(self, value: float) -> None:
        """What the whole episode brought."""
        if self._last is not None:
            self._last.add_reward(value)

    @property
    def turns(self) -> list[Turn]:
        """Of all segments, one after another."""
        turns: list[Turn] = []
        for conversation in self._conversations:
            first, *rest = conversation.turns
            turns += (msgspec.structs.replace(first, new_segment=bool(turns)), *rest)
        if turns and self._early:
            turns[0] = msgspec.structs.replace(turns[0], reward=turns[0].reward + self._early)
        return turns

    def close(self) -> None:
        """The episode has ended: what is still being generated is given up."""
        self._note_idle()
        self._over = True
        for scope in self._scopes:
            scope.reschedule(0.0)

    # --- one generation

    def _note_idle(self, *, again: bool = False) -> None:
        """The program's time up to now; ``again``: what follows is its time too."""
        now = asyncio.get_running_loop().time()
        idle_s = 0.0 if self._idle_since is None else now - self._idle_since
        self._idle_since = now if again else None
        if self._last is None:
            self.reset_s += idle_s
        else:
            self._last.add_env_seconds(idle_s)

    def _last_id(self, point: _Point) -> int:
        return point.conversation.ids[point.length - 1]

    async def _turn(
        self, point: _Point | None, ids: array[int], max_tokens: int | None, stop: Sequence[str]
    ) -> tuple[Completion, str, _Point]:
        """Generate behind ``ids`` behind ``point``; the completion, its text, and where it ends."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: {max_tokens}; must be at least 1")
        if self._limits.in_order and self._scopes:
            raise ValueError(
                'one request at a time: algorithm.advantage = "gae" judges each by what follows it; wait for the reply'
            )
        prompt = ids if point is None else point.conversation.ids[: point.length] + ids
        if not prompt:
            raise ValueError("the prompt is empty, so there is nothing to continue")
        if self._begun >= self._limits.max_turns and not self._over:
            self.finish_reason = "length"
            self._spent.set()
            raise EpisodeOver(f"the episode has had its env.max_turns = {self._limits.max_turns} generations")
        room = self._limits.max_tokens - len(prompt)
        if room < 1:
            self.finish_reason = "length"
            # OpenAI's words, by which clients that see no code know it.
            full = f"this model's maximum context length is {self._limits.max_tokens} tokens (rollout.max_tokens)"
            raise ContextFull(f"{full}; the prompt has {len(prompt)}")
        completion = await self._generate(
            Prompt(
                ids=prompt,
                start=self._start,
                max_new_tokens=min(room, self._limits.max_new_tokens, max_tokens or room),
                temperature=self._temperature,
                top_p=self._top_p,
                pinned=self._pinned,
                home=None if point is None else point.server,
                prefix=0 if point is None else point.length,
                after=-1 if point is None else point.version,
            )
        )
        completion = self._cut(completion, stop)
        if point is not None and self._goes_on(point):
            conversation = point.conversation
            conversation.append(ids)
        else:
            conversation = Conversation(self._template)
            conversation.append(prompt)
            self._conversations.append(conversation)
        text = conversation.add_output(
            completion.output_ids, completion.logprobs, completion.versions, completion.finish_reason
        )
        conversation.credit(0.0, (completion.waited_s, completion.seconds - completion.waited_s, 0.0))
        self._last = conversation
        self.finish_reason = completion.finish_reason
        return (
            completion,
            text,
            _Point(
                conversation=conversation,
                length=len(conversation.ids),
                version=completion.versions[-1],
                server=completion.server,
            ),
        )

    def _goes_on(self, point: _Point) -> bool:
        """Whether what comes behind it is of the same segment."""
        conversation = point.conversation
        return len(conversation.ids) == point.length and (not self._limits.in_order or conversation is self._last)

    async def _generate(self, prompt: Prompt) -> Completion:
        if self._over:
            raise EpisodeOver("the episode has ended")
        self._begun += 1
        self._note_idle()
        if not self._scopes:
            self._on_busy(True)
        scope = asyncio.timeout(None)
        self._scopes.add(scope)
        try:
            async with scope:
                [completion] = await self._proxy.generate(prompt)
        except TimeoutError:
            raise EpisodeOver("the episode has ended") from None
        except EngineRejected as error:
            raise EpisodeFailed("generate", str(error), infra=True) from error
        finally:
            self._scopes.discard(scope)
            if not self._over:
                self._note_idle(again=True)
                if not self._scopes:
                    self._on_busy(False)
        if self._over:
            raise EpisodeOver("the episode has ended")
        return completion

    def _cut(self, completion: Completion, stop: Sequence[str]) -> Completion:
        """Up to the token with which the first stop string is there, as if the server had ended there."""
        ids, decode = completion.output_ids, self._template.tokenizer.decode
        stop = [s for s in stop if s]
        if not stop or not any(s in decode(ids) for s in stop):
            return completion
        end = bisect_left(range(len(ids) + 1), True, key=lambda n: any(s in decode(ids[:n]) for s in stop))
        return msgspec.structs.replace(
            completion,
            output_ids=ids[:end],
            logprobs=completion.logprobs[:end],
            versions=completion.versions[:end],
            finish_reason="stop",
        )


def before_stop(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the first stop string in it, as OpenAI's API gives it to clients."""
    return text[: min((at for s in stop if s and (at := text.find(s)) >= 0), default=len(text))]


def without_stop(message: Message, stop: Sequence[str]) -> dict[str, Any]:
    """A reply as a client of that API has it, and sends it back."""
    return {**message, "content": before_stop(message["content"], stop)}


def plain_message(message: Message) -> dict[str, Any]:
    """A message of OpenAI's API as chat templates take it: content as text, arguments of calls as objects. Raises
    ``ValueError``."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages: not a chat message: {str(message)[:100]}")
    content = message.get("content")
    if isinstance(content, list):
        try:
            content = "".join(part["text"] for part in content)
        except (TypeError, KeyError):
            raise ValueError("messages: only text can be content") from None
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"messages: only text can be content, not {type(content).__name__}")
    plain: dict[str, Any] = {"role": message["role"], "content": as_unicode(content or "")}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = message[name]
    if message.get("tool_calls"):
        try:
            plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
        except (TypeError, KeyError, AttributeError):
            raise ValueError(f"messages: no tool calls: {str(message['tool_calls'])[:100]}") from None
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ValueError(f"messages: the arguments of a call are no JSON: {arguments[:100]}") from None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"messages: the arguments of a call are no JSON object: {str(arguments)[:100]}")
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _digests(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[bytes]:
    """Of the first 0, 1, 2 … messages, the tools being part of all."""
    digests = [blake2b(msgspec.json.encode(tools, order="deterministic"), digest_size=16).digest()]
    for message in messages:
        digests.append(_digest(digests[-1], message))
    return digests


def _digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """What programs leave out or trim when they send a reply back makes no difference."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    said = msgspec.json.encode((message["role"], content, calls), order="deterministic")
    return blake2b(before + said, digest_size=16).digest()


def _reply_message(text: str, calls: Sequence[ToolCall], template: ChatTemplate) -> dict[str, Any]:
    """The reply as a message; a call that cannot be read stays in the text."""
    if not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": without_tool_calls(text, template.parser),
        "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in calls
        ],
    }


def _reply(
    completion: Completion, text: str, message: Message, calls: Sequence[ToolCall], *, prompt_tokens: int
) -> Reply:
    return Reply(
        text=text,
        message=message,
        tool_calls=calls,
        finish_reason=completion.finish_reason,
        token_ids=completion.output_ids,
        logprobs=completion.logprobs,
        prompt_tokens=prompt_tokens,
    )
