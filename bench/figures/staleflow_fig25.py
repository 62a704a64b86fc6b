"""Redundant rollout at the level of batches and of groups (StaleFlow fig. 25, appendix C).

    python bench/figures/staleflow_fig25.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Responses of up to 40k tokens, η = 3; one sixteenth more trajectories than are trained: 136 groups for a batch of 128,
or 17 members for a group of 16; what is left over is aborted. The paper draws changes without numbers: responses get
shorter, on average and at most, more so with redundant batches; steps get shorter; throughput "improves modestly".
"""

from __future__ import annotations

from common import Point, main
from matplotlib.figure import Figure
from staleflow import ASSUMPTION, GROUP_SIZE, GROUPS, LONG_RESPONSE_TOKENS, SCALE, Run, simulate_all, summed_up, system

ETA = 3
LEVELS = {
    "none": {},
    "batch": {"max_additional_running_prompts": GROUPS // SCALE // 16},
    "group": {"group_size_redundancy": GROUP_SIZE // 16},
}
MEASURES = ("mean response", "longest response", "seconds a step", "throughput")


class Redundant(Run, kw_only=True):
    """Tokens of a response, and of the longest of a step, on average."""

    response: float
    longest: float

    @property
    def values(self) -> tuple[float, float, float, float]:
        return self.response, self.longest, self.period, self.ours


def measure(quick: bool) -> list[Point]:
    levels = ("none", "batch") if quick else tuple(LEVELS)
    slots = (ETA + 1) * GROUPS // SCALE * GROUP_SIZE
    tables = []
    for level in levels:
        rollout = {**LEVELS[level], "num_envs": slots if level == "none" else slots * 17 // 16}
        tables.append(system("StaleFlow", eta=ETA, response=LONG_RESPONSE_TOKENS, over={"rollout": rollout}))
    measured = []
    for level, result in zip(levels, simulate_all(tables), strict=True):
        run = summed_up(result, figure="staleflow-25", point=f"{level}: tokens/s", system=level, eta=ETA)
        steps = result.steps[:-ETA]
        fields = {name: getattr(run, name) for name in run.__struct_fields__}
        longest = sum(line["response/max"] for line in steps) / len(steps)
        response = sum(line["response/mean"] for line in steps) / len(steps)
        measured.append(Redundant(**fields, response=response, longest=longest))
    changes = [
        Point(
            figure="staleflow-25",
            point=f"redundant {run.system}: {what}, of that without",
            paper=None,
            ours=value / before,
            assumption=f"the paper prints no numbers; {ASSUMPTION}",
        )
        for run in measured[1:]
        for what, value, before in zip(MEASURES, run.values, measured[0].values, strict=True)
    ]
    return [*changes, *measured]


def draw(figure: Figure, points: list[Point]) -> None:
    without, *redundant = [p for p in points if isinstance(p, Redundant)]
    axes = figure.subplots()
    for i, (run, colour) in enumerate(zip(redundant, ("tab:blue", "tab:orange"), strict=True)):
        changes = [100 * (a / b - 1) for a, b in zip(run.values, without.values, strict=True)]
        x = [k + (i - 0.5) * 0.36 for k in range(len(MEASURES))]
        bars = axes.bar(
            x, changes, 0.34, color=colour, label=f"redundant {'groups' if run.system == 'batch' else 'members'}"
        )
        axes.bar_label(bars, [f"{change:+.1f} %" for change in changes], fontsize=9)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(MEASURES)), MEASURES)
    axes.set_ylabel("change by 1/16 more trajectories, %")
    axes.margins(y=0.15)
    axes.legend(fontsize=9)
    axes.grid(alpha=0.3, axis="y")


if __name__ == "__main__":
    main("staleflow_fig25", measure, draw, size=(8.0, 4.5))
