from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.busy import Segment
from asyncrl.observe.timeline import bin_segments, read_timeline
from asyncrl.observe.trace import TraceEncoder

from .synthetic import make_run

SUB = 8  # segments have their ends on eighths of a bin, which floats hold exactly


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30), st.integers(0, 3)), max_size=20), st.integers(1, 12))
def test_bins_agree_with_painting_eighths(made, bins):
    segments, now = [], -10
    for gap, length, version in made:
        segments.append(Segment(start=(now + gap) / SUB, end=(now + gap + length) / SUB, version=version))
        now += gap + length
    share, version = bin_segments(segments, 0.0, float(bins), bins)
    for i in range(bins):
        painted = [
            len([t for t in range(i * SUB, (i + 1) * SUB) if segment.start * SUB <= t < segment.end * SUB])
            for segment in segments
        ]
        assert share[i] == sum(painted) / SUB
        if max(painted, default=0) > 0:
            assert version[i] == segments[painted.index(max(painted))].version
        else:
            assert version[i] == 0


def test_bins_of_any_width_keep_the_busy_time():
    segments = [Segment(start=0.1 + i * 0.37, end=0.1 + i * 0.37 + 0.21, version=i) for i in range(500)]
    share, _ = bin_segments(segments, 0.0, 190.0, 1200)
    assert share.sum() * 190.0 / 1200 == pytest.approx(500 * 0.21)
    assert np.all((share >= 0) & (share <= 1))


def test_lanes_come_from_the_trace_with_the_trainer_first_and_servers_by_number(tmp_path: Path):
    encoder = TraceEncoder(0.0)
    data = b""
    for server in ("server 10", "server 2"):
        data += encoder.busy(server, Segment(start=1.0, end=2.0, version=3))
        data += encoder.span(server, "request", 1.0, 2.0, {"version": 3})
        data += encoder.span(server, "update", 2.0, 2.5, {"version": 4})
    data += encoder.span("trainer", "wait", 0.0, 1.0, {})
    data += encoder.span("trainer", "train", 1.0, 2.0, {"version": 3})
    (tmp_path / "trace.json").write_bytes(data)
    lanes = read_timeline(tmp_path / "trace.json")
    assert [lane.name for lane in lanes] == ["trainer", "server 2", "server 10"]
    for lane in lanes:
        assert lane.segments == [Segment(start=1.0, end=2.0, version=3)]
    assert [list(lane.updates) for lane in lanes] == [[], [2.5], [2.5]]


def test_a_run_has_a_busy_lane_for_each_server(tmp_path: Path):
    make_run(tmp_path, steps=5, servers=3)
    lanes = read_timeline(tmp_path / "trace.json")
    assert [lane.name for lane in lanes] == ["trainer", "server 0", "server 1", "server 2"]
    assert [s.version for s in lanes[0].segments] == [0, 1, 2, 3, 4]
    for lane in lanes[1:]:
        assert {s.version for s in lane.segments} == {0, 1, 2, 3, 4}
        assert len(lane.updates) == 5
