"""How long a decode step may take."""

from __future__ import annotations

import math

from asyncrl.core.pace import Pace


def test_the_longest_response_may_use_all_the_time_from_its_version_to_its_batch() -> None:
    pace = Pace()
    assert pace.seconds == math.inf
    pace.available(0, 0.0)
    pace.available(1, 100.0)
    pace.available(1, 150.0)
    pace.taken(0, 1_000, 300.0)
    assert pace.seconds == math.inf, "all starts with the first version"
    pace.taken(1, 1_000, 400.0)
    assert pace.seconds == 0.3


def test_it_follows_the_last_batches() -> None:
    pace = Pace(memory=2)
    pace.available(0, 0.0)
    for version, longest in enumerate([10, 100, 300], start=1):
        pace.available(version, 100.0 * version)
        pace.taken(version, longest, 100.0 * version + 80.0)
    assert pace.seconds == 160.0 / 400
    pace.available(9, 900.0)
    pace.taken(9, 0, 950.0)  # a batch without a token
    pace.taken(8, 100, 950.0)  # a version that it has not seen
    assert pace.seconds == 160.0 / 400
