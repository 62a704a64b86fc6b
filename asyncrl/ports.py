"""Ports: what the runtime needs from the world. Real and simulated worlds implement them; ``build.py`` wires them.

Every call is bounded by a deadline inside the adapter; the errors below are all that may come out of one.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from asyncrl.core.advantage import Advantage
from asyncrl.core.journal import Entry, SavedStep
from asyncrl.core.types import Batch, Record, Trajectory
from asyncrl.env import Env

T = TypeVar("T")


class EngineError(Exception):
    """An inference server could not be reached, died, or broke off: retry elsewhere. One line, names the server."""


class EngineRejected(EngineError):
    """The server understood the request and refuses it (too long, bad token id …): a retry cannot help."""


class TrainerError(Exception):
    """The trainer died or refused a step. One line with the remedy."""


class TrainerDied(TrainerError):
    """The training job has ended, or answers no more; ``Trainer.connect`` starts another. One line that says why."""


class CheckpointFailed(TrainerError):
    """A checkpoint was not written; training can go on. One line that names the folder."""


class CheckpointLost(CheckpointFailed):
    """The job died while it wrote the checkpoint; one that is begun now may succeed."""


class RemoteError(Exception):
    """User code failed in another process: its error in one line, and ``details``, its traceback there."""

    def __init__(self, error: str, details: str = "") -> None:
        super().__init__(error)
        self.details = details


class TooManyStuck(Exception):
    """User code hung in more workers than may be written off: the run ends."""


class GenerateRequest(Record, frozen=True, kw_only=True):
    """One prompt to continue. ``n`` > 1 draws several replies at once (prompt replication off)."""

    rid: str
    input_ids: array[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    """Go on to ``max_new_tokens``, whatever is sampled (for measurements)."""
    n: int = 1
    kv_from: str = ""
    """``EngineInfo.kv_url`` of another server that has KV of these ids, by the weights that this one holds."""


class Chunk(Record, frozen=True, kw_only=True):
    """New tokens of reply ``index`` since its last chunk (never cumulative). The last chunk of a reply has
    ``finish_reason`` ``stop``, ``length`` or ``abort``; the columns (int32, float32, int32) are parallel."""

    index: int = 0
    output_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    finish_reason: str | None = None
    cached_tokens: int = 0


class EngineInfo(Record, frozen=True, kw_only=True):
    """What a server says of itself when it is connected."""

    name: str
    version: int
    max_running_requests: int
    max_total_tokens: int
    context_length: int
    kv_url: str = ""
    """Where other servers take KV from it; empty: nowhere."""


class EngineLoad(Record, frozen=True, kw_only=True):
    """A server's own account of its load."""

    running: int
    waiting: int
    used_tokens: int


class Engine(Protocol):
    """One inference server (DESIGN.md §7). Versions are integers; the adapter maps them to the server's strings."""

    name: str
    ranks: int
    """Members that it is in a process group of weights: its tensor-parallel ranks, as ``connect`` last found them."""

    async def connect(self, within_s: float | None = None) -> EngineInfo:
        """Wait until the server is healthy, for ``within_s`` or what the recipe says, and describe it. Raises
        ``EngineError``."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Stream a completion. Ends after each of the ``n`` replies gave its last chunk. Raises ``EngineError``;
        tokens already yielded stay valid. Closing the iterator early aborts the request on the server."""

    async def abort(self, rid: str) -> None:
        """Interrupt one request: its stream ends with finish_reason ``abort`` and what was generated so far."""

    async def pause(self) -> None:
        """Interrupt every request (each stream ends with ``abort``) and hold new ones, until ``resume``."""

    async def resume(self) -> None:
        """Serve again after ``pause``. Harmless when not paused."""

    async def load_from_disk(self, path: str, version: int) -> None:
        """Replace the weights in place by a Hugging Face folder's. Call while paused; drops the prefix cache."""

    async def join_group(self, address: str, port: int, rank: int, world_size: int, group: str, backend: str) -> None:
        """Join the process group over which the trainer broadcasts weights, as ``ranks`` members from ``rank`` on.
        Blocks until all have joined."""

    async def load_from_group(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        version: int,
        checksums: Sequence[int] = (),
    ) -> None:
        """Receive a weight set that rank 0 broadcasts at the same time. Call while paused. ``checksums``, if any, are
        those of the tensors, for a server that can compare."""

    async def health(self) -> bool:
        """True if the server answers within a short deadline. Never raises for an unhealthy server."""

    async def load(self) -> EngineLoad:
        """Running and waiting requests and used KV tokens."""

    async def close(self) -> None:
        """Close client connections. The server goes on, and serves again if it was paused."""


