"""A push of new weights beside the next train step: what it saves, and what it must not change."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.config import Recipe
from asyncrl.core.transfer import seconds_to_arrive, seconds_to_deliver
from asyncrl.sim.trainer import SimTrainer

from .world import check_laws, play, recipe


def bound_by_training(transport: str, *, overlap: bool, alpha: float = 2.0, **tables: Any) -> Recipe:
    """Ten seconds a step, and servers that are much faster than that."""
    weights = {"transport": transport, "gigabytes": 8.0, "disk_gb_s": 4.0, "link_gb_s": 4.0, "local_gb_s": 4.0}
    return recipe(
        update={"overlap": overlap},
        staleness={"bound": alpha},
        run={"steps": 12},
        sim={"trainer": {"fixed_s": 10.0}, "weights": {**weights, "gather_gb_s": 8.0, "hop_s": 0.0}},
        **tables,
    )


def period(simulation: Simulation) -> float:
    """Mean seconds from step to step, once it is in its stride."""
    at = [e[1] for e in simulation.trace.events if e[0] == "step"]
    return (at[-2] - at[3]) / (len(at) - 5)


def spans(simulation: Simulation, track: str, name: str) -> dict[int, tuple[float, float]]:
    found = [e for e in simulation.trace.events if e[:3] == ("span", track, name)]
    return {dict(e[5])["version"]: (e[3], e[4]) for e in found}


@pytest.mark.parametrize("transport", ["disk", "collective", "relay"])
def test_a_step_is_shorter_by_the_time_of_the_delivery(transport: Any) -> None:
    after, beside = (bound_by_training(transport, overlap=overlap) for overlap in (False, True))
    one, other = play(after), play(beside)
    check_laws(after, one)
    check_laws(beside, other)
    load_s = beside.sim.instance.load_s
    model = beside.sim.weights
    saved = seconds_to_arrive(model, transport, 2) + seconds_to_deliver(model, transport, 2) + load_s
    assert saved > 2.0
    assert period(one) - period(other) == pytest.approx(saved, rel=0.05)


def test_a_push_ends_before_the_next_version_is_gathered() -> None:
    """Deliveries that take longer than a step hold the trainer: it begins no step two versions ahead of the servers."""
    settings = recipe(
        staleness={"bound": 3},
        run={"steps": 12},
        sim={"trainer": {"fixed_s": 2.0}, "weights": {"gigabytes": 20.0, "disk_gb_s": 4.0}},
    )
    simulation = play(settings)
    check_laws(settings, simulation)
    prepared = spans(simulation, "controller", "prepare weights")
    delivered = spans(simulation, "controller", "suspended")
    training = spans(simulation, "trainer", "train")
    assert sorted(prepared) == sorted(delivered) == list(range(1, 13))
    for version in range(1, 12):
        assert training[version][0] < delivered[version][1], "the step ran beside the push"
        assert delivered[version][1] <= prepared[version + 1][0]
        assert version == 11 or training[version + 1][0] >= delivered[version][1]


def test_without_staleness_nothing_changes() -> None:
    traces = [play(bound_by_training("disk", overlap=overlap, alpha=0.0)).trace.events for overlap in (False, True)]
    assert traces[0] == traces[1]


@pytest.mark.parametrize("tick", range(24))
def test_a_trainer_may_die_while_it_trains_and_sends(tick: int) -> None:
    """The version on its way is staged anew on the new job, before the step is repeated."""
    crash = {"kind": "trainer_crash", "at_s": 8.0 + 0.7 * tick}
    settings = recipe(
        staleness={"bound": 2},
        trainer={"restart_backoff_s": 0.5, "replay_steps": 2},
        run={"steps": 6},
        sim={
            "faults": [crash],
            "trainer": {"fixed_s": 3.0, "start_s": 3.0, "save_s": 1.0},
            "weights": {"transport": "collective", "gigabytes": 12.0, "link_gb_s": 4.0, "hop_s": 0.0},
        },
    )
    simulation = play(settings)
    check_laws(settings, simulation)
    assert isinstance(simulation.trainer, SimTrainer) and simulation.trainer.version == 6
    assert {e[4] for e in simulation.trace.events if e[0] == "server"} >= {0, 6}
