"""Trainers that die, on virtual time: at any moment, while they do anything; and what cannot be made good."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from asyncrl.build.errors import leaves
from asyncrl.build.virtual import Simulation
from asyncrl.config import Recipe
from asyncrl.core.advantage import Advantage
from asyncrl.core.journal import Saved, SavedStep, Work
from asyncrl.core.types import Batch
from asyncrl.ports import NoStore, StepResult, Trainer, TrainerDied, TrainerError
from asyncrl.runtime.restarts import RestartingTrainer
from asyncrl.sim.loop import run
from asyncrl.sim.trace import TraceRecorder
from asyncrl.sim.trainer import SimTrainer, _checksum

from .world import check_laws, play, random_recipe, recipe, started

TRAINER = {"restart_backoff_s": 0.5, "replay_steps": 2}
SIM_TRAINER = {"fixed_s": 1.0, "start_s": 3.0, "save_s": 1.5}


def dying(*at_s: float, **tables: Any) -> Recipe:
    """A small run whose trainer dies at these times, and has a checkpoint of every other step."""
    sim = tables.pop("sim", {})
    faults = [{"kind": "trainer_crash", "at_s": at} for at in at_s]
    settings = {"trainer": TRAINER, "run": {"steps": 6}, **tables}
    return recipe(**settings, sim={"trainer": SIM_TRAINER, "faults": faults, **sim})


def check_trained_once(settings: Recipe, simulation: Simulation) -> None:
    """In the history of the weights that survived, each step is trained once, on the batch that the ledger has."""
    check_laws(settings, simulation)
    history: list[int] = []
    for step in simulation.trainer.trained:
        assert step <= len(history), f"step {step} was left out: {simulation.trainer.trained}"
        del history[step:]
        history.append(step)
    assert history == list(range(settings.run.steps))
    if settings.streamed_groups:
        return  # the weights depend on the parts too; that they were the same ones is the restart's own check
    weights = 0
    for batch in simulation.trace.batches:
        weights = _checksum(batch, simulation.run.controller._advantages(batch), weights)
    assert simulation.trainer.weights == weights


def restarts(simulation: Simulation) -> list[tuple[float, float, int]]:
    """Begin and end of each, and how many steps were trained again."""
    return [
        (e[3], e[4], dict(e[5])["steps"]) for e in simulation.trace.events if e[:3] == ("span", "trainer", "restart")
    ]


@pytest.mark.parametrize("transport", ["disk", "collective", "relay"])
@pytest.mark.parametrize("alpha", [0, 1])
def test_a_trainer_may_die_at_any_moment(transport: str, alpha: int) -> None:
    """Before and in a step, while weights are gathered, sent, and saved: the sweep meets all of it."""
    weights = {"transport": transport, "gigabytes": 4.0, "gather_gb_s": 4.0, "link_gb_s": 4.0, "hop_s": 0.0}
    replayed = set()
    for tick in range(60):
        settings = dying(0.31 * tick, staleness={"bound": alpha}, sim={"weights": weights})
        simulation = play(settings)
        check_trained_once(settings, simulation)
        replayed |= {steps for _, _, steps in restarts(simulation)}
    assert replayed >= {0, 1, 2}


def test_a_checkpoint_that_is_lost_with_its_trainer_is_made_up_for_at_once() -> None:
    """In its turn, what has to be trained again would be twice as much at the next death, and so on."""
    again = []
    for tick in range(30):
        first = 2.0 + 0.31 * tick
        settings = dying(
            first, first + 9.0, first + 18.0, run={"steps": 12}, sim={"trainer": {**SIM_TRAINER, "save_s": 0.9}}
        )
        simulation = play(settings)
        check_trained_once(settings, simulation)
        again += [steps for _, _, steps in restarts(simulation)]
    assert max(again) <= 3, "the two of a turn, and one while its checkpoint was written"


@pytest.mark.parametrize("seed", range(60))
def test_laws_hold_for_any_settings_and_several_deaths(seed: int) -> None:
    rng = random.Random(seed)
    faults = [{"kind": "trainer_crash", "at_s": rng.uniform(0, 60)} for _ in range(3)]
    sim = {"trainer": SIM_TRAINER, "faults": faults, "stall_s": 2e4}
    settings = random_recipe(seed, trainer=TRAINER, run={"steps": 6, "checkpoint_every": rng.choice([0, 1])}, sim=sim)
    check_trained_once(settings, play(settings))


def test_rollouts_go_on_until_the_bound_holds_them() -> None:
    settings = dying(6.0, sim={"trainer": {**SIM_TRAINER, "start_s": 200.0}})
    simulation = play(settings)
    check_trained_once(settings, simulation)
    [(died, back, _)] = restarts(simulation)
    ends = [e[4] for e in simulation.trace.events if e[0] == "span" and e[2] == "episode" and died < e[4] < back]
    assert len(ends) >= settings.batch_trajectories  # at α = 1 at least the next batch
    assert max(ends) < died + 50  # and then nothing may begin


def test_a_death_that_nobody_asked_about_is_noticed_at_once() -> None:
    """The trainer waits for a slow batch; its restart costs nothing then."""
    slow = {"env": {"step": {"kind": "constant", "value": 30.0}}}
    undisturbed, disturbed = play(dying(sim=slow)), play(dying(20.0, sim=slow))
    assert restarts(disturbed)[0][0] == 20.0
    steps = [[e[1] for e in s.trace.events if e[0] == "step"] for s in (undisturbed, disturbed)]
    assert steps[0] == steps[1]


def test_too_many_deaths_without_a_step_between_end_the_run() -> None:
    at = 5.0, 9.0, 13.5, 19.0  # each a moment after the job is back, which takes 3.5, 4 and 5 s
    with pytest.raises(ExceptionGroup) as caught:
        play(dying(*at))
    assert {type(e) for e in leaves(caught.value)} == {TrainerDied}
    assert "died at version" in str(leaves(caught.value)[0])
    settings = dying(*(20.0 * i for i in range(1, 6)), run={"steps": 30})
    check_trained_once(settings, play(settings))  # as many as there may be, where steps lie between


def failed(settings: Recipe) -> str:
    """The one line of a run that ends by its trainer; the books balance."""
    simulations: list[Simulation] = []
    with pytest.raises(ExceptionGroup) as caught:
        run(started(settings, simulations), limit=1e6)
    assert all(isinstance(e, TrainerError) for e in leaves(caught.value))
    simulations[0].run.buffer.ledger.check_balanced()
    line = str(leaves(caught.value)[0])
    assert "\n" not in line
    return line


class KilledOnce:
    """A job that dies as it trains step 1 again, the first time."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    async def connect(self) -> int:
        return 0

    async def train_step(self, batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
        self.trained.append(batch.step)
        if self.trained == [0, 1]:
            raise TrainerDied("trainer: killed")
        return StepResult(version=batch.step + 1, metrics={}, checksum=7)


class Kept(NoStore):
    keeps = True

    async def trained_on(self, step: int) -> SavedStep:
        return SavedStep(fed=(), work=Work(batch=Batch(step=step, groups=()), advantages=()), checksum=7)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_trainer_that_dies_while_a_run_goes_on_from_its_store_is_started_again(restarts: int) -> None:
    job, notes = KilledOnce(), list[str]()
    trainer = RestartingTrainer(
        cast(Trainer, job),
        restarts=restarts,
        replay_steps=1,
        backoff_s=1.0,
        observer=TraceRecorder(),
        note=notes.append,
        store=Kept(),
        saved=Saved(life=1, version=3),
    )
    if restarts:
        assert run(trainer.connect()) == 3
        assert job.trained == [0, 1, 0, 1, 2]
        assert notes[0].startswith("trainer: killed; starting it again (1 of 1)")
    else:
        with pytest.raises(TrainerDied, match="killed"):
            run(trainer.connect())


def test_steps_that_are_not_kept_any_more_end_the_run() -> None:
    settings = dying(40.0, trainer={**TRAINER, "replay_steps": 1}, run={"steps": 50})
    settings_sim = {"trainer": {**SIM_TRAINER, "save_s": 1e5}}
    line = failed(dying(40.0, trainer={**TRAINER, "replay_steps": 1}, run={"steps": 50}, sim=settings_sim))
    assert line.startswith("trainer: its newest checkpoint is of version 0, and step 0 is not kept any more")
    check_trained_once(settings, play(settings))  # had the checkpoints been written


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Has trainers give other weights when step 1 is trained again, and say whether they ``repeat`` themselves."""
    train_step = SimTrainer.train_step

    def make(repeats: bool) -> None:
        async def moody(self: SimTrainer, batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
            result = await train_step(self, batch, advantages)
            self.weights += self.trained.count(1) > 1
            return StepResult(version=result.version, metrics=result.metrics, checksum=self.weights, repeats=repeats)

        monkeypatch.setattr(SimTrainer, "train_step", moody)

    return make


def test_a_step_that_gives_other_weights_the_second_time_ends_the_run(moody: Callable[[bool], None]) -> None:
    moody(True)
    line = failed(dying(12.0, trainer={**TRAINER, "replay_steps": 5}))
    assert line.startswith("trainer: step 1, trained again, gave other weights than before (checksum ")


def test_a_run_goes_on_with_a_trainer_that_does_not_repeat_itself(moody: Callable[[bool], None]) -> None:
    """As on GPUs. Steps since then give other weights too, and the next death finds those."""
    moody(False)
    settings = dying(12.0, 17.0, 24.0, trainer={**TRAINER, "replay_steps": 5}, run={"steps": 8})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert simulation.trainer.trained.count(1) > 1
    assert simulation.trainer.trained[-1] == 7


class Drifting:
    """A job that gives other weights each time, and dies at the first try of step 3."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    async def connect(self) -> int:
        return 0

    async def train_step(self, batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
        self.trained.append(batch.step)
        if self.trained == [0, 1, 2, 3]:
            raise TrainerDied("trainer: killed")
        return StepResult(version=batch.step + 1, metrics={}, checksum=len(self.trained), repeats=False)


def test_that_a_trainer_did_not_repeat_itself_is_told_once() -> None:
    job, notes = Drifting(), list[str]()
    trainer = RestartingTrainer(
        cast(Trainer, job), restarts=1, replay_steps=5, backoff_s=1.0, observer=TraceRecorder(), note=notes.append
    )

    async def steps() -> None:
        await trainer.connect()
        for step in range(4):
            await trainer.train_step(Batch(step=step, groups=()), ())

    run(steps())
    assert job.trained == [0, 1, 2, 3, 0, 1, 2, 3] and trainer.version == 4
    assert [trainer._kept[step].checksum for step in range(4)] == [5, 6, 7, 8], "those of the weights that survive"
    told = [note for note in notes if "gave other weights" in note]
    assert len(told) == 1 and told[0].startswith(
        "trainer: step 0, trained again, gave other weights than before, as it"
    )
