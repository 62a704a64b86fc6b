"""Which requests leave their server for another: plain functions of the plan's loads."""

from __future__ import annotations

import math
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
    phi_throughput: float = 1.1
    """Times as fast as on the slowest server that a sequence may decode on the fastest."""
    kv_threshold: float = 0.99
    """C_max of a repack (Laminar §5.2), or when a repartition relieves a server: share of its KV cache."""
    roofline_batch: int = 64
    """B of a repack: sequences on a server."""


class Migration(Record, frozen=True, kw_only=True):
    """``excess`` wait inside a server, more than may: they are cut and wait outside. Of ``pair``, some that the first
    runs may be better on the second."""

    excess: list[tuple[Load, list[RequestView]]]
    pair: tuple[Load, Load] | None


Migrate = Callable[[Sequence[Load], CostModel, Limits], Migration]


def stay(loads: Sequence[Load], cost: CostModel, limits: Limits) -> Migration:
    """Nothing migrates (the vanilla strategy of figure 16)."""
    return Migration(excess=[], pair=None)


def by_throughput(loads: Sequence[Load], cost: CostModel, limits: Limits) -> Migration:
    """StaleFlow algorithm 5. Of the requests that wait inside a server those that came last are cut. The servers of an
    evaluation keep what they have; those that pull in this plan get their work by routing.

    The paper compares servers by tokens a second and empties the fastest. But the fastest by that measure is the one
    with the most short responses, and what holds up a batch is a few long ones together on one server while others run
    dry. So they are compared by how fast a sequence decodes, and the slowest gives to the fastest of those that are not
    older: only these may serve all that it has.
    """
    movable = [load for load in loads if load.up and not load.pinned and not load.cold]
    excess = []
    slowest: dict[int, tuple[float, Load]] = {}
    fastest: dict[int, tuple[float, Load]] = {}
    for load in movable:
        if load.waiting > limits.phi_wait:
            excess.append((load, list(islice(reversed(load.requests.values()), load.waiting - limits.phi_wait))))
        if load.waiting:
            continue
        step = load.slowness * cost.step(max(1, load.running), load.kv_tokens)
        version = load.version
        if version not in slowest or step > slowest[version][0]:
            slowest[version] = (step, load)
        if version not in fastest or step < fastest[version][0]:
            fastest[version] = (step, load)
    pair, widest = None, limits.phi_throughput
    quick = None
    for version in sorted(slowest, reverse=True):
        if quick is None or fastest[version][0] < quick[0]:
            quick = fastest[version]
        step, load = slowest[version]
        if step > widest * quick[0]:
            # By a fitted model a step of an idle server may take no time.
            pair, widest = (load, quick[1]), step / quick[0] if quick[0] else math.inf
    return Migration(excess=excess, pair=pair)


MIGRATION: dict[str, Migrate] = {"none": stay, "throughput": by_throughput}
