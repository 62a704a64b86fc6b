"""What is asked of the servers, and what they answer, whole."""

from __future__ import annotations

from array import array

from asyncrl.core.types import Record
from asyncrl.runtime.trajectory_server import Start


class Prompt(Record, frozen=True, kw_only=True):
    """What to continue. No version before ``start``'s may generate for it, nor one before ``after``, that of the last
    token generated in it (-1: none). ``home`` holds the first ``prefix`` of its ids. One that is ``pinned`` belongs to
    an evaluation, and only the servers that are set aside for that take it."""

    ids: array[int]
    start: Start
    max_new_tokens: int
    after: int = -1
    temperature: float = 1.0
    top_p: float = 1.0
    home: str | None = None
    prefix: int = 0
    pinned: bool = False


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

    def __init__(self) -> None:
        self.output_ids = array("i")
        self.logprobs = array("f")
        self.versions = array("i")
        self.finish_reason: str | None = None
        self.server = ""
        self.interruptions = 0
        self.fruitless = 0
        """Attempts in a row that brought no token, though nobody here cut them off."""
        self.waited_s = 0.0
        self.ended = 0.0

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
