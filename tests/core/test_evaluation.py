"""What samples say of a policy, against counting all choices."""

from __future__ import annotations

from itertools import combinations

import pytest

from asyncrl.core.evaluation import Score, accuracy, details, pass_at_k
from asyncrl.core.types import Task


def score(*samples: float, source: str = "") -> Score:
    return Score(task=Task(id="t", data={}, source=source), samples=list(samples))


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n: int) -> None:
    for right in range(n + 1):
        samples = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            chosen = [any(choice) for choice in combinations(samples, k)]
            assert pass_at_k(n, right, k) == pytest.approx(sum(chosen) / len(chosen))


def test_powers_of_two_up_to_the_number_of_samples() -> None:
    found = details([score(1, 0, 0, 0, 0), score(1, 1, 0.5, 0, 1)])
    assert found == pytest.approx({"pass@1": 0.4, "pass@2": (0.4 + 0.9) / 2, "pass@4": (0.8 + 1.0) / 2})
    assert accuracy([score(1, 0), score(0.5, 0.5)]) == 0.5


def test_one_sample_has_no_pass_at_k_and_one_source_no_accuracy_of_its_own() -> None:
    assert details([score(1), score(0)]) == {}
    assert details([score(1, source="a"), score(0, source="b"), score(1, source="b")]) == {
        "accuracy/a": 1.0,
        "accuracy/b": 0.5,
    }
