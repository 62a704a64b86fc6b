"""The simulated trainer and the simulated way of weights: times, refusals, deaths."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Awaitable

import pytest

from asyncrl.config import TrainerModel, WeightsModel
from asyncrl.core.transfer import Transport, seconds_to_arrive, seconds_to_deliver, seconds_to_prepare
from asyncrl.core.types import Batch, Group, Task, Trajectory
from asyncrl.ports import EngineError, TrainerDied, TrainerError
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.loop import run
from asyncrl.sim.trainer import SimTrainer, train_seconds
from asyncrl.sim.weights import SimTransport

MODEL = WeightsModel(gigabytes=12.0, gather_gb_s=6.0, disk_gb_s=3.0, link_gb_s=4.0, hop_s=0.01, local_gb_s=24.0)


def batch(step: int, tokens: int = 1000) -> Batch:
    trajectory = Trajectory(
        id=0,
        group_id=0,
        index=0,
        task_id="task 0",
        v_traj=0,
        tokens=array("i", bytes(4 * tokens)),
        loss_mask=array("b", bytes(tokens)),
        logprobs=array("f", bytes(4 * tokens)),
        versions=array("i", bytes(4 * tokens)),
        turns=1,
        reward=0.0,
        finish_reason="stop",
    )
    return Batch(
        step=step, groups=(Group(id=0, task=Task(id="task 0", data={}), v_traj=0, trajectories=(trajectory,)),)
    )


async def lasts(work: Awaitable[object]) -> float:
    started = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - started


def test_a_step_takes_fixed_seconds_and_seconds_by_tokens_and_gpus() -> None:
    model = TrainerModel(tokens_per_s=100.0, gpus=16, scaling=0.5, fixed_s=3.0)
    assert train_seconds(model, 1000) == pytest.approx(3.0 + 1000 / 400)
    trainer = SimTrainer(model)
    assert run(lasts(trainer.train_step(batch(0), [0.0]))) == pytest.approx(5.5)
    assert trainer.version == 1


def test_a_step_out_of_turn_and_missing_advantages_are_refused() -> None:
    trainer = SimTrainer()
    with pytest.raises(TrainerError, match="at version 0 and was asked to train step 1"):
        run(trainer.train_step(batch(1), [0.0]))
    with pytest.raises(TrainerError, match="0 advantages for 1 trajectories"):
        run(trainer.train_step(batch(0), []))


def test_a_trainer_that_dies_in_its_step_fails_at_once_until_it_is_started_again() -> None:
    async def main() -> tuple[float, float]:
        trainer = SimTrainer(TrainerModel(fixed_s=100.0, start_s=20.0))
        loop = asyncio.get_running_loop()
        loop.call_later(30, trainer.crash)
        with pytest.raises(TrainerDied, match="died at version 0"):
            await trainer.train_step(batch(0), [0.0])
        at = loop.time()
        for call in (trainer.watch(), trainer.save("x"), trainer.saved(), trainer.train_step(batch(0), [0.0])):
            with pytest.raises(TrainerDied, match="died at version 0"):
                await call
        assert await lasts(trainer.connect()) == 20
        assert await trainer.train_step(batch(0), [0.0])
        return at, loop.time()

    assert run(main()) == (30, pytest.approx(30 + 20 + train_seconds(TrainerModel(fixed_s=100.0), 1000)))


def test_a_new_job_has_the_weights_of_the_newest_complete_checkpoint() -> None:
    async def main() -> None:
        trainer = SimTrainer(TrainerModel(save_s=5.0))
        first = await trainer.train_step(batch(0), [0.0])
        assert await trainer.save("x") == 1
        assert await lasts(trainer.saved()) == 5
        second = await trainer.train_step(batch(1), [0.0])
        await trainer.save("x")
        trainer.crash()
        with pytest.raises(TrainerDied):
            await trainer.saved()
        assert (await trainer.connect(), trainer.weights) == (1, first.checksum)
        other = await trainer.train_step(batch(1), [0.5])
        trainer.crash()
        await trainer.connect()
        again = await trainer.train_step(batch(1), [0.0])
        assert again.checksum == second.checksum != other.checksum

    run(main())


def server(name: str = "server 0", load_s: float = 0.5) -> SimEngine:
    return SimEngine(name, rng=random.Random(0), lengths=lambda rng, ids: 10, load_s=load_s)


@pytest.mark.parametrize("transport", ["disk", "collective", "relay"])
def test_an_update_takes_the_formulas_seconds_and_the_servers_load(transport: Transport) -> None:
    async def main() -> tuple[list[float], list[int]]:
        engines = [server(f"server {i}") for i in range(3)]
        way = SimTransport(MODEL, transport, servers=3, trainer=SimTrainer())
        parts = [way.prepare(1), way.arrive(engines, 1), way.deliver(engines, 1)]
        seconds = [await lasts(part) for part in parts]
        versions = [e.version for e in engines]
        again = [way.arrive(engines[:1], 1), way.deliver(engines[:1], 1)]
        return seconds + [await lasts(part) for part in again], versions

    (prepare, arrive, deliver, again, one), versions = run(main())
    assert prepare == pytest.approx(seconds_to_prepare(MODEL, transport))
    assert (arrive, again) == (pytest.approx(seconds_to_arrive(MODEL, transport, 3)), 0)
    assert deliver == pytest.approx(seconds_to_deliver(MODEL, transport, 3) + 0.5)
    assert one == pytest.approx(seconds_to_deliver(MODEL, transport, 1) + 0.5)
    assert versions == [1, 1, 1]


def test_relays_pass_a_version_on_before_any_server_asks_for_it() -> None:
    async def main() -> tuple[list[float], float]:
        way = SimTransport(MODEL, "relay", servers=3, trainer=SimTrainer())
        whole = seconds_to_arrive(MODEL, "relay", 3)
        await way.prepare(1)
        await asyncio.sleep(whole / 4)
        async with asyncio.TaskGroup() as pulls:
            first = pulls.create_task(lasts(way.arrive([server()], 1)))
            await asyncio.sleep(whole / 4)
            second = pulls.create_task(lasts(way.arrive([server()], 1)))
        return [first.result(), second.result()], whole

    seconds, whole = run(main())
    assert seconds == pytest.approx([3 * whole / 4, whole / 2])


@pytest.mark.parametrize(
    ("transport", "gone"), [("disk", {0, 1, 4}), ("relay", {0, 1, 4}), ("collective", {0, 1, 2, 4})]
)
def test_only_versions_that_the_real_transport_has_can_be_delivered(transport: Transport, gone: set[int]) -> None:
    async def main() -> set[int]:
        way, refused = SimTransport(MODEL, transport, servers=1, trainer=SimTrainer()), set()
        for version in (1, 2, 3):
            await way.prepare(version)
        for version in range(5):
            try:
                await way.deliver([server()], version)
            except TrainerError as error:
                assert f"version {version} cannot be delivered by {transport}" in str(error)
                refused.add(version)
        return refused

    assert run(main()) == gone


def test_a_server_that_cannot_load_does_not_keep_the_others_from_it() -> None:
    async def main() -> list[int]:
        engines = [server(f"server {i}") for i in range(3)]
        engines[1].corrupt_weights()
        way = SimTransport(MODEL, "disk", servers=3, trainer=SimTrainer())
        await way.prepare(1)
        with pytest.raises(EngineError, match="server 1: version 1 was refused"):
            await way.deliver(engines, 1)
        return [e.version for e in engines]

    assert run(main()) == [1, 0, 1]


def test_a_dead_trainer_prepares_nothing() -> None:
    async def main() -> None:
        trainer = SimTrainer()
        way = SimTransport(MODEL, "relay", servers=1, trainer=trainer)
        trainer.crash()
        with pytest.raises(TrainerError, match="died"):
            await way.prepare(1)

    run(main())
