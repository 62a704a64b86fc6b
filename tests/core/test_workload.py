from __future__ import annotations

import math
from random import Random

import msgspec
import pytest

from asyncrl.core.distributions import Constant, Distribution, Empirical, LogNormal, Named, Normal
from asyncrl.core.theory.staleness import tailness_multiplier
from asyncrl.core.workload import Shape, Workload

PROMPT = Constant(value=50.0)


def shape(lengths: Distribution, **changes: object) -> Shape:
    base = Shape(group_size=8, lengths=lengths, max_new_tokens=40_000, max_tokens=50_000, prompt=PROMPT)
    return msgspec.structs.replace(base, **changes)


@pytest.mark.parametrize(
    "lengths",
    [
        LogNormal(mean=1000.0, tailness=50.0, cap=8080.0),
        LogNormal(mean=1000.0, tailness=90.0, cap=12080.0),
        Named(name="qwen3-8b-think"),
        Empirical(values=(100.0, 200.0, 1000.0)),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_single_turns_agree_with_the_exact_distribution(lengths: Distribution, share: float):
    work = Workload(shape(lengths, task_share=share))
    assert work.generated == pytest.approx(lengths.expected, rel=0.02 if share else 0.002)
    assert work.tailness(0.0) == pytest.approx(tailness_multiplier(lengths, 8, share), rel=0.04)
    if not share:
        assert work.ranked(16, 16, 0.0) == pytest.approx(tailness_multiplier(lengths, 128), rel=0.06)


def test_constant_trajectories_have_no_tail_and_known_sums():
    turns = shape(
        Constant(value=100.0),
        turns=Constant(value=3.0),
        max_turns=5,
        observation=Constant(value=20.0),
        step=Constant(value=2.0),
        reset=Constant(value=1.0),
    )
    work = Workload(turns)
    assert (work.generated, work.turns, work.observed, work.wait) == (300.0, 3.0, 50.0 + 2 * 20.0, 1.0 + 3 * 2.0)
    starts = [50.0, 170.0, 290.0]
    assert work.read == sum(starts)
    assert work.fresh == 50.0 + 2 * 21.0  # the last token of a turn has no KV before the next
    assert work.context == pytest.approx(sum(s + 50.0 for s in starts) / 3)
    for x in (0.0, 0.3, 1.0):
        assert work.tailness(x) == work.ranked(4, 4, x) == pytest.approx(1.0)
        assert work.makespan(12, 4, x) == pytest.approx(3.0)
        assert work.ended_within(0.99, x)[0] == 0.0
        assert work.ended_within(1.01, x) == pytest.approx((1.0, 1.0))


def test_caps_cut_turns_and_conversations():
    cut = Workload(shape(Constant(value=100.0), max_new_tokens=60))
    assert (cut.generated, cut.cut) == (60.0, 1.0)
    # 50 + 100 + 20 + 100 + 20 leave 30 of 320 tokens for a third response; then the conversation is full.
    many = shape(Constant(value=100.0), turns=Constant(value=9.0), max_turns=9, observation=Constant(value=20.0))
    full = Workload(msgspec.structs.replace(many, max_tokens=320))
    assert (full.generated, full.turns, full.observed, full.cut) == (230.0, 3.0, 110.0, 0.0)


def test_the_tail_moves_from_lengths_to_waits_with_their_share():
    both = shape(LogNormal(mean=500.0, tailness=40.0), step=LogNormal(mean=10.0, tailness=90.0))
    work = Workload(both)
    assert work.tailness(0.0) == pytest.approx(tailness_multiplier(LogNormal(mean=500.0, tailness=40.0), 8), rel=0.04)
    assert work.tailness(1.0) == pytest.approx(tailness_multiplier(LogNormal(mean=10.0, tailness=90.0), 8), rel=0.08)
    # A sum of two independent parts varies less than either.
    assert work.tailness(0.4) < 0.6 * work.tailness(0.0) + 0.4 * work.tailness(1.0)


def test_ranks_and_their_draws_agree_with_brute_force():
    work, rng = Workload(shape(LogNormal(mean=1000.0, tailness=70.0), group_size=4)), Random(1)
    tops = work._node(0).tops
    for k, groups in ((12, 12), (12, 14), (5, 30)):
        drawn = [sorted(rng.choices(tops, k=groups))[k - 1] for _ in range(4000)]
        brute = math.fsum(drawn) / len(drawn)
        assert work.ranked(k, groups, 0.0) == pytest.approx(brute, rel=0.04)
        mean = math.fsum(work.draws(k, groups, 0.0)) / len(work.draws(k, groups, 0.0))
        assert mean == pytest.approx(brute, rel=0.06)


def test_redundant_members_take_the_tail_off_and_cost_slots():
    lengths = LogNormal(mean=1000.0, tailness=70.0)
    plain, spare = Workload(shape(lengths)), Workload(shape(lengths, redundancy=3))
    assert (plain.members, spare.members) == (8, 11)
    assert plain.held(0.0) == pytest.approx(1.0, abs=1e-9)
    assert plain.counted(0.0) == pytest.approx(1.0, abs=1e-9)
    rng = Random(2)
    ends, slots, counted = [], [], []
    for _ in range(4000):
        group = sorted(lengths.sample(rng) for _ in range(11))
        ends.append(group[7])
        slots.append(sum(min(length, group[7]) for length in group))
        counted.append(sum(group[:8]))
    assert spare.tailness(0.0) * 1000 == pytest.approx(sum(ends) / 4000, rel=0.05)
    assert spare.held(0.0) * 8000 == pytest.approx(sum(slots) / 4000, rel=0.05)
    assert spare.counted(0.0) * 8000 == pytest.approx(sum(counted) / 4000, rel=0.05)


def test_what_ends_early_is_shorter():
    work = Workload(shape(LogNormal(mean=1000.0, tailness=50.0)))
    middle = work.tailness(0.0)
    share, length = work.ended_within(middle, 0.0)
    assert 0.4 < share < 0.8
    assert length < 1.0
    assert work.ended_within(1e9, 0.0) == pytest.approx((1.0, 1.0))
    assert work.ended_by(1e9, 0.0) == 1.0


def test_a_workload_is_the_same_each_time():
    agent = shape(LogNormal(mean=300.0), turns=Normal(mean=4.0, std=2.0), max_turns=9, step=Normal(mean=5.0, std=5.0))
    a, b = Workload(agent), Workload(agent)
    assert [a.tailness(x) for x in (0.0, 0.4)] == [b.tailness(x) for x in (0.0, 0.4)]
    assert a.draws(8, 9, 0.3) == b.draws(8, 9, 0.3)
