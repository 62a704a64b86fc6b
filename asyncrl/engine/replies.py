"""What the lines of a /generate reply say, as chunks of new tokens. Pure: no I/O, no clock.

SGLang has two ways to stream. With ``--incremental-streaming-output`` a line holds only new tokens, without it all
tokens so far; and the last line of a request that is aborted in the queue mixes both. ``completion_tokens`` tells them
apart on each line, so no setting has to be known: a list that holds at least that many tokens is whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from asyncrl.ports import Chunk
from asyncrl.wire import GenerateReply, WeightSpan

LEAST_LOGPROB, LARGEST_LOGPROB = -1e38, 1e-2
"""What float32 can hold, and rounding in the servers' low precision."""


class BadReply(ValueError):
    """A reply that contradicts itself."""


class ReplyReader:
    """Reads the ``n`` replies of one request; ``version_of`` maps the server's version strings to integers, and ids
    are below ``vocabulary``."""

    __slots__ = ("_finished", "_seen", "_version_of", "_vocabulary", "heard")

    def __init__(self, n: int, version_of: Callable[[str], int], vocabulary: int = 2**31) -> None:
        self._vocabulary = vocabulary
        self._seen = [0] * n
        self._finished = [False] * n
        self._version_of = version_of
        self.heard = False
        """True once a line came: the server surely knows the request."""

    @property
    def unfinished(self) -> list[int]:
        """Indices of the replies whose last chunk has not come."""
        return [i for i, done in enumerate(self._finished) if not done]

    @property
    def replies(self) -> int:
        return len(self._seen)

    def read(self, reply: GenerateReply) -> Chunk | None:
        """The new tokens of one line, or ``None`` if it has none. Raises ``BadReply``."""
        self.heard = True
        index, meta = reply.index, reply.meta_info
        if not 0 <= index < len(self._seen) or self._finished[index]:
            raise BadReply(f"unexpected reply index {index}")
        seen, ids, rows = self._seen[index], reply.output_ids, meta.output_token_logprobs or []
        total = len(ids) if len(ids) >= meta.completion_tokens else meta.completion_tokens
        new = total - seen
        # The last ones: right for both ways of streaming. (A slice from -0 would be everything.) An abort in the queue
        # adds one to the ids, and not to the logprobs: where the ids are not as many as new, the logprobs name them.
        if len(rows) != new:
            rows = rows[-new:] if new else []
        if len(ids) != new:
            ids = [row[1] for row in rows]
        if not len(ids) == len(rows) == new:
            raise BadReply(f"{new} new tokens, but {len(ids)} ids and {len(rows)} logprobs")
        if new and (rows[0][1] != ids[0] or rows[-1][1] != ids[-1]):
            raise BadReply("the logprobs are those of other tokens")
        logprobs = [row[0] for row in rows]
        if new:
            if not LEAST_LOGPROB < min(logprobs) <= max(logprobs) < LARGEST_LOGPROB:
                raise BadReply(f"logprobs from {min(logprobs):g} to {max(logprobs):g}: none may be infinite or above 0")
            if not 0 <= min(ids) <= max(ids) < self._vocabulary:
                bad = next(i for i in ids if not 0 <= i < self._vocabulary)
                raise BadReply(f"token {bad} is outside the model's vocabulary of {self._vocabulary}")
        finish = meta.finish_reason
        if finish is not None:
            if total != meta.completion_tokens:
                raise BadReply(f"{total} tokens, but completion_tokens is {meta.completion_tokens}")
            self._finished[index] = True
        elif not new:
            return None
        self._seen[index] = total
        return Chunk(
            index=index,
            output_ids=array("i", ids),
            logprobs=array("f", logprobs),
            versions=self._versions(meta.weight_version, meta.weight_versions, seen, total),
            finish_reason=None if finish is None else finish.type,
            cached_tokens=meta.cached_tokens,
        )

    def _versions(self, current: str, spans: list[WeightSpan] | None, start: int, end: int) -> array[int]:
        """Version of each token in ``start``…``end``: by the spans (usually only the last line has them), else the
        one that the line names. A span cannot be taken back for tokens of earlier lines."""
        if not spans or len(spans) == 1:
            return array("i", [self._version_of(spans[0].version if spans else current)]) * (end - start)
        versions = array("i")
        for span in spans:
            versions += array("i", [self._version_of(span.version)]) * (min(span.end, end) - max(span.start, start, 0))
        if len(versions) != end - start:
            raise BadReply(f"weight_versions do not cover tokens {start} to {end}")
        return versions

    def cut(self) -> list[Chunk]:
        """Last chunks of all replies that are not finished, for a request that was given up."""
        chunks = [
            Chunk(index=i, output_ids=array("i"), logprobs=array("f"), versions=array("i"), finish_reason="abort")
            for i in self.unfinished
        ]
        self._finished = [True] * len(self._finished)
        return chunks
