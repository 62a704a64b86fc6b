"""The buffer with a sampler, a writer, reuse and a capacity: in single steps, and in whole runs on virtual time."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.config import RecipeError
from asyncrl.core.experience import SAMPLERS
from asyncrl.core.staleness.base import StalenessViolation
from asyncrl.core.staleness.buffers import StalenessBuffers
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.staleness.inherent import InherentStaleness
from asyncrl.runtime.experience import Experience
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.sim.loop import run

from .buffers import blocked, ended, leases, make, put
from .world import cancelled_at, check_laws, laminar_recipe, play, random_recipe, recipe, started

OWN = Path(__file__).parent.parent / "build" / "own_experience.py"


def reusing(reuse: int, alpha: float = 3, **kwargs: Any) -> SampleBuffer:
    """A batch is one group of two."""
    return make(
        control=InflightCap(batch=1, alpha=alpha, reuse=reuse),
        experience=Experience(sampler=SAMPLERS["fifo"], reuse=reuse, **kwargs),
        replicate=False,
    )


def test_a_group_is_trained_as_often_as_reuse_says_and_consumed_once() -> None:
    async def main() -> None:
        buffer = reusing(3)
        put(buffer, *await leases(buffer, 1), rewards=(1.0, 0.0))
        for step in range(3):
            batch = await buffer.get_batch(step)
            assert [g.id for g in batch.groups] == [0] and batch.staleness == [step]
            assert buffer.ledger.counts()["consumed"] == 2 and buffer.ledger.uses == 2 * (step + 1)
            buffer.ledger.check_conserved()
        assert buffer.snapshot().reused == 2
        assert ended(buffer) == [(0, "consumed"), (1, "consumed")]
        buffer.set_version(3)
        put(buffer, *await leases(buffer, 1), rewards=(1.0, 0.0))
        assert [g.id for g in (await buffer.get_batch(3)).groups] == [1]
        buffer.close("run ended")
        buffer.ledger.check_balanced()

    run(main())


def test_no_use_is_later_than_the_deadline() -> None:
    async def main() -> None:
        buffer = reusing(9, alpha=1)
        first, second = await leases(buffer, 1), []
        put(buffer, *first, rewards=(1.0, 0.0))
        assert [(await buffer.get_batch(step)).groups[0].id for step in range(2)] == [0, 0]
        assert not buffer._experience.used, "it may be trained by steps 0 and 1, but still waits for step 2"
        buffer.set_version(2)
        second = await leases(buffer, 1)
        put(buffer, *second, rewards=(1.0, 0.0))
        assert [g.id for g in (await buffer.get_batch(2)).groups] == [1]

    run(main())


def test_a_use_too_many_or_too_late_is_a_bug() -> None:
    async def main() -> None:
        buffer = reusing(3, alpha=2)
        put(buffer, *await leases(buffer, 1), rewards=(1.0, 0.0))
        await buffer.get_batch(0)
        experience = buffer._experience
        with pytest.raises(
            StalenessViolation, match=r"group 0, used 1 times, would be trained at step 3: .* up to step 2"
        ):
            experience.take([0], 3)

    run(main())


def test_a_full_buffer_lets_go_of_what_the_sampler_wants_least() -> None:
    async def main() -> None:
        buffer = make(
            control=InherentStaleness(batch=1, capacity=9),
            experience=Experience(sampler=SAMPLERS["advantage"], capacity=2),
            replicate=False,
        )
        got = await leases(buffer, 3)
        for lease in got:
            assert buffer.assign(lease.group_id, 0)
        put(buffer, got[0], (0.0, 0.5))
        put(buffer, got[1], (0.0, 0.0))
        put(buffer, got[2], (0.0, 1.0))
        assert ended(buffer) == [(2, "surplus"), (3, "surplus")]
        assert buffer.ledger.reasons() == {"surplus": {"buffer full": 2}}
        assert [(await buffer.get_batch(step)).groups[0].id for step in range(2)] == [2, 0]

    run(main())


def test_with_fifo_the_oldest_leaves_a_full_buffer() -> None:
    async def main() -> None:
        buffer = reusing(1, capacity=2)
        for lease in await leases(buffer, 3):
            put(buffer, lease, rewards=(1.0, 0.0))
        assert ended(buffer) == [(0, "surplus"), (1, "surplus")]
        assert [(await buffer.get_batch(step)).groups[0].id for step in range(2)] == [1, 2]

    run(main())


def test_with_fifo_a_full_buffer_lets_go_of_what_was_used_first() -> None:
    async def main() -> None:
        buffer = reusing(2, capacity=1)
        put(buffer, *await leases(buffer, 1), rewards=(1.0, 0.0))
        await buffer.get_batch(0)
        assert [*buffer._experience.used] == [0]
        put(buffer, *await leases(buffer, 1), rewards=(1.0, 0.0))
        assert not buffer._experience.used
        assert ended(buffer) == [(0, "consumed"), (1, "consumed")], "it was trained: it is not surplus"
        assert [g.id for g in (await buffer.get_batch(1)).groups] == [1]
        buffer.close("run ended")
        buffer.ledger.check_balanced()

    run(main())


def test_a_writer_filters_groups_and_changes_rewards() -> None:
    async def main() -> None:
        def writer(group: Any) -> Any:
            return (
                False if sum(group.rewards) < 1 else [2 * r for r in group.rewards] if sum(group.rewards) < 2 else True
            )

        buffer = make(
            control=InflightCap(batch=2, alpha=1),
            experience=Experience(writer=writer),
            filter_zero_variance=True,
            replicate=False,
        )
        got = await leases(buffer, 4)
        for lease, rewards in zip(got, [(0.0, 0.5), (0.0, 1.0), (2.0, 2.0), (3.0, 1.0)], strict=True):
            put(buffer, lease, rewards)
        assert [g.rewards for g in (await buffer.get_batch(0)).groups] == [[0.0, 2.0], [3.0, 1.0]]
        assert buffer.ledger.reasons() == {"filtered": {"buffer.writer": 2, "zero variance": 2}}
        assert not await blocked(buffer), "what is filtered is refilled"

    run(main())


def test_a_control_with_an_order_of_its_own_takes_no_sampler() -> None:
    with pytest.raises(ValueError, match="takes no sampler"):
        make(control=StalenessBuffers(batch=2, bound=1), experience=Experience(sampler=SAMPLERS["staleness"]))
    with pytest.raises(ValueError, match="need a sampler"):
        Experience(reuse=2)


# --- whole runs -------------------------------------------------------------------------------------------------------


def drawn(seed: int) -> dict[str, Any]:
    """A ``[buffer]``."""
    rng = random.Random(f"buffer {seed}")
    return {
        "sampler": rng.choice([*SAMPLERS, f"{OWN}:shortest"]),
        "writer": rng.choice(["", f"{OWN}:no_failures"]),
        "reuse": rng.choice([1, 2, 4]),
    }


@pytest.mark.parametrize("seed", range(24))
def test_laws_hold_whatever_the_sampler(seed: int) -> None:
    rng = random.Random(f"control {seed}")
    staleness = {"control": rng.choice(["inflight_cap", "queue_drop"]), "bound": rng.choice([1, 1.5, 2, 3])}
    settings = random_recipe(seed, staleness=staleness, buffer=drawn(seed), trainer={"stream": False})
    check_laws(settings, play(settings))


@pytest.mark.parametrize("seed", range(8))
def test_laws_hold_for_servers_with_batches_of_their_own(seed: int) -> None:
    buffer = {**drawn(seed), "capacity": random.Random(seed).choice([0.0, 1.0, 2.5])}
    settings = laminar_recipe(seed, staleness={"control": "inherent"}, buffer=buffer, trainer={"stream": False})
    check_laws(settings, play(settings))


def test_servers_that_no_step_waited_for_still_get_the_version_that_is_evaluated() -> None:
    """Reuse may train the last steps before any server has ended its batch."""
    settings = laminar_recipe(1317, staleness={"control": "inherent"}, buffer={"reuse": 4}, trainer={"stream": False})
    check_laws(settings, play(settings))


SLOW: dict[str, Any] = {"rollout": {"num_envs": 4}, "sim": {"trainer": {"fixed_s": 0.1}}, "run": {"steps": 12}}
"""The trainer waits for the servers."""


def test_where_generation_is_the_bottleneck_reuse_trains_more_steps_in_the_same_time() -> None:
    once = play(recipe(staleness={"bound": 3}, **SLOW)).trace
    twice = play(recipe(staleness={"bound": 3}, buffer={"reuse": 2}, **SLOW)).trace
    uses = Counter(g.id for b in twice.batches for g in b.groups)
    assert max(uses.values()) == 2
    ends = [max(e[1] for e in trace.events if e[0] == "step") for trace in (once, twice)]
    assert ends[1] < 0.8 * ends[0]


def test_what_is_reused_counts_in_the_steps_metrics_and_its_staleness_at_each_use() -> None:
    batches = play(recipe(staleness={"bound": 3}, buffer={"reuse": 2}, **SLOW)).trace.batches
    seen: dict[int, int] = {}
    for batch in batches:
        for group, staleness in zip(batch.groups, batch.staleness, strict=True):
            assert staleness > seen.get(group.id, -1) and staleness <= 3
            seen[group.id] = staleness


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        ({"sampler": f"{OWN}:raising"}, "own_experience.py:raising: KeyError: 'no such score' .*py:[0-9]+.$"),
        ({"sampler": f"{OWN}:in_a_library"}, r"in_a_library: JSONDecodeError: .*/own_experience\.py:[0-9]+.$"),
        ({"sampler": f"{OWN}:too_few"}, "buffer.sampler: .*:too_few: gave 2 scores; give one for each group, 3 here"),
        ({"writer": f"{OWN}:not_finite"}, "buffer.writer: .*:not_finite: gave the reward nan; give finite numbers"),
        ({"writer": f"{OWN}:nothing"}, "buffer.writer: .*:nothing: gave NoneType; give a list"),
        ({"writer": f"{OWN}:missing"}, "buffer.writer: .*own_experience.py has no 'missing'"),
    ],
)
def test_a_users_function_that_fails_ends_the_run_with_one_line(buffer: dict[str, str], said: str) -> None:
    with pytest.raises((RecipeError, ExceptionGroup)) as raised:
        play(recipe(staleness={"bound": 1}, buffer=buffer))
    error: BaseException = raised.value
    while isinstance(error, ExceptionGroup):
        [error] = error.exceptions
    assert isinstance(error, RecipeError)
    assert re.search(said, str(error)) and "\n" not in str(error)


def test_cancelling_a_run_that_reuses_leaves_the_books_right() -> None:
    settings = recipe(
        staleness={"bound": 3}, buffer={"reuse": 2, "sampler": "staleness"}, **{**SLOW, "run": {"steps": 3}}
    )
    for turn in range(5, 6000, 97):
        simulations: list[Simulation] = []
        hit = cancelled_at(turn, started(settings, simulations))
        if simulations:
            simulations[0].checked.check_end()
        if not hit:
            break
    assert turn > 300
