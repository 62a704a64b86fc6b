"""DORA's figures: their worlds are what their texts say, and what they compute of a run."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import load_table


def test_the_trainer_is_as_the_paper_s_steps_show_it(script: Any) -> None:
    dora = script("dora")
    tokens = 14_143 * 22.91 * 60 / dora.SCALE
    for gpus, minutes, hidden_from in ((64, 22.91, 0.65), (128, 20.23, 0.73), (32, 14.67, 0.12), (64, 10.46, 0.24)):
        assert dora.train_seconds(gpus, tokens) == pytest.approx(60 * minutes * (1 - hidden_from), rel=0.03)


def test_systems_that_take_turns_have_all_gpus_and_the_others_half_each(script: Any) -> None:
    dora = script("dora")
    servers = {system: load_table(dora.world(system, 64)).engine.count for system in dora.SYSTEMS}
    assert servers == {"synchronous": 16, "one-off": 8, "partial rollout": 16, "DORA": 8}
    assert load_table(dora.world("DORA", 128)).sim.trainer.gpus == 64


def test_partial_rollout_s_training_is_added_to_its_steps(script: Any) -> None:
    figure, dora = script("dora_fig10"), script("dora")
    count = dora.WARM_UP + dora.STEPS
    lines = [{"time/at": 100.0 * (i + 1), "time/train": 60.0, "trainer/tokens": 1e6} for i in range(count)]
    result = type("R", (), {"steps": lines})()
    assert figure.summed_up("DORA", 64, result) == pytest.approx((100.0, 40.0, dora.SCALE * 1e4))
    training = dora.train_seconds(64, 1e6)
    step, rollout, _ = figure.summed_up("partial rollout", 64, result)
    assert (step, rollout) == pytest.approx((100.0 + training, 100.0))
