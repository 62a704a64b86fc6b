"""ReplyReader: whatever way a server streams, the chunks are the reply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engine.replies import BadReply, ReplyReader
from asyncrl.wire import FinishReason, GenerateReply, MetaInfo, WeightSpan


def reply(
    ids: list[int],
    total: int,
    *,
    finish: str | None = None,
    rows: list[int] | None = None,
    index: int = 0,
    version: str = "0",
    spans: list[WeightSpan] | None = None,
) -> GenerateReply:
    return GenerateReply(
        index=index,
        output_ids=ids,
        meta_info=MetaInfo(
            completion_tokens=total,
            finish_reason=FinishReason(type=finish) if finish else None,
            output_token_logprobs=[(-i / 8, i, None) for i in (ids if rows is None else rows)],
            weight_version=version,
            weight_versions=spans,
        ),
    )


@given(
    tokens=st.lists(st.integers(0, 1000), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    cumulative=st.booleans(),
    n=st.integers(1, 3),
)
def test_chunks_put_together_are_the_reply(tokens: list[int], cuts: list[int], cumulative: bool, n: int) -> None:
    reader = ReplyReader(n, int)
    ends = [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    seen: dict[int, list[tuple[int, float, int]]] = {i: [] for i in range(n)}
    for number, end in enumerate(ends):
        start = 0 if cumulative or number == 0 else ends[number - 1]
        last = number == len(ends) - 1
        for index in range(n):
            chunk = reader.read(
                reply(tokens[start:end], end, finish="stop" if last else None, index=index, version="7")
            )
            if chunk is not None:
                assert chunk.index == index
                assert chunk.finish_reason == ("stop" if last else None)
                seen[index] += zip(chunk.output_ids, chunk.logprobs, chunk.versions, strict=True)
    assert seen == {index: [(i, -i / 8, 7) for i in tokens] for index in range(n)}
    assert reader.unfinished == []


@given(
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4),
    data=st.data(),
)
def test_tokens_get_the_version_of_their_span(spans: list[tuple[int, int]], data: st.DataObject) -> None:
    versions = [version for version, length in spans for _ in range(length)]
    total = len(versions)
    first = data.draw(st.integers(0, total))
    named, at = [], 0
    for version, length in spans:
        named.append(WeightSpan(version=str(version), start=at, end=at + length))
        at += length
    reader = ReplyReader(1, int)
    reader.read(reply(list(range(first)), first, version="0"))
    chunk = reader.read(reply(list(range(first, total)), total, finish="stop", spans=named))
    assert chunk is not None
    assert list(chunk.versions) == versions[first:]


def test_the_echo_of_an_abort_in_the_queue_brings_no_token_twice() -> None:
    """SGLang repeats the last token there, beside all logprobs, of a request that was retracted and then aborted."""
    reader = ReplyReader(1, int)
    reader.read(reply([5, 6, 7], 3))
    chunk = reader.read(reply([7], 3, finish="abort", rows=[5, 6, 7]))
    assert chunk is not None
    assert (list(chunk.output_ids), list(chunk.logprobs), chunk.finish_reason) == ([], [], "abort")


@pytest.mark.parametrize("unread", [[7, 8, 9, 10], [7, 7, 8, 9], [7, 7, 7, 8, 8]])
def test_that_echo_in_one_line_with_tokens_that_were_not_read_yet(unread: list[int]) -> None:
    """Its token stands after those that are new, and none of them is left out for it."""
    reader = ReplyReader(1, int)
    reader.read(reply([5, 6], 2))
    chunk = reader.read(reply([*unread, unread[-1]], 2 + len(unread), finish="abort", rows=[*unread, 5, 6, *unread]))
    assert chunk is not None
    assert (list(chunk.output_ids), chunk.finish_reason) == (unread, "abort")
    assert list(chunk.logprobs) == [-i / 8 for i in unread]


def test_an_abort_in_the_queue_without_the_usual_fields() -> None:
    chunk = ReplyReader(1, lambda text: 0).read(
        GenerateReply(meta_info=MetaInfo(finish_reason=FinishReason(type="abort", message="Abort in waiting queue")))
    )
    assert chunk is not None
    assert (list(chunk.output_ids), chunk.finish_reason, chunk.cached_tokens) == ([], "abort", 0)


def test_a_cumulative_line_may_hold_more_than_it_counts() -> None:
    """With n > 1 SGLang's lists grow between counting and sending."""
    reader = ReplyReader(1, int)
    first = reader.read(reply([1, 2, 3, 4], 2))
    second = reader.read(reply([1, 2, 3, 4, 5], 5, finish="stop"))
    assert first is not None and second is not None
    assert [*first.output_ids, *second.output_ids] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("case", "bad"),
    [
        ("fewer tokens than counted", reply([1], 3)),
        ("logprobs missing", reply([1, 2], 2, rows=[1])),
        ("logprobs of other tokens", reply([1, 2], 2, rows=[1, 3])),
        ("logprobs of the tokens before", reply([2, 3, 3], 3, rows=[1, 2, 3])),
        ("unknown index", reply([1], 1, index=1)),
        ("negative index", reply([1], 1, index=-1)),
        ("more tokens than counted at the end", reply([1, 2], 1, finish="stop")),
        (
            "versions do not cover the tokens",
            reply([1, 2], 2, spans=[WeightSpan(version="1", start=0, end=1), WeightSpan(version="2", start=5, end=6)]),
        ),
    ],
)
def test_contradictions_are_refused(case: str, bad: GenerateReply) -> None:
    with pytest.raises(BadReply):
        ReplyReader(1, int).read(bad)


def test_tokens_after_the_end_are_refused() -> None:
    reader = ReplyReader(1, int)
    reader.read(reply([1], 1, finish="stop"))
    with pytest.raises(BadReply):
        reader.read(reply([1, 2], 2))


def test_tokens_that_are_taken_back_are_refused() -> None:
    reader = ReplyReader(1, int)
    reader.read(reply([1, 2, 3], 3))
    with pytest.raises(BadReply):
        reader.read(reply([1, 2], 2))


def test_cut_ends_what_is_not_finished() -> None:
    reader = ReplyReader(3, int)
    reader.read(reply([1], 1, finish="stop", index=1))
    assert [(chunk.index, chunk.finish_reason) for chunk in reader.cut()] == [(0, "abort"), (2, "abort")]
    assert reader.unfinished == []
