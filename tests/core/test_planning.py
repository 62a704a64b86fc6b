from __future__ import annotations

import itertools
from random import Random
from typing import Any, get_args

import msgspec
import pytest

from asyncrl.core.choices import best_bound, best_split, splits, with_split
from asyncrl.core.cost_model import CostModel
from asyncrl.core.distributions import Constant, LogNormal
from asyncrl.core.observed import Control
from asyncrl.core.planning import System, _Wave, predict
from asyncrl.core.theory.staleness import mean_staleness, tailness_multiplier
from asyncrl.core.transfer import seconds_to_deliver, seconds_to_prepare
from asyncrl.core.types import Record
from asyncrl.core.workload import Shape, Workload

LENGTHS = LogNormal(mean=1000.0, tailness=50.0, cap=8000.0)
SHAPE = Shape(
    group_size=8, lengths=LENGTHS, max_new_tokens=8000, max_tokens=9000, prompt=Constant(value=50.0)
)  # fmt: skip
WORK = Workload(SHAPE)
SYSTEM = System(
    batch_groups=16,
    episodes=256,
    servers=4,
    max_running=256,
    kv_tokens=500_000,
    trainer_gpus=4,
    tokens_per_s=5000.0,
    fixed_s=2.0,
    prepare_s=0.5,
    deliver_s=1.0,
)


def changed(**fields: Any) -> System:
    return replaced(SYSTEM, **fields)


def replaced(system: System, **fields: Any) -> System:
    return msgspec.structs.replace(system, **fields)


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_synchronous_steps_of_equal_lengths_are_the_sum_of_their_parts():
    """One server, ten trajectories of 100 tokens at a constant 10 ms a step, no prefill."""
    work = Workload(msgspec.structs.replace(SHAPE, group_size=2, lengths=Constant(value=100.0)))
    cost = CostModel(k1=0.0, k2=0.0, k3=0.0, k4=0.01, k5=0.0)
    system = changed(
        batch_groups=5, episodes=10, servers=1, cost=cost, bound=0.0, trainer_gpus=2, tokens_per_s=500.0, scaling=0.5
    )
    p = predict(system, work)
    train_s = 2.0 + 10 * 150 / (500.0 * 2**0.5)
    assert p.train_s == pytest.approx(train_s)
    assert p.cycle_s == pytest.approx(train_s + 1.5)
    assert p.period == pytest.approx(1.0 + train_s + 1.5, rel=1e-6)
    assert p.binds == "tail"
    assert p.staleness == 0.0
    assert p.tokens_per_s == pytest.approx(1000 / p.period)
    assert p.server_idle == pytest.approx(1 - 1.0 / p.period, abs=0.02)
    assert p.trainer_idle == pytest.approx(1.0 / p.period)
    # Half the slots: two rounds.
    assert predict(msgspec.structs.replace(system, episodes=5), work).period == pytest.approx(p.period + 1.0, rel=1e-6)


def test_asynchronous_training_of_equal_lengths_is_as_fast_as_its_slower_side():
    work = Workload(msgspec.structs.replace(SHAPE, group_size=2, lengths=Constant(value=100.0)))
    cost = CostModel(k1=0.0, k2=0.0, k3=0.0, k4=0.1, k5=0.0)
    base = changed(batch_groups=5, episodes=10, servers=1, cost=cost, bound=4.0, prepare_s=0.0, deliver_s=0.0)
    slow_rollout = predict(base, work)
    assert slow_rollout.period == pytest.approx(10.0)
    assert slow_rollout.binds == "rollout"
    slow_trainer = predict(msgspec.structs.replace(base, fixed_s=30.0), work)
    assert slow_trainer.period == slow_trainer.cycle_s == slow_trainer.shortest
    assert (slow_trainer.binds, slow_trainer.staleness) == ("trainer", 4.0)


def test_what_training_binds_has_the_delivery_beside_it_where_older_groups_may_be_trained():
    base = changed(bound=4.0, fixed_s=300.0, prepare_s=1.0, arrive_s=2.0, deliver_s=3.0)
    apart, beside = predict(base, WORK), predict(replaced(base, overlap=True), WORK)
    assert apart.period == apart.train_s + 6.0
    assert beside.period == beside.train_s + 1.0 == beside.shortest
    assert beside.staleness == apart.staleness == pytest.approx(4.0)
    slow = replaced(base, overlap=True, arrive_s=500.0)
    assert predict(slow, WORK).period == 1.0 + 503.0  # each delivery waits for the one before
    for other in (replaced(base, bound=0.0), replaced(base, control="queue_drop")):
        assert predict(replaced(other, overlap=True), WORK) == predict(other, WORK)


