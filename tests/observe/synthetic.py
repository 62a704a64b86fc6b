"""A made-up run, told to a Recorder: two servers, a trainer, rewards that rise, responses with a long tail."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

from asyncrl import config
from asyncrl.config import Recipe, RolloutConfig, RunConfig, StalenessConfig
from asyncrl.core.types import OBSERVED_VERSION, Batch, Group, Task, Trajectory
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.run_dir import RECIPE, write_atomic
from asyncrl.observe.summary import write_summary
from asyncrl.ports import StepMetrics

START = 1000.0


class Clock:
    """Loop time that a test sets."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_recipe(steps: int = 60, bound: float = 1.0) -> Recipe:
    return Recipe(
        name="countdown",
        seed=7,
        rollout=RolloutConfig(batch_groups=4, group_size=4),
        staleness=StalenessConfig(bound=bound),
        run=RunConfig(steps=steps),
    )


def make_trajectory(
    id: int = 0, *, v_traj: int = 0, reward: float = 0.0, length: int = 5, versions: list[int] | None = None
) -> Trajectory:
    """Two observed tokens, then ``length`` generated ones, by ``versions`` or all by ``v_traj``."""
    generated = versions if versions is not None else [v_traj] * length
    n = len(generated)
    return Trajectory(
        id=id,
        group_id=id // 4,
        index=id % 4,
        task_id=f"train/{id // 4}",
        v_traj=v_traj,
        tokens=array("i", range(n + 2)),
        loss_mask=array("b", [0, 0] + [1] * n),
        logprobs=array("f", [0.0, 0.0] + [-0.123456] * n),
        versions=array("i", [OBSERVED_VERSION, OBSERVED_VERSION, *generated]),
        turns=1,
        reward=reward,
        finish_reason="stop",
        metrics={"accuracy": reward},
    )


def by_staleness(step: int) -> dict[str, float]:
    """What a trainer says of tokens of each staleness; the first step has only fresh ones."""
    ages = range(min(2, step + 1))
    return {
        f"{name}_staleness_{age}": scale * (1 + age) * (1 + step % 5)
        for name, scale in (("kl", 0.001), ("clip_fraction", 0.02))
        for age in ages
    }


def make_step(step: int, trajectories: list[Trajectory], at: float, **changes: float) -> StepMetrics:
    group = Group(id=step, task=Task(id="t", data={}), v_traj=0, trajectories=tuple(trajectories))
    times = {"seconds": 3.0, "wait_s": 1.0, "train_s": 1.5, "update_s": 0.25} | changes
    return StepMetrics(
        batch=Batch(step=step, groups=(group,)),
        at=at,
        seconds=times["seconds"],
        wait_s=times["wait_s"],
        train_s=times["train_s"],
        update_s=times["update_s"],
        tokens=int(changes.get("tokens", 100 * (step + 1))),
        trainer={
            "loss": 0.5 / (step + 1),
            "grad_norm": 1.25,
            "entropy": 3.0 / (step + 1),
            "rank/mfu/mean": 0.25,
            **by_staleness(step),
        },
        buffer={"reserved": 3, "occupied": 2},
        ledger={"running": 5, "consumed": 16 * (step + 1)},
    )


def tell_run(recorder: Recorder, clock: Clock, steps: int, servers: int = 2, seed: int = 0) -> None:
    """Events of a whole run. Servers pause for a moment at each update; their load thins out before a batch is full."""
    rng = random.Random(seed)
    names = [f"server {i}" for i in range(servers)]
    tokens = 0
    ids = iter(range(10**9))
    for name in names:
        recorder.server(name, clock.now, 0, 0)
    recorder.eval(0, 0.21, 128)
    clock.now += 2.0
    for step in range(steps):
        begun = clock.now
        wait = rng.uniform(0.4, 1.5) * (2 if step == 0 else 1)
        train, update = rng.uniform(1.2, 1.8), rng.uniform(0.1, 0.3)
        for name in names:
            at = begun
            while at < begun + wait + train - 0.05:
                end = min(at + rng.expovariate(0.6), begun + wait + train)
                recorder.server(name, at, rng.randint(1, 16), step)
                recorder.span(name, "request", at, end, {"version": step})
                recorder.server(name, end, 0, step)
                at = end + rng.expovariate(12.0)
        clock.now = begun + wait
        recorder.span("trainer", "wait", begun, clock.now)
        recorder.span("trainer", "train", clock.now, clock.now + train, {"version": step})
        clock.now += train
        for name in names:
            late = clock.now + update * rng.uniform(0.8, 1.0)
            recorder.span(name, "update", clock.now, late, {"version": step + 1})
            recorder.server(name, late, 0, step + 1)
        clock.now += update
        skill = 0.2 + 0.75 / (1 + 2.718 ** (-(step - steps / 2) / (steps / 10)))
        batch = []
        for _ in range(16):
            length = min(512, int(rng.lognormvariate(3.6, 0.9)) + 3)
            tokens += length
            v_traj = max(0, step - (rng.random() < 0.7))
            batch.append(make_trajectory(next(ids), v_traj=v_traj, length=length, reward=float(rng.random() < skill)))
        for trajectory in batch:
            recorder.trajectory(trajectory, "consumed")
        recorder.counter("rollout/tokens", clock.now, tokens)
        recorder.counter("rollout/waiting", clock.now, rng.randint(0, 9))
        times = {"seconds": wait + train + update, "wait_s": wait, "train_s": train, "update_s": update}
        recorder.step(make_step(step, batch, clock.now, tokens=tokens, **times))
    recorder.eval(steps, 0.92, 128)


def make_run(path: Path, steps: int = 60, servers: int = 2) -> Recorder:
    """A finished run directory; returns its (closed) recorder."""
    clock = Clock()
    recipe = make_recipe(steps)
    recorder = Recorder(path, recipe, clock)
    write_atomic(path / RECIPE, config.dumps(recipe))
    tell_run(recorder, clock, steps, servers)
    recorder.close()
    ledger = {"consumed": 16 * steps, "surplus": 3}
    started, command = "2026-01-02T03:04:05+00:00", ["asyncrl", "train"]
    write_summary(path, recorder.summary(exit="finished", started=started, command=command, ledger=ledger))
    return recorder
