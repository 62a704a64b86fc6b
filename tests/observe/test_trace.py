from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.busy import Segment
from asyncrl.observe.run_dir import RunDirError
from asyncrl.observe.trace import BUSY, TraceEncoder, read_trace

tracks = st.sampled_from(["server 0", "server 1", "trainer", "env 3"])
spans = st.lists(st.tuples(tracks, st.integers(0, 50), st.integers(0, 20)), max_size=60)


@given(spans)
def test_spans_survive_and_none_overlap_on_a_thread(made):
    """A span is told when it ends, so a track's spans come in the order of their ends."""
    encoder = TraceEncoder(100.0)
    made.sort(key=lambda span: span[1] + span[2])
    data = b"".join(
        encoder.span(track, "s", 100.0 + start, 100.0 + start + length, {"n": i})
        for i, (track, start, length) in enumerate(made)
    )
    events = json.loads(data + encoder.end())
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    found = {}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for e in events:
        if e["ph"] == "X":
            threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
            found[e["args"]["n"]] = (e["cat"], e["ts"], e["dur"])
            assert names[e["pid"], e["tid"]].startswith(e["cat"])
    assert found == {i: (track, start * 10**6, length * 10**6) for i, (track, start, length) in enumerate(made)}
    for intervals in threads.values():
        intervals.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(intervals))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=60))
def test_a_track_has_as_many_threads_as_it_had_spans_at_once(made):
    encoder = TraceEncoder(0.0)
    intervals = sorted(((start, start + length) for start, length in made), key=lambda interval: interval[1])
    data = b"".join(encoder.span("server 0", "request", start, end, {}) for start, end in intervals)
    at_once = max(sum(a <= start < b for a, b in intervals) for start, _ in intervals)
    assert len({e["tid"] for e in json.loads(data + encoder.end()) if e["ph"] == "X"}) == at_once


def every_kind() -> tuple[bytes, bytes]:
    encoder = TraceEncoder(0.0)
    body = encoder.busy("server 0", Segment(start=0.0, end=1.5, version=3))
    body += encoder.span("trainer", "train", 1.0, 2.0, {"version": 3})
    body += encoder.instant("controller", "suspend", 2.0, {"why": "update"})
    body += encoder.counter("rollout/waiting", 2.5, 7.0)
    return body, encoder.end()


def test_a_finished_trace_is_json_with_named_processes():
    body, end = every_kind()
    events = json.loads(body + end)
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert sorted(processes) == ["controller", "counters", "server", "trainer"]
    assert len(set(processes.values())) == 4
    busy, train, instant, counter = (e for e in events if e["ph"] != "M")
    assert (busy["ph"], busy["name"], busy["cat"], busy["ts"], busy["dur"]) == ("X", "v3", BUSY, 0, 1_500_000)
    assert busy["args"] == {"server": "server 0", "version": 3}
    assert (train["pid"], train["ts"], train["dur"]) == (processes["trainer"], 1_000_000, 1_000_000)
    assert (instant["ph"], instant["s"], instant["ts"], instant["args"]) == ("i", "t", 2_000_000, {"why": "update"})
    assert (counter["ph"], counter["ts"], counter["args"]) == ("C", 2_500_000, {"value": 7.0})


def test_a_killed_trace_lacks_only_its_bracket_and_reads_up_to_the_cut(tmp_path: Path):
    body, end = every_kind()
    whole = json.loads(body + b"]")
    path = tmp_path / "trace.json"
    seen = -1
    for cut in [*range(0, len(body), 7), len(body) - 2, len(body) - 1, len(body)]:
        path.write_bytes(body[:cut])
        events = list(read_trace(path))
        assert [e.name for e in events] == [e["name"] for e in whole[: len(events)]]
        assert len(events) >= seen
        seen = len(events)
    assert seen == len(whole)
    path.write_bytes(body + end)
    assert len(list(read_trace(path))) == len(whole)


def test_an_empty_trace_is_json(tmp_path: Path):
    assert json.loads(TraceEncoder(0.0).end()) == []
    (tmp_path / "trace.json").write_bytes(TraceEncoder(0.0).end())
    assert list(read_trace(tmp_path / "trace.json")) == []


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path):
    body, end = every_kind()
    lines = (body + end).splitlines(keepends=True)
    lines[2] = b'{"ph":\n'
    (tmp_path / "trace.json").write_bytes(b"".join(lines))
    with pytest.raises(RunDirError, match=r"trace\.json:3: not a trace event"):
        list(read_trace(tmp_path / "trace.json"))
