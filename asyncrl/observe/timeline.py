"""Who was busy when, from a trace file: lanes of busy segments, and their reduction to a fixed number of bins.

Pure functions over a file; no plotting. A lane of a million short segments and a lane of one long one cost the same to
draw, and a bin says truthfully how much of it was busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncrl.core.types import Record
from asyncrl.observe.busy import Segment
from asyncrl.observe.trace import BUSY, read_trace

TRAINER = "trainer"


class Lane(Record, frozen=True, kw_only=True):
    """Busy segments of a server or the trainer, and the ends of its weight updates. Seconds since the run began."""

    name: str
    segments: Sequence[Segment]
    updates: Sequence[float]


def read_timeline(path: Path) -> list[Lane]:
    """The trainer's lane (its ``train`` spans), then one for each server, by name."""
    segments: dict[str, list[Segment]] = {}
    updates: dict[str, list[float]] = {}
    for event in read_trace(path):
        if event.ph != "X":
            continue
        start, end = event.ts / 1e6, (event.ts + event.dur) / 1e6
        version = event.args.get("version", 0)
        if event.cat == BUSY:
            lane = segments.setdefault(event.args["server"], [])
            lane.append(Segment(start=start, end=end, version=version))
        elif event.cat == TRAINER and event.name == "train":
            segments.setdefault(TRAINER, []).append(Segment(start=start, end=end, version=version))
        elif event.name == "update":
            updates.setdefault(event.cat, []).append(end)
    names = [TRAINER] * (TRAINER in segments) + sorted(segments.keys() - {TRAINER}, key=_natural)
    return [Lane(name=name, segments=segments[name], updates=updates.get(name, ())) for name in names]


def bin_segments(
    segments: Sequence[Segment], start: float, end: float, bins: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """(busy share, version) of ``bins`` equal pieces of ``start`` … ``end``; shape (bins,) each.

    The version is that of the piece's longest segment, 0 where there is none. Segments of a lane do not overlap.
    """
    share, version, longest = np.zeros(bins), np.zeros(bins, dtype=np.int64), np.zeros(bins)
    width = (end - start) / bins
    for segment in segments:
        low, high = (segment.start - start) / width, (segment.end - start) / width
        first, last = max(0, int(low)), min(bins - 1, int(high))
        if high <= 0 or low >= bins:
            continue
        cell = np.arange(first, last + 1)
        covered = np.minimum(cell + 1, high) - np.maximum(cell, low)
        cells = slice(first, last + 1)
        share[cells] += covered
        wins = covered > longest[cells]
        version[cells][wins] = segment.version
        longest[cells][wins] = covered[wins]
    return np.clip(share, 0.0, 1.0), version


def _natural(name: str) -> tuple[str | int, ...]:
    """Sort key with numbers by value: "server 2" before "server 10"."""
    return tuple(int(part) if part.isdigit() else part for part in name.split(" "))