class StepResult(Record, frozen=True, kw_only=True):
    """Outcome of one train step. ``checksum`` tells the new weights from others; equal weights have the same on
    equally many ranks. ``repeats``: the same step once more would give the same weights, bit for bit."""

    version: int
    metrics: dict[str, float]
    checksum: int = 0
    repeats: bool = True


class Trainer(Protocol):
    """The training job behind rank 0 (DESIGN.md §8). Raises ``TrainerError``, and ``TrainerDied`` where ``connect``
    can start a new job in place of the one that ended."""

    async def connect(self) -> int:
        """Start the job, if there is none that can be used, from the newest complete checkpoint, or else the initial
        model. Wait until every rank is ready (bounded); the version of its weights."""

    async def watch(self) -> None:
        """Wait for the job's death, and raise ``TrainerDied``."""

    async def feed(self, part: Batch, advantages: Sequence[Advantage]) -> bool:
        """Begin with groups that are certain of ``part.step``'s batch, and of its first mini-batch; call it again with
        others. True when passes were run, False when they wait for more to fill one. What was fed is used by the
        ``train_step`` of the same step, and dropped by one of another."""

    async def train_step(self, batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
        """Train on ``batch`` (one advantage a trajectory, in ``batch.trajectories``' order): version step → step+1."""

    async def save(self, folder: str) -> int:
        """Begin the checkpoint ``folder/version-N`` of the current weights, N: a Hugging Face folder with the trainer's
        state in it. Returns N when training may go on, which first waits for the checkpoint before. Raises
        ``CheckpointFailed`` if it cannot be begun."""

    async def saved(self) -> None:
        """Wait until the checkpoint that was begun last is complete. Raises ``CheckpointFailed``."""

    async def doing(self) -> str:
        """What the job does now, in words that change as it gets on; empty where it does not say. Never raises."""

    def give_up(self) -> None:
        """The job does not get on: the next ``connect`` starts another, if it can."""

    async def close(self) -> None:
        """End the job and wait until its processes are gone (bounded)."""


class WeightTransport(Protocol):
    """Moves a version from the trainer to servers: ``prepare`` holds the trainer, ``arrive`` nobody, ``deliver`` the
    servers, which are paused. Deliveries to different servers may run at once, but not beside ``prepare``."""

    def forget(self) -> None:
        """The trainer or a server was started again: no channel between them can be used any more."""

    async def prepare(self, version: int) -> None:
        """Take ``version`` from the trainer (gather, write), so that it may train on."""

    async def arrive(self, engines: Sequence[Engine], version: int) -> None:
        """Wait until ``version`` lies where these servers load it from, as far as that may take time of its own. It may
        run beside a train step and while servers generate. Raises ``TrainerError``."""

    async def deliver(self, engines: Sequence[Engine], version: int) -> None:
        """Load ``version`` into these servers. Raises ``EngineError`` or ``TrainerError``."""

    async def close(self) -> None:
        """Free the channel and what it stored."""


class Blocking(Protocol):
    """Runs blocking work off the loop (rule 8): worker threads in reality, a drawn delay in simulation."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """``fn(*args)`` on a worker. Cancelling the wait abandons the worker, which is replaced; ``TooManyStuck`` when
        that happened too often."""

    async def close(self) -> None: ...


class EnvSource(Protocol):
    """Where an episode's environment comes from, and goes back to."""

    @property
    def keeps_deadlines(self) -> bool:
        """Its environments end a call that takes too long by themselves, with ``RemoteError``."""

    async def acquire(self) -> Env:
        """An environment to ``reset``; waits for a place. Raises what its constructor raises."""

    def release(self, env: Env, *, whole: bool) -> Coroutine[Any, Any, None] | None:
        """The episode is over. ``whole``: without an error or a cancellation, so that a reusable one can go on. What is
        still to be awaited for it, if anything."""

    async def run(self) -> None:
        """Beside the run, until cancelled; then nothing is left open."""


class Tokenizer(Protocol):
    """Text ⇄ token ids of the policy's model."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Ids that end a turn."""

    @property
    def vocab_size(self) -> int:
        """Ids are less than this."""

    @property
    def chat_template(self) -> str:
        """The template's source; empty if there is none."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, special tokens recognised, none added. Raises ``ValueError`` for what is no valid text."""

    def beginning(self, text: str, tokens: int) -> str:
        """As much of ``text`` as has that many tokens for certain, if it is long; else all of it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The chat template's text. Raises ``ValueError`` if there is no template or if it refuses the messages."""


class StepMetrics(Record, frozen=True, kw_only=True):
    """One finished train step as the controller saw it. Times are seconds of loop time; ``at`` is when it was trained.

    ``seconds`` is the whole step: ``update_s`` (the weights that it starts from, to the servers), ``wait_s`` (for the
    batch) and ``train_s``. ``streamed_s`` is what of ``train_s`` was begun before the batch was complete.
    ``tokens`` counts what the servers generated since the process began. ``trainer`` is ``StepResult.metrics``;
    ``buffer``, ``envs`` (episodes retried and failed since the run began) and ``ledger`` are counts by name at ``at``.
    """

    batch: Batch
    at: float
    seconds: float
    wait_s: float
    train_s: float
    update_s: float
    streamed_s: float = 0.0
    tokens: int
    trainer: Mapping[str, float] = {}
    buffer: Mapping[str, int] = {}
    envs: Mapping[str, int] = {}
    ledger: Mapping[str, int] = {}


class Observer(Protocol):
    """Hears what happens. Calls are cheap, never wait, and never raise for I/O. Times are loop time.

    A track is a lane of the trace: ``controller``, ``trainer``, a server's name, ``env 17``. The report looks for the
    spans ``train`` on ``trainer`` (several a step where it streams) and ``update`` on a server's track, each with
    ``version`` (trained, loaded) in args.
    """

    def step(self, metrics: StepMetrics) -> None:
        """A train step ended."""

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        """A trajectory reached its final ledger state (``consumed``, ``filtered``, ``surplus`` …)."""

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        """A server's number of running requests or its version changed, or it came up or went down."""

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = ...) -> None:
        """Something lasted from ``start`` to ``end``."""

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] = ...) -> None:
        """Something happened at one moment."""

    def counter(self, name: str, at: float, value: float) -> None:
        """The newest value of a quantity, by slash path. Progress shows ``rollout/waiting``, ``rollout/tokens`` (since
        the run began), ``buffer/reserved``, ``buffer/occupied`` (groups), ``envs/failed_task``,
        ``envs/failed_infra`` and ``envs/retried``."""

    def eval(self, version: int, accuracy: float, n: int, details: Mapping[str, float] = ...) -> None:
        """Policy ``version`` played ``n`` held-out episodes; ``details`` are those of ``core.evaluation``."""


class RunStore(Protocol):
    """Where a run's state outlives its processes. ``keeps``: ``trained_on`` can be asked."""

    keeps: bool

    def put(self, entry: Entry) -> None:
        """Remember ``entry``, behind all before it. Never waits."""

    async def committed(self) -> None:
        """Wait until everything that was put is durable."""

    async def fill(self, trajectories: Sequence[Trajectory]) -> None:
        """Their tokens are about to be needed: those that were put aside, to save memory, are there afterwards."""

    async def trained_on(self, step: int) -> SavedStep:
        """What a step since the newest checkpoint was trained on."""


class NoStore:
    """Forgets everything: simulations, and tests of what is around it."""

    keeps = False

    def put(self, entry: Entry) -> None:
        pass

    async def committed(self) -> None:
        pass

    async def fill(self, trajectories: Sequence[Trajectory]) -> None:
        pass

    async def trained_on(self, step: int) -> SavedStep:
        raise LookupError(step)
