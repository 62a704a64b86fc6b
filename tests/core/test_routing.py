"""Routing policies against their definitions, on drawn fleets and requests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.policy.routing import RequestView, has_room, least_loaded, prefix_affine, round_robin


@dataclass
class Server:
    """What routing reads of a server."""

    name: str = "a"
    version: int = 0
    up: bool = True
    running: int = 0
    tokens: int = 0
    max_running: int = 4
    max_tokens: int = 100


servers = st.lists(
    st.builds(
        Server,
        name=st.sampled_from("abcde"),
        version=st.integers(0, 2),
        up=st.sampled_from([True, True, True, False]),
        running=st.integers(0, 3),
        tokens=st.sampled_from([0, 30, 60, 90]),
        max_running=st.integers(1, 5),
        max_tokens=st.just(100),
    ),
    max_size=5,
    unique_by=lambda s: s.name,
)
requests = st.builds(
    RequestView,
    v_traj=st.integers(0, 2),
    tokens=st.integers(1, 60),
    slots=st.integers(1, 4),
    home=st.sampled_from([None, *"abcde"]),
    sequence=st.integers(0, 20),
)


@given(request=requests, server=servers)
def test_a_candidate_is_up_new_enough_and_has_room(request: RequestView, server: list[Server]) -> None:
    for s in server:
        by_count = s.running + request.slots <= s.max_running or s.running == 0
        by_tokens = s.tokens + request.tokens <= s.max_tokens
        assert has_room(request, s) is (s.up and s.version >= request.v_traj and by_count and by_tokens)


@given(request=requests, fleet=servers)
def test_least_loaded_takes_the_smallest_by_requests_tokens_and_name(request: RequestView, fleet: list[Server]) -> None:
    candidates = [s for s in fleet if has_room(request, s)]
    chosen = least_loaded(request, fleet)
    if not candidates:
        assert chosen is None
    else:
        assert chosen in candidates
        assert all((chosen.running, chosen.tokens, chosen.name) <= (s.running, s.tokens, s.name) for s in candidates)


@given(request=requests, fleet=servers)
def test_prefix_affine_stays_at_home_unless_it_is_overloaded(request: RequestView, fleet: list[Server]) -> None:
    chosen, best = prefix_affine(request, fleet), least_loaded(request, fleet)
    [home] = [s for s in fleet if s.name == request.home] or [None]
    home_may = best is not None and home is not None and has_room(request, home)
    assert chosen is (home if home_may and home.running <= 2 * best.running + 1 else best)


@given(request=requests, fleet=servers, random=st.randoms())
def test_the_order_of_servers_does_not_matter_to_load_and_prefix(
    request: RequestView, fleet: list[Server], random: object
) -> None:
    shuffled = list(fleet)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for route in (least_loaded, prefix_affine):
        assert route(request, fleet) is route(request, shuffled)


@given(request=requests, fleet=servers)
def test_round_robin_goes_by_arrival_over_the_servers_that_are_up_and_new_enough_whatever_their_load(
    request: RequestView, fleet: list[Server]
) -> None:
    able = [s for s in fleet if s.up and s.version >= request.v_traj]
    chosen = round_robin(request, fleet)
    assert chosen is (able[request.sequence % len(able)] if able else None)


def test_round_robin_splits_a_batch_evenly_and_names_a_full_server() -> None:
    fleet = [Server(name="a", running=4), Server(name="b"), Server(name="c")]
    chosen = [round_robin(RequestView(v_traj=0, tokens=10, sequence=i), fleet) for i in range(9)]
    assert [s.name for s in chosen if s is not None] == list("abcabcabc")


def test_equal_servers_are_taken_by_name() -> None:
    for names in ("abc", "cab", "bca"):
        chosen = least_loaded(RequestView(v_traj=0, tokens=10), [Server(name=name) for name in names])
        assert chosen is not None and chosen.name == "a"


def test_an_idle_server_takes_a_group_that_is_larger_than_its_slots() -> None:
    request = RequestView(v_traj=0, tokens=10, slots=9)
    assert has_room(request, Server(running=0, max_running=4))
    assert not has_room(request, Server(running=1, max_running=4))


def test_one_request_more_does_not_drive_a_dialogue_from_its_prefix() -> None:
    request = RequestView(v_traj=0, tokens=10, home="b")
    idle = Server(name="a")
    for load, expected in ((0, "b"), (1, "b"), (2, "a")):
        chosen = prefix_affine(request, [idle, Server(name="b", running=load)])
        assert chosen is not None and chosen.name == expected
