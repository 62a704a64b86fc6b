"""A controller over a trainer that was resumed: the servers get its weights before anything is generated."""

from __future__ import annotations

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.sim.trainer import SimTrainer

from .world import play, recipe


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_steps_go_on_from_the_trainers_version_and_no_token_is_older(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    make = SimTrainer.__init__

    def resumed(self: SimTrainer, *args: object) -> None:
        make(self, *args)  # type: ignore[arg-type]
        self.version = 2

    async def expect_step_2(simulation: Simulation) -> None:
        simulation.checked._next_step = 2

    monkeypatch.setattr(SimTrainer, "__init__", resumed)
    settings = recipe(weights={"transport": transport}, staleness={"bound": 1})
    batches = play(settings, during=expect_step_2).trace.batches
    assert [batch.step for batch in batches] == [2, 3]
    versions = [v for b in batches for t in b.trajectories for v, m in zip(t.versions, t.loss_mask, strict=True) if m]
    assert min(versions) == 2
