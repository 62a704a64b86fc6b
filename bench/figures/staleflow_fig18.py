"""How stale the trajectories of each staleness buffer are (StaleFlow fig. 18, §6.5).

    python bench/figures/staleflow_fig18.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Responses of up to 40k tokens, η = 3. The paper: none is staler than 3, and "most buffers contain only trajectories with
staleness 3" as training proceeds. Its staleness and ours is V_buf − V_traj, of every trajectory that is trained.
"""

from __future__ import annotations

from common import Point, main, simulate_all
from matplotlib.figure import Figure
from staleflow import ASSUMPTION, GROUP_SIZE, GROUPS, LONG_RESPONSE_TOKENS, SCALE, WARM_UP, system

ETA = 3


class Buffer(Point, kw_only=True):
    """Shares of a buffer's trajectories by staleness, from 0; ``ours`` is their mean staleness."""

    step: int
    shares: list[float]


def measure(quick: bool) -> list[Point]:
    [result] = simulate_all([system("StaleFlow", eta=ETA, response=LONG_RESPONSE_TOKENS)])
    batch = GROUPS // SCALE * GROUP_SIZE
    most = int(max(line["staleness/max"] for line in result.steps))
    buffers = [
        Buffer(
            figure="staleflow-18",
            point=f"buffer {step}: mean staleness",
            paper=None,
            ours=line["staleness/mean"],
            step=step,
            shares=[line.get(f"staleness/count/{k}", 0) / batch for k in range(most + 1)],
        )
        for step, line in enumerate(result.steps)
    ]
    later = buffers[WARM_UP:]
    shares = [sum(b.shares[k] for b in later) / len(later) for k in range(most + 1)]
    points = [
        Point(figure="staleflow-18", point="largest staleness", paper=float(ETA), ours=most, assumption=ASSUMPTION),
        *(
            Point(
                figure="staleflow-18", point=f"share of staleness {k}, from step {WARM_UP} on", paper=None, ours=share
            )
            for k, share in enumerate(shares)
        ),
        Point(
            figure="staleflow-18",
            point=f"share of buffers mostly of staleness {ETA}, from step {WARM_UP} on",
            paper=None,
            ours=sum(b.shares[-1] > 0.5 for b in later) / len(later),
            assumption="the paper says “most buffers contain only trajectories with staleness 3”",
        ),
    ]
    return [*points, *buffers]


def draw(figure: Figure, points: list[Point]) -> None:
    buffers = [p for p in points if isinstance(p, Buffer)]
    axes = figure.subplots()
    bottom = [0.0] * len(buffers)
    for k, colour in zip(
        range(len(buffers[0].shares)), ("tab:green", "tab:olive", "tab:orange", "tab:red"), strict=True
    ):
        shares = [100 * b.shares[k] for b in buffers]
        axes.bar([b.step for b in buffers], shares, 0.8, bottom=bottom, color=colour, label=f"staleness {k}")
        bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
    axes.set_xticks([b.step for b in buffers])
    axes.set_xlabel("V_buf")
    axes.set_ylabel("% of the buffer's trajectories")
    axes.legend(fontsize=9, ncols=4, loc="upper center")
    axes.set_ylim(0, 115)


if __name__ == "__main__":
    main("staleflow_fig18", measure, draw, size=(9.0, 4.0))