def test_what_streaming_saves_is_what_could_be_trained_while_others_ran():
    wave = _Wave(span=10.0, ended=[(0.0, 0.0), (4.0, 0.25), (8.0, 0.5)])
    assert wave.trained(8.0, 1.0) == 6.0  # 4 seconds' worth comes within the last 2
    assert wave.trained(8.0, 0.5) == 4.0
    assert wave.trained(20.0, 1.0) == 10.0  # it never waits
    sync = changed(bound=0.0, fixed_s=10.0)
    whole, half, all_ = (predict(replaced(sync, streamed=share), WORK) for share in (0.0, 0.5, 1.0))
    saved = whole.period - half.period
    assert saved == pytest.approx(0.5 * (whole.train_s - 10.0), rel=0.01)
    assert saved < whole.period - all_.period < 0.95 * (whole.train_s - 10.0)
    part = predict(replaced(sync, streamed=1.0, part_tokens=20_000), WORK)
    assert part.period == pytest.approx(all_.period + 1.0)
    # Groups that end at the same moment leave nothing to begin with.
    equal = Workload(msgspec.structs.replace(SHAPE, lengths=Constant(value=1000.0)))
    assert predict(replaced(sync, streamed=1.0), equal).period == predict(sync, equal).period


def test_half_the_time_in_the_environment_halves_what_is_on_servers():
    work = Workload(msgspec.structs.replace(SHAPE, lengths=Constant(value=100.0), step=Constant(value=1.0)))
    cost = CostModel(k1=0.0, k2=0.0, k3=0.0, k4=0.01, k5=0.0)
    p = predict(changed(cost=cost, episodes=80, bound=20.0), work)
    assert p.per_server == pytest.approx(10.0)
    assert p.v_r == pytest.approx(80 / 2.0 * 100)
    assert p.limit == "slots"


@pytest.mark.parametrize(
    ("fields", "limit", "n"),
    [
        ({"max_running": 10}, "max_running_requests", 10.0),
        ({"kv_tokens": 9000}, "kv cache", 9000 / WORK.context),
        ({}, "slots", 64.0),
    ],
)
def test_a_server_runs_what_slots_requests_and_kv_allow(fields: dict[str, Any], limit: str, n: float):
    p = predict(changed(**fields), WORK)
    assert (p.limit, p.per_server) == (limit, pytest.approx(n))
    assert p.kv_used <= 1.0 + 1e-9


# --- laws -------------------------------------------------------------------------------------------------------------


def random_system(rng: Random) -> System:
    return changed(
        batch_groups=rng.choice([2, 8, 32]),
        episodes=rng.choice([8, 64, 512]),
        servers=rng.choice([1, 4, 16]),
        max_running=rng.choice([8, 256]),
        kv_tokens=rng.choice([20_000, 500_000]),
        trainer_gpus=rng.choice([1, 4, 16]),
        tokens_per_s=rng.choice([300.0, 5000.0]),
        control=rng.choice(get_args(Control)),
        bound=rng.choice([0.0, 0.5, 1.0, 3.0, 8.0]),
        queue=rng.choice([1.0, 2.0]),
        drain=rng.random() < 0.3,
        redundant=rng.choice([0, 2]),
        kept=rng.choice([1.0, 0.6]),
    )


WORKLOADS = [
    WORK,
    Workload(
        msgspec.structs.replace(
            SHAPE, lengths=LogNormal(mean=200.0), turns=Constant(value=4.0), max_turns=4, step=LogNormal(mean=3.0)
        )
    ),
]


@pytest.mark.parametrize("seed", range(150))
def test_no_prediction_breaks_a_law(seed: int):
    rng = Random(seed)
    system, work = random_system(rng), WORKLOADS[seed % 2]
    p = predict(system, work)
    assert p.period >= p.cycle_s * (1 - 1e-9)
    assert p.bubble >= -1e-9, "faster than the no-bubble bound"
    if system.control != "queue_drop":
        assert 0.0 <= p.staleness <= system.bound
    assert 0.0 <= p.trainer_idle <= 1.0
    assert 0.0 <= p.server_idle <= 1.0
    assert 0.0 <= p.wasted < 1.0
    assert p.tailness >= 1.0
    assert p.batch_tailness >= p.tailness * (0.99 if not system.redundant else 0.0)
    assert p.running <= system.servers * p.per_server * (1 + 1e-9) <= system.episodes * (1 + 1e-6)


def test_an_update_prefills_again_what_has_begun_and_not_what_waits_for_a_server():
    served, queued = (predict(changed(episodes=n, max_running=64, bound=60.0), WORK) for n in (4 * 64, 40 * 64))
    assert served.per_server == queued.per_server == 64
    assert queued.rollout_s == pytest.approx(served.rollout_s)


def test_a_larger_alpha_is_not_slower_and_an_endless_one_is_natural():
    periods = [predict(changed(bound=float(alpha)), WORK).period for alpha in (0, 1, 2, 4, 8, 16)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(periods))
    free = predict(changed(bound=60.0), WORK)
    assert free.period == pytest.approx(free.rollout_s)
    assert free.staleness == pytest.approx(free.natural, rel=0.01)
    formula = mean_staleness(
        concurrency=256, batch=128, tailness=tailness_multiplier(LENGTHS, 8), rho=free.rho, q=1.0
    ).total
    assert free.natural == pytest.approx(formula, rel=0.03)


