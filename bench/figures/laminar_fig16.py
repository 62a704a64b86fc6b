"""A rollout machine dies (Laminar fig. 16, §8.5).

    python bench/figures/laminar_fig16.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Qwen2.5-32B on 128 GPUs at half of the size: one of eight servers (the paper: two of sixteen) dies and is back 252 s
later, the paper's time, with the weights that the model started from. What it had begun goes on where another server
has its version, or begins anew.
"""

from __future__ import annotations

from common import Point, Result, main, merge
from laminar import Watched, assumption, watched, world
from matplotlib.figure import Figure

SCALE = 2
DIES_S, OUTAGE_S, START_S = 2000.0, 252.0, 60.0
STEPS = 8
WINDOW_S = 60.0
AFTER_S = 600.0


class Moment(Point, kw_only=True):
    """``ours`` is what is generated (``trained``: what is trained) in tokens/s, from ``at`` for ``seconds``."""

    at: float
    seconds: float
    trained: bool


def measure(quick: bool) -> list[Point]:
    scale = 8 if quick else SCALE
    fault = {"kind": "kill", "at_s": DIES_S, "for_s": OUTAGE_S - START_S}
    over = {"run": {"steps": STEPS}, "sim": {"instance": {"start_s": START_S}, "faults": [fault]}}
    result, seen = watched(merge(world(scale=scale), over))
    return [*summed_up(result, seen, scale), *moments(result, seen, scale)]


def summed_up(result: Result, seen: Watched, scale: int) -> list[Point]:
    """Generation while the server is away, and after, over that before; how long a step was, and the longest since."""
    dies = seen.start + DIES_S
    back = dies + OUTAGE_S
    before, away, after = (
        scale * seen.tokens(begin, end) / (end - begin)
        for begin, end in ((dies - AFTER_S, dies), (dies, back), (back + WINDOW_S, back + WINDOW_S + AFTER_S))
    )
    earlier = [line["time/step"] for line in result.steps if line["time/at"] <= DIES_S][1:]
    since = [line["time/step"] for line in result.steps if line["time/at"] > DIES_S]
    return [
        _point("generated tokens/s before", before, scale),
        _point("while the server is away, of that before", away / before, scale),
        _point("in the ten minutes from a minute after it is back", after / before, scale),
        _point("seconds a step before", sum(earlier) / len(earlier), scale),
        _point("longest step since", max(since), scale),
    ]


def moments(result: Result, seen: Watched, scale: int) -> list[Moment]:
    ends = [line["time/at"] for line in result.steps]
    found = []
    at = 0.0
    while at < ends[-1]:
        tokens = seen.tokens(seen.start + at, seen.start + at + WINDOW_S)
        found.append(_moment(at, WINDOW_S, scale * tokens / WINDOW_S, trained=False))
        at += WINDOW_S
    for begin, line in zip([0.0, *ends], result.steps, strict=False):
        seconds = line["time/at"] - begin
        found.append(_moment(begin, seconds, scale * line["tokens/batch"] / seconds, trained=True))
    return found


def _point(name: str, ours: float, scale: int) -> Point:
    return Point(figure="laminar-16", point=name, paper=None, ours=ours, assumption=assumption(scale))


def _moment(at: float, seconds: float, ours: float, trained: bool) -> Moment:
    name = f"{'trained' if trained else 'generated'} from {at:.0f} s: tokens/s"
    return Moment(figure="laminar-16", point=name, paper=None, ours=ours, at=at, seconds=seconds, trained=trained)


def draw(figure: Figure, points: list[Point]) -> None:
    axes = figure.subplots()
    for trained, label in ((False, "generated"), (True, "trained, by steps")):
        own = [p for p in points if isinstance(p, Moment) and p.trained is trained]
        edges = [*(p.at for p in own), own[-1].at + own[-1].seconds]
        axes.stairs([p.ours / 1000 for p in own], edges, label=label, linewidth=1.5)
    axes.axvspan(DIES_S, DIES_S + OUTAGE_S, alpha=0.15, color="tab:red", label="a server is away")
    axes.set_xlabel("seconds")
    axes.set_ylabel("thousand tokens a second")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 2 * DIES_S)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.suptitle("Laminar: a rollout machine dies (figure 16)")


if __name__ == "__main__":
    main("laminar_fig16", measure, draw, size=(8.0, 4.0))
