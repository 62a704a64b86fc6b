"""Repack: Laminar's algorithm 1 as it is printed, beside ours."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.policy.load import Load
from asyncrl.core.policy.repack import best_fit, ramps_down, repack

from .fleets import server

CAPACITY = 100
"""Of every server, in tokens."""


def load(index: int, used: int, requests: int, peak: int = CAPACITY, version: int = 0, **fields: object) -> Load:
    known = {"running": requests, "kv_tokens": used, "tokens": used, "max_tokens": CAPACITY}
    made = Load(index, server(f"s{index}", version, **{**known, **fields}), up=True, promised=version)
    made.kv_peak = peak
    return made


def printed(replicas: list[Load], c_max: float, b: int) -> list[tuple[int, int]]:
    """Algorithm 1, line by line; of equals the first."""
    used = {r.index: r.kv_tokens for r in replicas}
    n_reqs = {r.index: r.running for r in replicas}
    s_set = [r for r in replicas if r.kv_tokens < min(c_max, r.kv_peak) and r.running < b]  # 3
    s_set = sorted(s_set, key=lambda r: r.kv_tokens)  # 4
    plan: list[tuple[int, int]] = []  # 5
    emptied: set[int] = set()

    def c_load(d: int) -> int:
        return used[d] + sum(used[s] for s, to in plan if to == d)

    def can_fit(d: int, s: int) -> bool:  # 14 to 17
        n_load = n_reqs[d] + sum(n_reqs[x] for x, to in plan if to == d)
        return c_load(d) + used[s] <= c_max and n_load + n_reqs[s] <= b

    for s in [r.index for r in s_set]:  # 6
        if s in emptied:  # 7
            continue
        fitting = [r.index for r in replicas if r in s_set and r.index not in emptied | {s} and can_fit(r.index, s)]
        if fitting:  # 10
            plan.append((s, max(fitting, key=c_load)))  # 11, 12
            emptied.add(s)
    return plan


fleets = st.lists(st.tuples(st.integers(0, 110), st.integers(0, 9), st.integers(0, 110)), min_size=1, max_size=9)


@given(drawn=fleets, c_max=st.sampled_from([50, 99]), b=st.integers(1, 12))
def test_it_is_algorithm_1_but_for_what_the_text_says_and_for_what_would_be_left_behind(
    drawn: list[tuple[int, int, int]], c_max: int, b: int
) -> None:
    loads = [load(i, used, requests, peak) for i, (used, requests, peak) in enumerate(drawn)]
    loads = [r for r in loads if r.running and r.kv_tokens != r.kv_peak]
    moves = [(s.index, d.index) for s, d in repack(loads, c_max / CAPACITY, b, 99)]
    model = printed(loads, c_max / CAPACITY * CAPACITY, b)
    if {s for s, _ in model}.isdisjoint(d for _, d in model):
        assert moves == model
    else:  # the printed one puts requests on a server that it empties
        assert set(moves) != set(model)


@given(drawn=fleets, c_max=st.sampled_from([50, 99]), b=st.integers(1, 12))
def test_what_is_packed_fits_and_no_released_server_gets_anything(
    drawn: list[tuple[int, int, int]], c_max: int, b: int
) -> None:
    loads = [load(i, used, requests, peak) for i, (used, requests, peak) in enumerate(drawn)]
    candidates = [r for r in loads if ramps_down(r, c_max / CAPACITY, b)]
    moves = best_fit(candidates, c_max / CAPACITY, b, 99)
    sources = [s.index for s, _ in moves]
    assert len(set(sources)) == len(sources)
    assert set(sources).isdisjoint(d.index for _, d in moves)
    for destination in {d.index for _, d in moves}:
        given_ = [loads[destination], *(s for s, d in moves if d.index == destination)]
        assert sum(r.kv_tokens for r in given_) <= c_max / CAPACITY * CAPACITY
        assert sum(r.running for r in given_) <= b


def test_what_a_server_was_given_goes_on_with_it() -> None:
    """Line 11 chooses the fullest that fits: for the first that is the second, as the third has too many requests."""
    loads = [load(0, 10, 6), load(1, 20, 1), load(2, 30, 3)]
    assert printed(loads, 99, 8) == [(0, 1), (1, 2)], "the first server's six requests are left on the second"
    assert [(s.index, d.index) for s, d in best_fit(loads, 0.99, 8, 99)] == [(0, 1)]
    assert [(s.index, d.index) for s, d in best_fit(loads, 0.99, 10, 99)] == [(0, 2), (1, 2)]


def test_only_servers_of_one_version_that_ramp_down_are_packed() -> None:
    loads = [
        load(0, 10, 1),
        load(1, 10, 1, version=1),
        load(2, 99, 1),  # full
        load(3, 10, 1, peak=9),  # it rises
        load(4, 10, 1, peak=-1),  # looked at for the first time
        load(5, 10, 8),  # too many
        load(6, 10, 2),
        load(7, 10, 1, pinned=True),
        load(8, 0, 0),  # it has nothing
        load(9, 40, 1),
        load(10, 20, 1, version=1),
    ]
    loads[6].waiting = 1
    moves = repack(loads, 0.99, 8, 99)
    assert [(s.index, d.index) for s, d in moves] == [(0, 9), (1, 10)]


def test_a_server_whose_trajectories_are_with_their_environments_is_as_full_as_if_they_ran() -> None:
    def packed(acting: int, tokens: int) -> list[tuple[int, int]]:
        loads = [load(0, 0, 0), load(1, 20, 1)]
        loads[0].groups, loads[0].acting, loads[0].acting_tokens = 1, acting, tokens
        return [(s.index, d.index) for s, d in repack(loads, 0.99, 8, 99)]

    assert packed(3, 15) == [(0, 1)]
    assert packed(3, 25) == [(1, 0)], "the one that holds less"
    assert packed(3, 80) == [], "too many tokens for one"
    assert packed(7, 15) == [(0, 1)] and packed(8, 15) == [], "too many sequences"


def test_so_many_servers_are_released_of_the_oldest_version_first_and_all_that_drain() -> None:
    loads = [load(0, 10, 1, version=1), load(1, 11, 1, version=1), load(2, 12, 1), load(3, 13, 1), load(4, 14, 1)]

    def released(most: int) -> list[int]:
        return [s.index for s, _ in repack(loads, 0.99, 64, most)]

    assert [released(n) for n in (0, 1, 2, 3, 4)] == [[], [2], [2, 3], [2, 3, 0], [2, 3, 0]]
    loads[3].draining = True
    assert [released(n) for n in (0, 1)] == [[3], [2, 3]]
