"""Who takes from whom, and what is kept, by hand and against the laws of a chain under random events."""

from __future__ import annotations

import random

import pytest

from asyncrl.core.relay_chain import RelayChain


def chain(*relays: str, keep: int = 2) -> RelayChain:
    made = RelayChain(keep)
    for relay in relays:
        made.join(relay, f"{relay}:1")
    return made


def sources(made: RelayChain) -> dict[str, str]:
    return {relay: ",".join(orders.sources) for relay, orders in made.orders().items()}


def test_the_first_takes_from_the_trainer_and_each_other_from_the_one_before() -> None:
    made = chain("a", "b", "c")
    made.announce(1, ("trainer:9",))
    assert sources(made) == {"a": "trainer:9", "b": "a:1", "c": "b:1"}
    assert {o.versions for o in made.orders().values()} == {(1,)}


def test_before_anything_is_announced_nobody_does_anything() -> None:
    assert {(o.sources, o.versions) for o in chain("a").orders().values()} == {((), ())}


def test_a_dead_relay_costs_only_the_one_after_it_another_source() -> None:
    made = chain("a", "b", "c", "d")
    made.announce(1, ("trainer:9",))
    before = sources(made)
    made.lose("b")
    assert sources(made) == {"a": before["a"], "c": "a:1", "d": before["d"]}


def test_when_the_master_dies_the_next_one_is_the_master() -> None:
    made = chain("a", "b", "c")
    made.announce(1, ("trainer:9",))
    made.lose("a")
    assert sources(made) == {"b": "trainer:9", "c": "b:1"}


def test_one_that_comes_back_is_last_as_it_has_lost_what_the_others_have() -> None:
    made = chain("a", "b")
    made.announce(1, ("trainer:9",))
    made.join("a", "a:2")
    assert sources(made) == {"b": "trainer:9", "a": "b:1"}


def test_the_newest_versions_stay_and_any_that_is_being_loaded() -> None:
    made = chain("a", keep=2)
    for version in (1, 2):
        made.announce(version, ("t:9",))
    made.hold(1)
    made.hold(1)
    made.announce(3, ("t:9",))
    assert made.orders()["a"].versions == (3, 2, 1)
    made.release(1)
    assert made.orders()["a"].versions == (3, 2, 1)
    made.release(1)
    assert made.orders()["a"].versions == (3, 2)


def test_a_trainer_that_went_back_takes_the_later_versions_with_it() -> None:
    made = chain("a", keep=3)
    for version in (1, 2, 3, 2):
        made.announce(version, ("t:9",))
    assert (made.newest, made.orders()["a"].versions) == (2, (2, 1))


def test_one_without_room_is_passed_over_until_the_next_version() -> None:
    made = chain("a", "b", "c")
    made.announce(1, ("t:9",))
    made.unable("a")
    assert sources(made) == {"a": "t:9", "b": "t:9", "c": "b:1"}
    assert not made.is_able("a") and made.is_able("b")
    made.announce(2, ("t:9",))
    assert sources(made) == {"a": "t:9", "b": "a:1", "c": "b:1"}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_it_is_one_chain_from_the_trainer_on(seed: int) -> None:
    rng, made, version = random.Random(seed), RelayChain(2), 0
    held: list[int] = []
    for _ in range(200):
        relay = rng.choice("abcdef")
        match rng.randrange(6):
            case 0:
                made.join(relay, f"{relay}:{rng.randrange(9)}")
            case 1:
                made.lose(relay)
            case 2:
                version += 1
                made.announce(version, (f"t:{rng.randrange(9)}",))
            case 3 if relay in made.relays:
                made.unable(relay)
            case 4 if version:
                held.append(version)
                made.hold(version)
            case 5 if held:
                made.release(held.pop(rng.randrange(len(held))))
        orders = made.orders()
        assert tuple(orders) == made.relays
        givers = [o.sources for o in orders.values()]
        able = [relay for relay in made.relays if made.is_able(relay)]
        # Each able relay gives to at most one other able one, and the way back from any ends at the trainer.
        taken = [orders[relay].sources for relay in able]
        assert len(set(taken)) == len(taken)
        assert all(not source or source[0][0] in ("t", *able) for source in givers)
        for o in orders.values():
            assert o.versions[:2] == tuple(range(version, max(0, version - 2), -1))
            assert set(held) <= set(o.versions)
