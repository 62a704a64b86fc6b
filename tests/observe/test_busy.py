from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.busy import Mark, ServerTime, bubble_share, tokens_per_second, trainer_idle_share

# (ticks since the event before, running, version, up); whole ticks, so that sums are exact.
events = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=40)


@given(events, st.integers(0, 5))
def test_totals_and_segments_agree_with_counting_tick_by_tick(changes, rest):
    server, segments, now = ServerTime(0.0), [], 0
    states = []  # (running, version, up) of every tick
    state = (0, 0, False)
    for passed, running, version, up in [*changes, (rest, 0, 0, False)]:
        states += [state] * passed
        now += passed
        segment = server.update(float(now), running, version, up)
        if segment is not None:
            segments.append(segment)
        state = (running, version, up)
        busy = [running > 0 and up for running, _, up in states]
        assert server.totals(float(now)) == (sum(busy), sum(up for _, _, up in states))
    painted: dict[int, int] = {}
    for segment in segments:
        assert segment.start >= max(painted, default=-1), "out of order"
        for tick in range(int(segment.start), int(segment.end)):
            assert tick not in painted, "segments overlap"
            painted[tick] = segment.version
    assert painted == {tick: v for tick, (running, v, up) in enumerate(states) if running > 0 and up}


def test_an_event_from_the_past_counts_from_now():
    server = ServerTime(5.0)
    server.update(5.0, 1, 0, True)
    ended = server.update(4.0, 1, 1, True)
    assert ended is not None
    assert (ended.start, ended.end) == (5.0, 5.0)
    assert server.totals(4.5) == (0.0, 0.0)
    assert server.totals(6.0) == (1.0, 1.0)


def test_shares_of_a_window():
    first = Mark(at=10.0, busy=4.0, available=20.0, trainer_busy=3.0, tokens=100)
    last = Mark(at=20.0, busy=19.0, available=40.0, trainer_busy=9.0, tokens=600)
    assert bubble_share(first, last) == pytest.approx(1 - 15 / 20)
    assert trainer_idle_share(first, last) == pytest.approx(1 - 6 / 10)
    assert tokens_per_second(first, last) == pytest.approx(50.0)


def test_an_empty_window_has_no_shares():
    mark = Mark(at=1.0)
    assert bubble_share(mark, mark) is None
    assert trainer_idle_share(mark, mark) is None
    assert tokens_per_second(mark, mark) == 0.0
