"""The α that a workload needs: model size, length, rollout size (ROLL Flash table 1, §3.2 takeaway 3).

    python bench/figures/table1.py [--quick] [--json FILE] [--plot FILE]

24 GPUs train and 16 infer, Qwen3 Think, as in the best split of fig. 3. A row varies one thing of 8B, 32K tokens and
256 responses a batch; shorter sequences cut the same lengths off. The α needed is the smallest of ``ALPHAS`` that has
98 % of the most throughput that any of them has. Beside it: the smallest with 90 %, and what ``asyncrl plan`` finds
from formulas, for 98 %.

The trends are the paper's: hardly any with the model's size, up with the length, down with the rollout size. The values
for long responses in small batches are not. A step waits for the longest response of its batch, E[longest] + one train
step ≤ (⌈α⌉ + 1) periods (core/theory/runtime.py), and a period is proportional to the batch: with half the responses
about twice the α is needed, where the paper still finds 2. Its batches must have held more work: were its "rollouts"
prompts of 16 responses (roll_flash.py), 32 of them would need what 512 responses need here, the last row.
"""

from __future__ import annotations

from typing import Any

from common import Point, main, merge, simulate_all
from matplotlib.figure import Figure
from roll_flash import ASSUMPTION, PROMPT_TOKENS, RESPONSE_TOKENS, asynchronous, planned, steady, throughput

TRAIN, INFER = 24, 16
ALPHAS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
OF_MOST, NEARLY = 0.98, 0.90
MEASURED = {32: 90, 64: 60, 128: 40, 256: 28, 512: 20}
"""Steps, by responses a batch."""
Case = tuple[str, str, int, int]
"""Row, model, sequence length, responses a batch."""
STANDARD = ("qwen3-8b", PROMPT_TOKENS + RESPONSE_TOKENS, 256)
PAPER: dict[Case, int] = {
    ("Model size 0.6B", "qwen3-0.6b", *STANDARD[1:]): 2,
    ("Model size 1.7B", "qwen3-1.7b", *STANDARD[1:]): 2,
    ("Model size 4B", "qwen3-4b", *STANDARD[1:]): 2,
    ("Model size 8B", *STANDARD): 2,
    ("Length 4K", STANDARD[0], 4096, STANDARD[2]): 1,
    ("Length 8K", STANDARD[0], 8192, STANDARD[2]): 1,
    ("Length 16K", STANDARD[0], 16384, STANDARD[2]): 1,
    ("Length 32K", *STANDARD): 2,
    ("Rollout size 32", *STANDARD[:2], 32): 4,
    ("Rollout size 64", *STANDARD[:2], 64): 2,
    ("Rollout size 128", *STANDARD[:2], 128): 2,
    ("Rollout size 256", *STANDARD): 2,
}
BEYOND: Case = ("Rollout size 512", *STANDARD[:2], 512)


class Need(Point, kw_only=True):
    """One cell of the table: throughput of each of ``ALPHAS`` over the most, and the α found by other rules."""

    row: str
    shares: list[float]
    nearly: float
    planned: float


def table(case: Case, alpha: float) -> dict[str, Any]:
    _, model, length, rollouts = case
    response, steps = length - PROMPT_TOKENS, filling(alpha) + MEASURED[rollouts] + int(alpha)
    return merge(
        asynchronous(TRAIN, INFER, alpha=alpha, steps=steps, rollouts=rollouts, model=model),
        {"rollout": {"max_new_tokens": response, "max_tokens": length}},
    )


def filling(alpha: float) -> int:
    """Steps in which the pool fills."""
    return int(alpha) + 4


def measure(quick: bool) -> list[Point]:
    cases = [("Rollout size 32", *STANDARD[:2], 32)] if quick else [*PAPER, BEYOND]
    alphas = (1.0, 4.0, 16.0) if quick else ALPHAS
    jobs = {(case[1:], alpha): table(case, alpha) for case in cases for alpha in reversed(alphas)}
    results = simulate_all(list(jobs.values()))
    rate = {
        (case, alpha): throughput(steady(result, alpha), filling(alpha))
        for (case, alpha), result in zip(jobs, results, strict=True)
    }
    needs = [_need(case, {alpha: rate[case[1:], alpha] for alpha in alphas}) for case in cases]
    others = [
        Point(figure=need.figure, point=f"{need.row}: α for {what}", paper=PAPER.get(case), ours=value)
        for case, need in zip(cases, needs, strict=True)
        for what, value in ((f"{NEARLY:.0%}", need.nearly), (f"{OF_MOST:.0%} by asyncrl plan", need.planned))
    ]
    return [*needs, *others]


def _need(case: Case, rates: dict[float, float]) -> Need:
    most = max(rates.values())
    return Need(
        figure="roll-flash-table-1",
        point=f"{case[0]}: α needed",
        paper=PAPER.get(case),
        ours=smallest(rates, OF_MOST),
        assumption=f"{ASSUMPTION}; prompts of 16 responses",
        row=case[0],
        shares=[rate / most for rate in rates.values()],
        nearly=smallest(rates, NEARLY),
        planned=smallest({alpha: 1.0 / planned(table(case, alpha)) for alpha in rates}, OF_MOST),
    )


def smallest(rates: dict[float, float], of_most: float) -> float:
    """The smallest α with this share of the most throughput."""
    return min(alpha for alpha, rate in rates.items() if rate >= of_most * max(rates.values()))


def draw(figure: Figure, points: list[Point]) -> None:
    needs = [p for p in points if isinstance(p, Need)]
    rows = ("Model size", "Length", "Rollout size")
    for axes, row in zip(figure.subplots(1, 3, sharey=True), rows, strict=True):
        here = [n for n in needs if n.row.startswith(row)]
        for i, need in enumerate(here):
            colour = f"C{i}"
            axes.plot(ALPHAS, need.shares, "o-", ms=4, color=colour, label=need.row.removeprefix(row).strip())
            if need.paper is not None:
                at = need.shares[ALPHAS.index(need.paper)]
                axes.plot(need.paper, at, "D", ms=10, mfc="none", mec=colour)
        axes.axhline(OF_MOST, color="gray", ls=":", lw=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ALPHAS, [f"{a:g}" for a in ALPHAS])
        axes.minorticks_off()
        axes.set_xlabel("α")
        axes.set_title(f"{row} (diamond: the paper's α)", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
        if row == rows[0]:
            axes.set_ylabel("throughput over the most of all α")


if __name__ == "__main__":
    main("table1", measure, draw, size=(11.0, 4.0))