def test_queue_drop_is_the_papers_formula():
    for speed in (5000.0, 900.0):
        p = predict(changed(control="queue_drop", queue=2.0, tokens_per_s=speed), WORK)
        formula = mean_staleness(concurrency=256, batch=128, tailness=p.tailness, rho=p.rho, q=2.0)
        assert (p.pre_queue, p.in_queue) == (formula.pre_queue, formula.in_queue)
        assert p.staleness == formula.total
    assert p.wasted == pytest.approx(1 - 1 / p.rho)  # the slow trainer's


def test_queue_max_trains_shorter_responses_and_drops_the_more_the_stricter_it_is():
    strict, mild = (predict(changed(control="queue_max", bound=b), WORK) for b in (2.0, 6.0))
    assert strict.trained_length < mild.trained_length < 1.0
    assert strict.wasted > mild.wasted > 0.0
    assert strict.period > mild.period
    free = predict(changed(control="queue_max", bound=40.0), WORK)
    assert free.staleness == pytest.approx(free.natural, rel=0.05)
    assert free.period == pytest.approx(free.rollout_s, rel=0.01)


def test_redundant_groups_take_the_tail_off_a_synchronous_step():
    plain, spare = (predict(changed(bound=0.0, redundant=r), WORK) for r in (0, 3))
    assert spare.period < 0.8 * plain.period


def test_a_filter_makes_rollout_slower_by_what_it_drops():
    free = CostModel(k5=0.0)  # so that an update costs nothing
    plain, half = (predict(changed(bound=40.0, kept=kept, deliver_s=0.0, cost=free), WORK) for kept in (1.0, 0.5))
    assert half.rollout_s == pytest.approx(2 * plain.rollout_s, rel=0.02)
    assert half.tokens_per_s == pytest.approx(0.5 * plain.tokens_per_s, rel=0.02)


def test_both_sides_need_a_gpu():
    with pytest.raises(ValueError, match="0 servers and 8 training GPUs"):
        predict(with_split(SYSTEM, 0), WORK)


# --- searches ---------------------------------------------------------------------------------------------------------


class Speeds(Record, frozen=True, kw_only=True):
    gigabytes: float = 16.0
    gather_gb_s: float = 20.0
    disk_gb_s: float = 2.0
    link_gb_s: float = 20.0
    hop_s: float = 0.001
    local_gb_s: float = 40.0


def test_a_split_keeps_the_gpus_and_moves_the_weights_to_as_many_servers():
    system = changed(speeds=Speeds(), transport="disk", load_s=1.0, server_gpus=2)
    other = with_split(system, 2)
    assert (system.gpus, other.gpus, other.trainer_gpus) == (12, 12, 8)
    assert other.prepare_s == seconds_to_prepare(Speeds(), "disk")
    assert other.deliver_s == seconds_to_deliver(Speeds(), "disk", 2) + 1.0
    assert [(s.servers, s.trainer_gpus) for s in splits(system)] == [(1, 10), (2, 8), (3, 6), (4, 4), (5, 2)]


@pytest.mark.parametrize("gpus", [8, 50, 400])
@pytest.mark.parametrize("control", ["queue_drop", "inflight_cap"])
def test_the_best_split_is_as_fast_as_the_best_of_all(gpus: int, control: Control):
    system = changed(trainer_gpus=gpus - 4, control=control, bound=6.0, batch_groups=64, episodes=2048)
    found = predict(best_split(system, WORK), WORK)
    every = [predict(with_split(system, n), WORK) for n in range(1, gpus)]
    assert found.trajectories_per_s >= 0.99 * max(p.trajectories_per_s for p in every)


@pytest.mark.parametrize("gpus", [40, 256])
def test_the_smallest_fleets_are_tried_too(gpus: int):
    system = changed(trainer_gpus=gpus - 4, tokens_per_s=10.0)
    every = [predict(with_split(system, n), WORK) for n in range(1, gpus)]
    found = predict(best_split(system, WORK), WORK)
    assert found.trajectories_per_s >= 0.999 * max(p.trajectories_per_s for p in every)


def test_prompts_that_leave_no_room_are_of_no_trajectory():
    shape = msgspec.structs.replace(SHAPE, max_tokens=1000, prompt=LogNormal(mean=400.0, tailness=80.0))
    work = Workload(shape)
    assert 0 < work.prompt < 400 and work.generated > 100 and work.prompt + work.generated <= 1000


def test_the_best_bound_is_the_smallest_that_is_fast_enough():
    alpha = best_bound(SYSTEM, WORK)
    rates = [predict(changed(bound=float(b)), WORK).trajectories_per_s for b in (alpha - 1, alpha, 64)]
    assert rates[0] < 0.98 * rates[2] <= rates[1]
