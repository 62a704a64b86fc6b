from __future__ import annotations

import pytest

from asyncrl.train.job import explain

REPORT = """
trainer rank 0: lost contact with another rank
E1120 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 10) of binary: python
asyncrl.train.worker FAILED
Failures:
[1]:
  rank      : {} (local_rank: 0)
  exitcode  : {} (pid: 10)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  rank      : {} (local_rank: 1)
  exitcode  : {} (pid: 11)
"""


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("OMP\nx\ntrainer rank 1: error: disk is full\nE" + REPORT.format(0, 1, 1, 1), "trainer rank 1: disk is full"),
        (REPORT.format(0, 1, 1, -9), "rank 1 was killed by SIGKILL"),
        (REPORT.format(1, -9, 0, 1), "rank 1 was killed by SIGKILL"),
        (REPORT.format(0, -15, 1, 3), "rank 1 ended with exit code 3"),
        ("python: No module named torch\n\n", "No module named torch"),
        ("", "no word in its log"),
    ],
)
def test_a_log_is_explained_in_one_line_by_the_first_cause(log: str, says: str) -> None:
    line = explain(log)
    assert says in line
    assert "\n" not in line
