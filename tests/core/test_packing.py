"""The planner against brute force: nothing lost, budgets kept, ranks in lockstep, load within Graham's bound."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.packing import cost, plan

lengths = st.lists(st.integers(1, 40), max_size=40)
ranks = st.integers(1, 5)
budgets = st.integers(1, 60)


@given(lengths, ranks, budgets)
def test_every_sequence_appears_exactly_once(lengths: list[int], ranks: int, budget: int) -> None:
    planned = plan(lengths, ranks, budget)
    assert sorted(i for rank in planned for micro in rank for i in micro) == list(range(len(lengths)))


@given(lengths, ranks, budgets)
def test_all_ranks_have_the_same_number_of_micro_batches_and_at_least_one(
    lengths: list[int], ranks: int, budget: int
) -> None:
    planned = plan(lengths, ranks, budget)
    assert len(planned) == ranks
    assert len({len(rank) for rank in planned}) == 1
    assert len(planned[0]) >= 1


@given(lengths, ranks, budgets)
def test_a_micro_batch_keeps_the_budget_unless_it_is_one_longer_sequence(
    lengths: list[int], ranks: int, budget: int
) -> None:
    for rank in plan(lengths, ranks, budget):
        for micro in rank:
            assert sum(lengths[i] for i in micro) <= budget or len(micro) == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3), st.sampled_from([0.0, 0.01, 1.0]))
def test_costliest_rank_is_within_grahams_bound_of_the_best_partition(
    lengths: list[int], ranks: int, attention_cost: float
) -> None:
    costs = [cost(n, attention_cost) for n in lengths]
    planned = plan(lengths, ranks, 64, attention_cost)
    got = max(sum(costs[i] for micro in rank for i in micro) for rank in planned)
    best = min(
        max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in product(range(ranks), repeat=len(lengths))
    )
    assert got <= best * (4 / 3 - 1 / (3 * ranks)) * (1 + 1e-9)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 3), st.integers(20, 40))
def test_micro_batches_are_at_most_first_fit_decreasings_bound_above_the_fewest_possible(
    lengths: list[int], ranks: int, budget: int
) -> None:
    planned = plan(lengths, ranks, budget)
    fewest = max(_fewest_bins([lengths[i] for micro in rank for i in micro], budget) for rank in planned)
    assert len(planned[0]) <= max(1, 11 / 9 * fewest + 6 / 9)


def _fewest_bins(lengths: list[int], budget: int) -> int:
    """Exhaustive: each sequence into each open bin, or into a new one."""

    def search(rest: list[int], loads: tuple[int, ...]) -> int:
        if not rest:
            return len(loads)
        length, *rest = rest
        options = [
            search(rest, (*loads[:b], load + length, *loads[b + 1 :]))
            for b, load in enumerate(loads)
            if load + length <= budget
        ]
        return min([*options, search(rest, (*loads, length))])

    return search(lengths, ())


@given(lengths, ranks, budgets)
def test_the_same_lengths_give_the_same_plan(lengths: list[int], ranks: int, budget: int) -> None:
    assert plan(lengths, ranks, budget) == plan(list(lengths), ranks, budget)


def test_micro_batches_of_a_rank_are_evened_out_and_ordered_by_falling_cost() -> None:
    # First fit would make 60 + 30 and 20 + 20 of it, and other ranks would wait for the 90.
    assert plan([60, 30, 20, 20], 1, 100, 0.0) == [[[1, 2, 3], [0]]]


def test_long_sequences_count_more_than_their_tokens() -> None:
    """One sequence of 100 costs more attention than ten of 10, so it gets a rank of its own."""
    planned = plan([100, *[10] * 10], 2, 1000, attention_cost=1.0)
    assert planned[0] == [[0]]


def test_an_empty_batch_gives_every_rank_one_empty_micro_batch() -> None:
    assert plan([], 3, 10) == [[[]], [[]], [[]]]


@pytest.mark.parametrize(("lengths", "ranks", "budget"), [([1], 0, 1), ([1], 1, 0), ([0], 1, 1)])
def test_impossible_input_is_refused(lengths: list[int], ranks: int, budget: int) -> None:
    with pytest.raises(ValueError, match="cannot pack"):
        plan(lengths, ranks, budget)
