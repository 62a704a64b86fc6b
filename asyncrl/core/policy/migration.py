"""Which requests leave their server for another: plain functions of the plan's loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.load import Load
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.types import Record


class Limits(Record, frozen=True, kw_only=True):
    """When to migrate; the defaults are the paper's (StaleFlow §6.1)."""

    phi_wait: int = 3
    """Requests that may wait inside a server."""
    phi_throughput: float = 5.0
    """Times the throughput of the slowest server that the fastest may have."""


class Migration(Record, frozen=True, kw_only=True):
    """``excess`` wait inside a server, more than may: they are cut and wait outside. All that ``fastest`` has is to be
    distributed anew."""

    excess: list[tuple[Load, list[RequestView]]]
    fastest: Load | None


Migrate = Callable[[Sequence[Load], CostModel, Limits], Migration]


def stay(loads: Sequence[Load], cost: CostModel, limits: Limits) -> Migration:
    """Nothing migrates (the vanilla strategy of figure 16)."""
    return Migration(excess=[], fastest=None)


def by_throughput(loads: Sequence[Load], cost: CostModel, limits: Limits) -> Migration:
    """StaleFlow algorithm 5. Of the requests that wait inside a server those that came last are cut. The servers of an
    evaluation keep what they have; those that pull in this plan get their work by routing."""
    movable = [load for load in loads if load.up and not load.pinned and not load.cold]
    excess = []
    fastest = slowest = None
    highest, lowest = -1.0, float("inf")
    for load in movable:
        if load.waiting > limits.phi_wait:
            excess.append((load, list(islice(reversed(load.requests.values()), load.waiting - limits.phi_wait))))
        throughput = cost.throughput(load.running - load.waiting, load.kv_tokens)
        if throughput > highest:
            fastest, highest = load, throughput
        if throughput < lowest:
            slowest, lowest = load, throughput
    uneven = fastest is not slowest and highest > limits.phi_throughput * lowest
    return Migration(excess=excess, fastest=fastest if uneven else None)


MIGRATION: dict[str, Migrate] = {"none": stay, "throughput": by_throughput}
