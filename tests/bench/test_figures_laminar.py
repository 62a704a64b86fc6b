"""Laminar's figures: their worlds are what they say, and what they compute, on one tiny run."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from asyncrl.config import load_table


def test_clusters_are_split_as_in_table_2(script: Any) -> None:
    worlds = script("laminar")
    for model, gpus in script("laminar_fig11").CLUSTERS:
        scale = worlds.scale_of(model, gpus)
        for system in worlds.SYSTEMS:
            trains, serves = worlds.split(system, model, gpus)
            assert trains + serves == gpus * (2 if system == "verl" else 1)
            recipe = load_table(worlds.world(system, model, gpus, scale=scale))
            assert recipe.engine.count * recipe.sim.instance.gpus * scale == pytest.approx(serves, rel=0.05)
    laminar = load_table(worlds.world(model="32B", gpus=128, scale=1))
    assert (laminar.engine.count, laminar.rollout.num_envs) == (16, 8192), "512 trajectories a server, as in figure 9"
    batches = {
        (model, gpus): load_table(worlds.world(model=model, gpus=gpus, scale=1)).rollout.num_envs / worlds.BATCH
        for model, gpus in (("7B", 16), ("7B", 256), ("32B", 512), ("72B", 1024))
    }
    assert list(batches.values()) == [1, 2, 2, 2], "at most two batches of the trainer"
    assert (laminar.engine.roofline_batch, laminar.batch_trajectories) == (185, 8192)


def test_training_keeps_up_with_laminars_servers_in_the_smallest_and_the_largest_cluster(script: Any) -> None:
    worlds = script("laminar")
    for model, (smallest, _, middle, _, largest) in worlds.TABLE_2.items():
        rate, exponent = worlds.training(model)
        assert 0.5 < exponent < 1
        for size in (smallest, largest):
            assert rate * size.laminar[0] ** exponent == pytest.approx(worlds.generated(model, size.laminar[1]))
        assert rate * middle.laminar[0] ** exponent == pytest.approx(
            worlds.generated(model, middle.laminar[1]), rel=0.5
        )


def test_systems_differ_by_their_columns(script: Any) -> None:
    worlds = script("laminar")
    recipes = {name: load_table(worlds.world(name, "32B", 128)) for name in worlds.SYSTEMS}
    assert {name: r.staleness.limit for name, r in recipes.items()} == {
        "verl": 0,
        "one-step": 1,
        "stream generation": 1,
        "AReaL": 4,
        "Laminar": None,
    }
    assert [name for name, r in recipes.items() if r.trainer.stream] == ["stream generation"]
    assert {r.sim.instance.cost for r in recipes.values()} == {worlds.roofline("32B", 4)}
    assert [r.sim.trainer.fixed_s for r in recipes.values()] == [worlds.RESHARD_S, 0, 0, 0, 0]


def test_tool_calls_cut_a_response_of_the_same_mean(script: Any) -> None:
    worlds = script("laminar")
    one, cut = (load_table(worlds.world(model="7B", gpus=64, scale=8, tools=tools)) for tools in (False, True))
    assert (one.env.max_turns, cut.env.max_turns) == (1, 9)
    assert cut.sim.env.turns is not None
    assert cut.sim.lengths.mean * cut.sim.env.turns.expected == pytest.approx(one.sim.lengths.mean, rel=0.01)


@pytest.fixture
def tiny(script: Any) -> Any:
    """A result and what was seen: two servers, 64 trajectories a step, one server away for four minutes."""
    worlds, common, fig16 = script("laminar"), script("common"), script("laminar_fig16")
    fault = {"kind": "kill", "at_s": fig16.DIES_S, "for_s": fig16.OUTAGE_S - fig16.START_S}
    over = {
        "engine": {"count": 2, "max_total_tokens": 200_000},
        "rollout": {"num_envs": 64},
        "run": {"steps": 14},
        "sim": {"faults": [fault], "instance": {"start_s": fig16.START_S}, "trainer": {"tokens_per_s": 1500.0}},
    }
    return worlds.watched(common.merge(worlds.world(scale=128), over))


def test_every_figure_of_a_tiny_run(script: Any, tiny: Any) -> None:
    result, seen = tiny
    fig10, fig14, fig15, fig16 = (script(f"laminar_fig{n}") for n in (10, 14, 15, 16))
    points = fig10.distribution(seen.finished())
    shares: dict[str, float] = {}
    for p in points[2:]:
        shares[p.point.split(":")[0]] = shares.get(p.point.split(":")[0], 0.0) + p.ours
    assert all(share == pytest.approx(1) for share in shares.values())
    fig10.draw(Figure(), points)

    pulls = fig14.compared("32B", 64, [seconds for _, seconds in seen.pulls])
    by_name = {p.point: p.ours for p in fig14.less(pulls)}
    assert by_name["mean below the broadcast, at most"] < by_name["best below the broadcast, at most"]
    assert 0 < by_name["best below the broadcast, at most"] < 1, "both servers pull while the version is on its way"

    throughput, mean, longest, kv = fig15.summed_up(result, seen)
    assert 0 < mean < longest and 0 < kv < 1
    assert throughput == pytest.approx(seen.tokens(seen.start, 1e9) / result.steps[-1]["time/at"], rel=0.5)

    parts = [*fig16.summed_up(result, seen, 1), *fig16.moments(result, seen, 1)]
    generated, trained = ([p for p in parts[5:] if p.trained is which] for which in (False, True))
    assert sum(p.ours * p.seconds for p in generated) == pytest.approx(seen.tokens(seen.start, 1e9))
    assert sum(p.ours * p.seconds for p in trained) == pytest.approx(sum(line["tokens/batch"] for line in result.steps))
    fig16.draw(Figure(), parts)


def test_gains_are_over_each_baseline_and_over_all_in_the_largest_clusters(script: Any) -> None:
    worlds, fig11, fig12 = (script(n) for n in ("laminar", "laminar_fig11", "laminar_fig12"))

    def run(system: str, model: str, gpus: int, tokens: float) -> Any:
        line = {"time/step": 10.0, "tokens/batch": tokens, "bubble/trainer_idle": 0.5, "bubble/share": 0.25}
        steps = [
            line | {"time/at": 10.0 * (i + 1), "staleness/max": i} for i in range(worlds.WARM_UP + worlds.STEPS + 1)
        ]
        return fig11.summed_up(steps, figure="", system=system, model=model, gpus=gpus)

    measured = [
        run("verl", "7B", 64, 100.0),
        run("Laminar", "7B", 64, 100.0),
        run("verl", "7B", 256, 200.0),
        run("Laminar", "7B", 256, 600.0),
    ]
    assert measured[0].ours == pytest.approx(10.0 * worlds.scale_of("7B", 64))
    assert (measured[0].trainer_idle, measured[0].bubbles, measured[0].period) == (0.5, 0.25, 10.0)
    assert measured[0].staleness == worlds.WARM_UP + worlds.STEPS - 1, "of the measured steps"
    found = {p.point: p.ours for p in fig11.gains("", measured, fig11.GAINS, fig11.LARGEST)}
    assert found["Laminar over all, largest clusters"] == pytest.approx(3)
    assert found["Laminar over verl, on average"] == pytest.approx(2)
    assert found["Laminar over verl, at most"] == pytest.approx(3)
    assert [p.ours for p in fig12.spread(measured)] == pytest.approx([2, 1, 3])
    fig11.draw(Figure(), measured)
