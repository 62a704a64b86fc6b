"""The recipe's [sim] reaches the simulated world: each part by what it does to a whole run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.build.errors import leaves
from asyncrl.build.virtual import Simulation, simulated, transport_of
from asyncrl.config import Recipe, RecipeError, load_table
from asyncrl.core.transfer import seconds_to_deliver, seconds_to_prepare
from asyncrl.observe.tally import Tally
from asyncrl.sim.invariants import Stalled
from asyncrl.sim.loop import run
from asyncrl.sim.trace import TraceRecorder
from asyncrl.sim.trainer import train_seconds


def recipe_of(sim: dict[str, Any] | None = None, **tables: Any) -> Recipe:
    """Two servers, three steps of six single-turn trajectories."""
    base: dict[str, Any] = {
        "env": {"max_turns": 1},
        "rollout": {"batch_groups": 3, "group_size": 2, "num_envs": 8, "max_new_tokens": 300, "max_tokens": 400},
        "engine": {"count": 2, "max_running_requests": 8, "max_total_tokens": 4000},
        "run": {"steps": 3},
        "sim": {"lengths": {"kind": "lognormal", "mean": 100, "tailness": 50}, "tasks": 20, **(sim or {})},
    }
    return load_table({**base, **{name: {**base.get(name, {}), **table} for name, table in tables.items()}})


def played(recipe: Recipe) -> Simulation:
    async def main() -> Simulation:
        simulation = await simulated(recipe)
        await simulation.play()
        return simulation

    return run(main(), limit=1e7)


def spans(simulation: Simulation, name: str) -> list[tuple[float, dict[str, Any]]]:
    return [(e[4] - e[3], dict(e[5])) for e in simulation.trace.events if e[0] == "span" and e[2] == name]


def test_a_train_step_takes_the_trainers_seconds() -> None:
    recipe = recipe_of({"trainer": {"fixed_s": 7.0, "tokens_per_s": 10.0, "gpus": 4, "scaling": 0.5}})
    simulation = played(recipe)
    tokens = [sum(g.tokens for g in b.groups) for b in simulation.trace.batches]
    expected = [7.0 + n / 20.0 for n in tokens]
    assert expected == pytest.approx([train_seconds(recipe.sim.trainer, n) for n in tokens])
    assert [seconds for seconds, _ in spans(simulation, "train")] == pytest.approx(expected)


@pytest.mark.parametrize("transport", ["disk", "collective", "relay"])
def test_an_update_takes_the_transports_seconds_and_the_servers_load(transport: Any) -> None:
    weights = {"transport": transport, "gigabytes": 30.0, "hop_s": 0.02}
    recipe = recipe_of({"weights": weights, "instance": {"load_s": 3.0}})
    assert transport_of(recipe) == transport
    simulation = played(recipe)
    prepare = seconds_to_prepare(recipe.sim.weights, transport)
    deliver = seconds_to_deliver(recipe.sim.weights, transport, 2)
    assert [s for s, _ in spans(simulation, "prepare weights")] == pytest.approx([prepare] * 3)
    assert [s for s, _ in spans(simulation, "suspended")] == pytest.approx([deliver + 3.0] * 3)


def test_by_default_weights_travel_as_in_the_real_run() -> None:
    for transport in ("disk", "collective"):
        assert transport_of(recipe_of(weights={"transport": transport})) == transport


def test_servers_are_as_fast_as_their_cost_model() -> None:
    cost = {"k1": 0.0, "k2": 0.0, "k3": 0.0, "k4": 0.25, "k5": 0.0}
    simulation = played(recipe_of({"instance": {"cost": cost}}, staleness={"bound": 0}))
    generated = spans(simulation, "generate")
    assert generated and all(seconds == pytest.approx(0.25 * args["tokens"]) for seconds, args in generated)


def test_a_profile_takes_the_place_of_the_cost_model() -> None:
    with pytest.raises(RecipeError, match=r"sim\.instance\.profile = /no/such/profile\.json"):
        played(recipe_of({"instance": {"profile": "/no/such/profile.json"}}))
    cost = {"k1": 0.0, "k2": 0.0, "k3": 0.0, "k4": 0.25, "k5": 0.0}
    generated = spans(played(recipe_of({"instance": {"profile": "qwen3-8b@h100", "cost": cost}})), "generate")
    assert generated and all(seconds < 0.2 * args["tokens"] for seconds, args in generated)


def test_responses_are_as_long_as_the_recipe_says() -> None:
    simulation = played(recipe_of({"lengths": {"kind": "constant", "value": 17}}))
    assert {t.generated for b in simulation.trace.batches for t in b.trajectories} == {17}
    capped = played(recipe_of({"lengths": {"kind": "constant", "value": 1700}}))
    assert {(t.generated, t.finish_reason) for b in capped.trace.batches for t in b.trajectories} == {(300, "length")}


def test_prompts_and_observations_are_as_long_as_the_recipe_says() -> None:
    simulation = played(
        recipe_of(
            {
                "prompt_tokens": {"kind": "constant", "value": 40},
                "lengths": {"kind": "constant", "value": 10},
                "env": {"observation_tokens": {"kind": "constant", "value": 5}},
            },
            env={"max_turns": 3},
        )
    )
    for trajectory in (t for b in simulation.trace.batches for t in b.trajectories):
        assert trajectory.turns == 3
        assert len(trajectory.tokens) == 40 + 3 * 10 + 2 * 5
        assert trajectory.turn_ends == (50, 65, 80)


def test_tasks_are_as_many_as_the_recipe_says_and_held_out_ones_are_played() -> None:
    simulation = played(recipe_of({"tasks": 2, "heldout": 5, "env": {"success": 1.0}}))
    assert {t.task_id for b in simulation.trace.batches for t in b.trajectories} == {"task 0", "task 1"}
    assert [e for e in simulation.trace.events if e[0] == "eval"] == [("eval", 0, 1.0, 5), ("eval", 3, 1.0, 5)]


def test_environments_take_their_time() -> None:
    def first_step(env: dict[str, Any]) -> float:
        return min(e[1] for e in played(recipe_of({"env": env})).trace.events if e[0] == "step")

    slow = {"kind": "constant", "value": 40.0}
    assert first_step({"reset": slow}) - first_step({}) == pytest.approx(40, abs=1)
    assert first_step({"step": slow}) - first_step({}) == pytest.approx(40, abs=1)


def test_faults_of_the_recipe_and_of_the_seed_are_played() -> None:
    faults = [{"kind": "slow", "at_s": 1.0, "for_s": 2.0, "server": 1}]
    events = played(recipe_of({"faults": faults, "random_faults": 3, "random_within_s": 3.0})).trace.events
    struck = [e[2] for e in events if e[0] == "instant" and e[2] != "down" and "ends" not in e[2]]
    assert len(struck) == 4 and "slow" in struck
    assert ("instant", "server 1", "slow", 1.0, (("factor", 4.0), ("for_s", 2.0))) in events


def test_a_run_without_steps_for_too_long_is_stopped() -> None:
    recipe = recipe_of({"trainer": {"fixed_s": 5000.0}, "stall_s": 1000.0})
    with pytest.raises(ExceptionGroup) as caught:
        played(recipe)
    [error] = leaves(caught.value)
    assert isinstance(error, Stalled)
    assert "no train step for 1000 s, at 1000.000 s" in str(error) and "<SimTrainer v0 trains step 0>" in str(error)


def test_an_observer_hears_what_the_trace_would() -> None:
    recipe = recipe_of()
    trace = TraceRecorder()
    tallies: list[Tally] = []

    async def main(tally: bool) -> Simulation:
        tallies.append(Tally(recipe, asyncio.get_running_loop().time))
        simulation = await simulated(recipe, observer=tallies[0] if tally else trace)
        await simulation.play()
        return simulation

    assert run(main(False)).trace.events == []
    assert trace.events == played(recipe).trace.events and trace.batches == []
    tallies.clear()
    run(main(True))
    assert len(tallies[0].rewards) == 3 and tallies[0].states["consumed"] == 18


def test_two_policies_are_given_the_same_work() -> None:
    """The responses that a task is asked for are equally long whatever is decided about them, and so are the outcomes
    of its episodes."""

    def work(**tables: Any) -> dict[str, list[tuple[int, float]]]:
        simulation = played(recipe_of({"env": {"spread": 0.5}}, run={"steps": 6}, **tables))
        done: dict[str, list[Any]] = {}
        for group in (g for b in simulation.trace.batches for g in b.groups):
            lengths, rewards = sorted(t.generated for t in group.trajectories), sorted(group.rewards)
            done.setdefault(group.task.id, []).append((group.id, lengths, rewards))
        return {task: [rest for _, *rest in sorted(groups)][:1] for task, groups in done.items()}  # type: ignore[misc]

    synchronous = work(staleness={"bound": 0})
    others = [
        work(staleness={"bound": 2}),
        work(engine={"count": 1, "routing": "round_robin"}, update={"running": "drain"}),
        work(rollout={"num_envs": 2}),
    ]
    for other in others:
        both = synchronous.keys() & other.keys()
        assert len(both) > 12
        assert {task: synchronous[task] for task in both} == {task: other[task] for task in both}


def test_a_shorter_context_of_the_model_is_heeded() -> None:
    async def main() -> None:
        await simulated(recipe_of(), context_length=350)

    with pytest.raises(RecipeError, match=r"rollout\.max_tokens = 400: the servers take at most 350"):
        run(main())
