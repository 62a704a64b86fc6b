"""What is asked of the servers, and what they answer, whole."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from asyncrl.core.types import Record, Turn
from asyncrl.ports import Chunk
from asyncrl.runtime.trajectory_server import Start


class Prompt(Record, frozen=True, kw_only=True):
    """What to continue. No version before ``start``'s may generate for it, nor one before ``after``, that of the last
    token generated in it (-1: none). ``home`` holds the first ``prefix`` of its ids. One that is ``pinned`` belongs to
    an evaluation, and only the servers that are set aside for that take it. A single reply may go on from one that was
    ``begun``, and tells ``keep`` now and then what it has got since, with the number of the piece."""

    ids: array[int]
    start: Start
    max_new_tokens: int
    after: int = -1
    temperature: float = 1.0
    top_p: float = 1.0
    home: str | None = None
    prefix: int = 0
    pinned: bool = False
    begun: Turn | None = None
    keep: Callable[[int, Turn], None] | None = None


KEEP_TOKENS = 1024
"""A reply keeps so many tokens at a time, and what it has when it is interrupted: what a kill can cost it."""


class Completion(Record, frozen=True, kw_only=True):
    """One generation, whole, whatever interruptions it had. ``output_ids``, ``logprobs``, ``versions`` are parallel.
    ``waited_s`` of its ``seconds`` it waited for a server."""

    output_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    finish_reason: str
    server: str
    interruptions: int
    waited_s: float
    seconds: float


class Reply:
    """One reply in the making; keeps its tokens over interruptions."""

    __slots__ = (
        "_keep",
        "_kept",
        "_pieces",
        "ended",
        "finish_reason",
        "fruitless",
        "interruptions",
        "logprobs",
        "output_ids",
        "server",
        "versions",
        "waited_s",
    )

    def __init__(self, begun: Turn | None = None, keep: Callable[[int, Turn], None] | None = None) -> None:
        self.output_ids = array("i", begun.output_ids if begun else ())
        self.logprobs = array("f", begun.logprobs if begun else ())
        self.versions = array("i", begun.versions if begun else ())
        self._keep = keep
        self._kept = self._pieces = 0
        self.finish_reason: str | None = None
        self.server = ""
        self.interruptions = 0
        self.fruitless = 0
        """Attempts in a row that brought no token, though nobody here cut them off."""
        self.waited_s = 0.0
        self.ended = 0.0

    def add(self, chunk: Chunk) -> None:
        """What a server sent."""
        self.output_ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        interrupted = chunk.finish_reason == "abort"
        if interrupted:
            self.interruptions += 1
        elif chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
        new = len(self.output_ids) - self._kept
        if self._keep is not None and (new >= KEEP_TOKENS or (interrupted and new)):
            kept, self._kept = self._kept, len(self.output_ids)
            piece = Turn(
                prompt_ids=array("i"),
                output_ids=self.output_ids[kept:],
                logprobs=self.logprobs[kept:],
                versions=self.versions[kept:],
                finish_reason="",
            )
            self._keep(self._pieces, piece)
            self._pieces += 1

    def completed(self, began: float) -> Completion:
        return Completion(
            output_ids=self.output_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=self.finish_reason or "",
            server=self.server,
            interruptions=self.interruptions,
            waited_s=self.waited_s,
            seconds=self.ended - began,
        )
