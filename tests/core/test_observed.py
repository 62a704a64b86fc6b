from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncrl.core.observed import Observed, expected_staleness

SEEN = Observed(episodes=120.0, tailness=1.42, v_r=630.0, v_t=1000.0)


def expected(seen: Observed = SEEN, **changes: Any) -> float:
    fields: dict[str, Any] = {"control": "queue_drop", "bound": 0.0, "queue": 2.0, "batch": 240, "slots": 120}
    return expected_staleness(seen, **(fields | changes))


def test_the_papers_first_run():
    """C = 120, B = 240, q = 2, ρ = 0.63, M_tail = 1.42: predicted 1.34."""
    assert expected() == pytest.approx(1.34, abs=0.005)


def test_the_cap_means_alpha_where_it_keeps_slots_empty_or_the_trainer_is_slower():
    assert expected(control="inflight_cap", bound=4.0) == pytest.approx(1.34, abs=0.005)
    assert expected(control="inflight_cap", bound=1.0) == 1.0
    assert expected(control="inflight_cap", bound=4.0, slots=160) == 4.0
    slow = msgspec.structs.replace(SEEN, v_t=500.0)
    assert expected(slow, control="inflight_cap", bound=4.0) == 4.0
    assert expected(control="queue_max", bound=1.0) == 1.0
    assert expected(control="queue_max", bound=3.0) == pytest.approx(1.34, abs=0.005)


def test_filtered_trajectories_are_neither_stale_nor_trained():
    half = msgspec.structs.replace(SEEN, kept=0.5)
    assert half.rho == pytest.approx(0.315)
    assert expected(half) == pytest.approx(0.5 * 0.71 + 0.315)
