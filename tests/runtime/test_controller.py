"""The whole controller on virtual time: laws over many seeds, faults, cancellation at every await."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from asyncrl.build.virtual import Simulation, simulated
from asyncrl.config import RecipeError
from asyncrl.runtime.fleet import FleetDown
from asyncrl.runtime.user_code import EnvFailing
from asyncrl.sim.env import SimEnv
from asyncrl.sim.loop import run

from .world import cancelled_at, check_laws, play, random_recipe, recipe, started


@pytest.mark.parametrize("seed", range(60))
def test_laws_hold_for_any_settings(seed: int) -> None:
    settings = random_recipe(seed)
    check_laws(settings, play(settings))


@pytest.mark.parametrize("seed", range(30))
def test_laws_hold_while_servers_die_and_come_back(seed: int) -> None:
    settings = random_recipe(1000 + seed)
    rng = random.Random(seed)

    async def chaos(simulation: Simulation) -> None:
        while True:
            await asyncio.sleep(rng.uniform(1, 20))
            victim = rng.choice(simulation.engines)
            victim.kill()
            await asyncio.sleep(rng.uniform(0.1, 20))
            victim.restart()

    check_laws(settings, play(settings, chaos))


@pytest.mark.parametrize("seed", [0, 7, 23])
def test_same_seed_gives_the_same_trace(seed: int) -> None:
    settings = random_recipe(seed)
    assert play(settings).trace.events == play(settings).trace.events


def test_another_seed_gives_another_trace() -> None:
    assert play(recipe(seed=1)).trace.events != play(recipe(seed=2)).trace.events


def test_trajectories_longer_than_the_servers_context_are_refused_at_the_start() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.max_tokens = 400: the servers take at most 300"):
        run(simulated(recipe(engine={"max_total_tokens": 400}), context_length=300))


def test_alpha_zero_is_synchronous() -> None:
    """Nothing is generated while the trainer trains, and every token is of the version being trained."""
    settings = recipe(staleness={"bound": 0}, run={"steps": 5})
    simulation = play(settings)
    check_laws(settings, simulation)
    training = [(e[3], e[4]) for e in simulation.trace.events if e[:3] == ("span", "trainer", "train")]
    requests = [(e[3], e[4]) for e in simulation.trace.events if e[0] == "span" and e[2] == "generate"]
    assert len(training) == 5
    assert not any(start < b and a < end for a, b in training for start, end in requests)
    assert all(v == b.step for b in simulation.trace.batches for t in b.trajectories for v in t.versions if v >= 0)


def test_alpha_one_overlaps_training_with_generation() -> None:
    settings = recipe(staleness={"bound": 1}, run={"steps": 6})
    simulation = play(settings)
    training = [(e[3], e[4]) for e in simulation.trace.events if e[:3] == ("span", "trainer", "train")]
    requests = [(e[3], e[4]) for e in simulation.trace.events if e[0] == "span" and e[2] == "generate"]
    overlapped = sum(any(start < b and a < end for start, end in requests) for a, b in training)
    assert overlapped >= 5
    synchronous = play(recipe(staleness={"bound": 0}, run={"steps": 6}))
    assert ended(simulation) < 0.9 * ended(synchronous)


def ended(simulation: Simulation) -> float:
    """When the last step ended."""
    return max(e[1] for e in simulation.trace.events if e[0] == "step")


def test_an_update_interrupts_requests_which_then_mix_versions() -> None:
    settings = recipe(staleness={"bound": 2}, env={"max_turns": 1}, rollout={"max_new_tokens": 300}, run={"steps": 8})
    mixed = [
        t for b in play(settings).trace.batches for t in b.trajectories if len({v for v in t.versions if v >= 0}) > 1
    ]
    assert mixed


def test_the_preset_areal_caps_what_is_in_flight_and_updates_all_servers_in_the_midst_of_responses() -> None:
    settings = recipe(preset="areal", env={"max_turns": 1}, rollout={"num_envs": 12, "max_new_tokens": 300})
    simulation = play(settings)
    check_laws(settings, simulation)
    loads = Counter(dict(e[5])["version"] for e in simulation.trace.events if e[0] == "span" and e[2] == "update")
    assert loads == dict.fromkeys(range(1, settings.run.steps + 1), settings.engine.count)
    trained = [t for batch in simulation.trace.batches for t in batch.trajectories]
    assert any(len({v for v in t.versions if v >= 0}) > 1 for t in trained)
    assert max(v for batch in simulation.trace.batches for v in batch.staleness) == 1


def test_draining_never_mixes_versions_within_a_turn() -> None:
    settings = recipe(staleness={"bound": 2}, env={"max_turns": 1}, update={"running": "drain"}, run={"steps": 8})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert all(len({v for v in t.versions if v >= 0}) == 1 for b in simulation.trace.batches for t in b.trajectories)


def test_filtered_groups_are_refilled_exactly() -> None:
    settings = recipe(rollout={"filter_zero_variance": True}, run={"steps": 6})
    simulation = play(settings)
    check_laws(settings, simulation)
    counts = simulation.run.buffer.ledger.counts()
    assert counts["filtered"] > 0
    assert counts["reserved_ever"] == counts["consumed"] + counts["filtered"] + counts["failed"] + counts["aborted"]
    assert counts["consumed"] == 6 * settings.batch_trajectories


def test_redundant_groups_end_as_surplus() -> None:
    settings = recipe(
        rollout={"max_additional_running_prompts": 3, "num_envs": 40}, staleness={"bound": 0}, run={"steps": 8}
    )
    simulation = play(settings)
    check_laws(settings, simulation)
    assert simulation.run.buffer.ledger.counts()["surplus"] > 0


def test_nothing_is_begun_that_no_step_could_train() -> None:
    counts = play(recipe(run={"steps": 3}, staleness={"bound": 3})).run.buffer.ledger.counts()
    assert counts["surplus"] == 0
    assert counts["reserved_ever"] - counts["failed"] - counts["aborted"] == 3 * 3 * 2


def test_all_servers_lost_ends_the_run_with_the_reason() -> None:
    async def massacre(simulation: Simulation) -> None:
        await asyncio.sleep(3)
        for engine in simulation.engines:
            engine.kill()

    with pytest.raises(ExceptionGroup) as caught:
        play(recipe(run={"steps": 50}), massacre)
    assert caught.group_contains(FleetDown, match="no inference server is left.*connection")


def test_a_server_that_restarts_is_used_again_with_current_weights() -> None:
    async def restart(simulation: Simulation) -> None:
        await asyncio.sleep(12)
        simulation.engines[0].kill()
        await asyncio.sleep(1)
        simulation.engines[0].restart()

    settings = recipe(run={"steps": 10})
    simulation = play(settings, restart)
    check_laws(settings, simulation)
    states = [(e[2], e[4], e[5]) for e in simulation.trace.events if e[:2] == ("server", "server 0")]
    down = next(at for at, _, up in states if not up)
    back = next((at, version) for at, version, up in states if up and at > down)
    assert back[0] < down + 6
    assert back[1] > 0
    assert any(
        e[0] == "span" and e[1:3] == ("server 0", "generate") and e[3] >= back[0] for e in simulation.trace.events
    )


def test_one_bad_episode_never_ends_a_run_but_a_failing_env_does() -> None:
    settings = recipe(env={"failure_window": 20, "max_failure_rate": 0.5, "retries": 1}, sim={"env": {"crash": 1.0}})
    with pytest.raises(ExceptionGroup) as caught:
        play(settings)
    assert caught.group_contains(EnvFailing, match="100% of the last 20 .*simulated crash")
    assert caught.group_contains(EnvFailing, match="Traceback")


def test_a_retry_is_a_new_trajectory_and_what_was_trained_is_trained_once() -> None:
    settings = recipe(env={"retries": 3, "max_turns": 3}, sim={"env": {"crash": 0.2}}, run={"steps": 6})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert simulation.run.buffer.snapshot().retried > 0
    trained = [t for batch in simulation.trace.batches for t in batch.trajectories]
    members = [(t.group_id, t.index) for t in trained]
    assert len(set(members)) == len(members) == len({t.id for t in trained}), "one attempt of each member"
    ends = {e[1]: e[2] for e in simulation.trace.events if e[0] == "trajectory"}
    assert all(ends[t.id] == "consumed" for t in trained)


def test_hanging_envs_are_timed_out_and_replaced() -> None:
    timeouts = {"step_timeout_s": 5, "reset_timeout_s": 5, "reward_timeout_s": 5, "episode_timeout_s": 20}
    settings = recipe(env=timeouts, sim={"env": {"hang": 0.1}})
    simulation = play(settings)
    check_laws(settings, simulation)
    reasons = simulation.run.buffer.ledger.reasons()["failed"]
    assert reasons and all(reason == "step: no answer within 5 s" for reason in reasons)


def test_hanging_envs_hold_up_nothing_where_each_group_has_members_to_spare() -> None:
    settings = recipe(
        rollout={"group_size_redundancy": 4, "num_envs": 18}, sim={"env": {"hang": 0.1}}, run={"steps": 12}
    )
    simulation = play(settings)
    check_laws(settings, simulation)
    ledger = simulation.run.buffer.ledger
    assert ledger.reasons() == {"surplus": {"group complete": ledger.counts()["surplus"]}}, "no deadline was met"
    assert ledger.counts()["surplus"] == 12 * 3 * 4


def test_an_env_that_raises_cancelled_error_or_exits_fails_its_episode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rude(SimEnv):
        async def step(self, action):  # type: ignore[no-untyped-def]
            draw = self._rng.random()
            if draw < 0.1:
                raise asyncio.CancelledError
            if draw < 0.2:
                raise SystemExit(3)
            return await super().step(action)

    monkeypatch.setattr("asyncrl.sim.env.SimEnv", Rude)
    reasons = play(recipe()).run.buffer.ledger.reasons()["failed"]
    assert {reason.split(":")[1].strip() for reason in reasons} == {"CancelledError", "SystemExit"}


def test_cancelling_at_any_turn_of_the_loop_leaves_the_books_right() -> None:
    """AsyncController.run raises LedgerError if they were not; besides, servers and environments must be empty, and of
    each step that was trained something is told."""
    slow = {"kind": "normal", "mean": 0.5, "std": 0.5}
    settings = recipe(
        rollout={"batch_groups": 2, "num_envs": 6}, run={"steps": 2}, sim={"env": {"step": slow, "crash": 0.1}}
    )
    turn = 1
    while True:
        simulations: list[Simulation] = []

        if not cancelled_at(turn, started(settings, simulations)):
            break
        turn += 1
        if simulations:
            simulation = simulations[0]
            assert all(i.running == 0 and i.tokens == 0 for i in simulation.run.proxy.instances)
            assert simulation.envs.open == 0
            events = simulation.trace.events
            trained = [event for event in events if event[:3] == ("span", "trainer", "train")]
            assert len(trained) == sum(event[0] == "step" for event in events)
    assert turn > 300
