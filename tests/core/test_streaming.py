"""Multi-version streaming by hand: what the coordinator says of a fleet that generates as DORA's does."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.commands import Abort, Interrupt, Pull, Route
from asyncrl.core.coordinator import Coordinator
from asyncrl.core.policy.migration import Limits
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.policy.streaming import Versions
from asyncrl.core.snapshot import InstanceSnapshot
from asyncrl.core.staleness.window import SlidingWindow

from .fleets import COST, fleet, server


def anything(version: int) -> int:
    return 10**6


def dora(step: int = 0, bound: int = 2, migration: str = "repartition", kv_threshold: float = 0.9) -> Coordinator:
    return Coordinator(
        routing="newest_first",
        synchronization="when_empty",
        migration=migration,
        cost=COST,
        limits=Limits(kv_threshold=kv_threshold),
        one_version=Versions(SlidingWindow(batch=64, bound=bound, step=step)),
    )


def new(*groups: int) -> list[RequestView]:
    """An initial request of each group."""
    return [RequestView(v_traj=None, tokens=100, id=g, group=g, sequence=g) for g in groups]


def begun(*groups: int, after: int, tokens: int = 100) -> list[RequestView]:
    return [RequestView(v_traj=after, tokens=tokens, id=g, group=g, sequence=g, after=after) for g in groups]


def settle(c: Coordinator, servers: Sequence[InstanceSnapshot], newest: int) -> None:
    """The coordinator has seen the fleet with this version: nothing is due."""
    c.plan(fleet(servers, newest=newest), anything)


def test_new_groups_go_to_the_newest_version_and_what_has_begun_stays_with_its_own() -> None:
    c = dora(step=1)
    servers = [server("a", 1), server("b", 0, begun(1, after=0))]
    plan = c.plan(fleet(servers, [*begun(2, after=0), *new(3, 4)], newest=1), anything)
    assert plan == [Route(instance="b", requests=(2,)), Route(instance="a", requests=(3, 4))]


def test_at_a_new_version_servers_are_shared_out_by_what_each_version_has_to_do() -> None:
    c = dora(step=1)
    names = "abcd"
    servers = [server(n, 0, begun(*range(10 * i, 10 * i + 5), after=0)) for i, n in enumerate(names)]
    servers[2] = server("c", 0, begun(20, after=0))
    settle(c, servers, newest=0)
    plan = c.plan(fleet(servers, new(*range(90, 100)), newest=1), anything)
    # 16 requests of version 0 and 10 that wait: 4 · 16 / 26 is 2. The two that hold least go, c and a.
    assert plan == [
        Interrupt(instance="c", requests=(20,)),
        Interrupt(instance="a", requests=(0, 2, 4, 1, 3)),
        Route(instance="b", requests=(20, 1, 3)),
        Route(instance="d", requests=(0, 2, 4)),
    ]
    emptied = [
        server("a", 0, routed=5, interrupted=5),
        server("b", 0, begun(10, 11, 12, 13, 14, 20, 1, 3, after=0), routed=8),
        server("c", 0, routed=1, interrupted=1),
        server("d", 0, begun(30, 31, 32, 33, 34, 0, 2, 4, after=0), routed=8),
    ]
    turn = begun(50, after=0)
    plan = c.plan(fleet(emptied, [*turn, *new(90)], newest=1), anything)
    assert plan == [Pull(instance="a"), Pull(instance="c"), Route(instance="b", requests=(50,))]


def test_between_looks_nothing_moves_and_what_leaves_gets_nothing() -> None:
    c = dora(step=1)
    servers = [server("a", 0, begun(1, after=0)), server("b", 0, begun(2, 3, after=0))]
    settle(c, servers, newest=1)
    again = dora(step=1)
    settle(again, servers, newest=0)
    assert again.plan(fleet(servers, newest=0), anything) == []
    again.look = True
    plan = again.plan(fleet(servers, newest=1), anything)
    assert plan == [Interrupt(instance="a", requests=(1,)), Route(instance="b", requests=(1,))]
    half = [server("a", 0, begun(1, after=0)), server("b", 0, begun(2, 3, after=0))]
    assert again.plan(fleet(half, begun(4, after=0), newest=1), anything) == [], "neither shows all that it was told"
    done = [server("a", 0, routed=1, interrupted=1), server("b", 0, begun(1, 2, 3, after=0), routed=3)]
    assert again.plan(fleet(done, begun(4, after=0), newest=1), anything) == [
        Pull(instance="a"),
        Route(instance="b", requests=(4,)),
    ]


def test_a_server_keeps_its_version_where_its_requests_fit_nowhere_else() -> None:
    c = dora(step=1)
    servers = [server(n, 0, begun(i, after=0, tokens=60_000)) for i, n in enumerate("ab")]
    settle(c, servers, newest=0)
    assert c.plan(fleet(servers, newest=1), anything) == []
    small = [server("a", 0, begun(0, after=0, tokens=60_000)), server("b", 0, begun(1, after=0, tokens=20_000))]
    c.look = True
    assert c.plan(fleet(small, newest=1), anything) == [
        Interrupt(instance="b", requests=(1,)),
        Route(instance="a", requests=(1,)),
    ]


def test_the_last_server_of_a_version_stays_until_its_groups_have_ended() -> None:
    c = dora(step=1)
    c.plan(fleet([server("a"), server("b")], new(1)), anything)
    with_env = [server("a", 0, routed=1), server("b", 0)]  # the trajectory is with its environment
    assert c.plan(fleet(with_env, newest=1), anything) == [Pull(instance="b")]
    moved = [server("a", 0, routed=1), server("b", 1)]
    assert c.plan(fleet(moved, begun(1, after=0), newest=1), anything) == [Route(instance="a", requests=(1,))]
    ended = [server("a", 0, routed=2), server("b", 1)]
    assert c.plan(fleet(ended, newest=1), anything) == [], "its next turn may come"
    c.rests(1)
    assert c.plan(fleet(ended, newest=1), anything) == [Pull(instance="a")]


def test_older_versions_get_groups_only_where_the_newest_is_full_and_no_step_would_wait_for_them() -> None:
    full = server("a", 1, begun(*range(10, 74), after=1))
    legacy = server("b", 0, begun(1, after=0))
    waiting = new(90, 91)
    assert dora(step=1).plan(fleet([full, legacy], waiting, newest=1), anything) == [
        Route(instance="b", requests=(90, 91))
    ]
    assert dora(step=2).plan(fleet([full, legacy], waiting, newest=1), anything) == [], "step 2 is version 0's last"
    room = server("a", 1, begun(*range(10, 73), after=1))
    assert dora(step=1).plan(fleet([room, legacy], waiting, newest=1), anything) == [
        Route(instance="b", requests=(91,)),
        Route(instance="a", requests=(90,)),
    ]
    pulls = server("c", 0, pulling=True)
    c = dora(step=1)
    settle(c, [full, legacy, server("c")], newest=1)  # c pulls
    assert c.plan(fleet([full, legacy, pulls], waiting, newest=1), anything) == [], "c will have room"


def test_without_a_server_of_the_newest_only_the_newest_that_is_held_goes_on() -> None:
    c = dora(step=2, bound=4)
    servers = [server("a", 1, begun(1, after=1)), server("b", 0, begun(2, after=0))]
    assert c.plan(fleet(servers, new(90, 91), newest=2), anything) == [Route(instance="a", requests=(90, 91))]


def test_a_full_kv_cache_gives_its_last_requests_to_servers_of_its_version() -> None:
    crowded = server("a", 0, begun(*range(10), after=0, tokens=9_500))
    roomy = server("b", 0, begun(20, after=0, tokens=70_000))
    c = dora()
    settle(c, [server("b", 0, begun(20, after=0, tokens=70_000))], newest=0)
    plan = c.plan(fleet([crowded, roomy, server("c", 1)]), anything)
    assert plan == [Interrupt(instance="a", requests=(9,)), Route(instance="b", requests=(9,))]
    alone = dora().plan(fleet([crowded, server("c", 1)], newest=1), anything)
    assert alone == [], "a server of another version is no help"


def test_what_a_failed_server_has_begun_waits_for_it_and_is_begun_anew_when_none_has_its_version() -> None:
    c = dora(step=1)
    c.plan(fleet([server("a"), server("b", 1)], begun(1, after=0), newest=1), anything)
    down = server("a", 0, up=False)
    assert c.plan(fleet([down, server("b", 1)], [*begun(1, after=0), *new(2)], newest=1), anything) == [
        Route(instance="b", requests=(2,))
    ], "it is passed over"
    gone = server("a", -1, up=False)
    assert c.plan(fleet([gone, server("b", 1, routed=1)], begun(1, after=0), newest=1), anything) == [
        Abort(requests=(1,))
    ]
    without_tokens = [RequestView(v_traj=0, tokens=10, id=3, group=1, sequence=3)]
    assert c.plan(fleet([gone, server("b", 1, routed=1)], without_tokens, newest=1), anything) == [
        Route(instance="b", requests=(3,))
    ]


@given(
    running=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=7),
    waiting=st.integers(0, 40),
    tokens=st.sampled_from([10, 9_000, 40_000]),
)
def test_a_repartition_strands_nothing_and_moves_within_versions_to_servers_that_stay(
    running: list[tuple[int, int]], waiting: int, tokens: int
) -> None:
    """Versions 0 to 2, of which some servers have so many requests each."""
    servers = [
        server(f"s{i}", version, begun(*range(10 * i, 10 * i + n), after=version, tokens=tokens))
        for i, (version, n) in enumerate(running)
    ]
    version_of = {r: s.version for s in servers for r in s.requests}
    at = {s.name: s.version for s in servers}
    c = dora(step=2)
    commands = c.plan(fleet(servers, new(*range(1000, 1000 + waiting)), newest=2), anything)
    pulled = {command.instance for command in commands if isinstance(command, Pull)}
    left = {command.instance for command in commands if isinstance(command, Interrupt)}
    routed = {r: command.instance for command in commands if isinstance(command, Route) for r in command.requests}
    cut = {r for command in commands if isinstance(command, Interrupt) for r in command.requests}
    assert all(at[name] < 2 and not running[int(name[1:])][1] for name in pulled)
    assert cut == routed.keys() & version_of.keys()
    for r in cut:
        assert at[routed[r]] == version_of[r] and routed[r] not in left | pulled
    for version in {v for v, n in running if n}:
        stays = [s for s in servers if s.version == version and s.name not in left | pulled]
        assert stays, f"no server is left for version {version}"
        for s in stays:
            gets = sum(tokens for r, name in routed.items() if name == s.name and r in cut)
            assert not gets or s.tokens + gets <= 0.9 * s.max_tokens
