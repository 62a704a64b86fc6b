"""The run in one small file: ``summary.json``. Decides nothing; ``Recorder.summary`` fills it in."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from asyncrl.core.types import Record
from asyncrl.observe.run_dir import SUMMARY, write_atomic

EDGE_STEPS = 5
PACKAGES = (
    "asyncrl",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "aiohttp",
    "msgspec",
    "uvloop",
    "sglang",
)


class StalenessSummary(Record, frozen=True, kw_only=True):
    """Over all trajectories that were trained; ``bound`` is the most that any of them may have, if
    there is one."""

    mean: float | None
    max: int | None
    bound: int | None


class Summary(Record, frozen=True, kw_only=True):
    """``reward_first`` and ``reward_last`` are means over the first and the last ``EDGE_STEPS`` (5) train steps, fewer
    if the run is shorter than twice that, so that the two never share a step (unless there is only one).
    ``heldout_before`` is the first evaluation's accuracy, ``heldout_after`` that of the last one of a later version.
    ``bubble_share`` and ``trainer_idle_share`` are as in ``observe/busy.py``, from the end of the first train step to
    the end of the last. ``seconds`` is the whole run, ``tokens`` all that the servers generated. ``exit`` is
    ``finished``, ``interrupted`` or ``failed: REASON``. ``ledger`` counts trajectories by state,
    ``reasons`` says why they ended so. What could not be measured is None.
    """

    recipe: str
    exit: str
    started: str
    seconds: float
    steps: int
    reward_first: float | None
    reward_last: float | None
    heldout_before: float | None
    heldout_after: float | None
    staleness: StalenessSummary
    bubble_share: float | None
    trainer_idle_share: float | None
    tokens: int
    ledger: Mapping[str, int]
    reasons: Mapping[str, Mapping[str, int]] = {}
    seed: int
    command: Sequence[str]
    packages: Mapping[str, str]


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages among ``PACKAGES``. Imports none of them."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def reward_edges(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Means over the first and the last few steps (see ``Summary``)."""
    if not rewards:
        return None, None
    n = max(1, min(EDGE_STEPS, len(rewards) // 2))
    return sum(rewards[:n]) / n, sum(rewards[-n:]) / n


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Write ``summary.json`` atomically. Raises ``RunDirError``."""
    write_atomic(run_dir / SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def read_summary(run_dir: Path) -> Summary | None:
    """The summary; None if the run has not written it (yet, or was killed)."""
    path = run_dir / SUMMARY
    return msgspec.json.decode(path.read_bytes(), type=Summary) if path.exists() else None


def bound_note(bound: int | None) -> str:
    """What stands behind a staleness."""
    return "" if bound is None else f" (bound {bound})"


def duration(seconds: float) -> str:
    """``h:mm:ss``."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}"
