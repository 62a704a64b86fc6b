"""Chain broadcast of weights in chunks (papers: Laminar §4.2, appendix C).

A chain of p nodes (the master relay and p − 1 others) passes on M bytes in k chunks. Sending one chunk to the next node
takes M/k·T_byte + T_start seconds; a node sends a chunk on while it receives the next.
"""

from __future__ import annotations

import math

from asyncrl.core.distributions import require_positive
from asyncrl.core.types import Record


class Chain(Record, frozen=True, kw_only=True):
    """``nodes`` p ≥ 2, ``size`` M in bytes, ``byte_s`` T_byte = 1/bandwidth in seconds a byte, ``start_s`` T_start in
    seconds a message."""

    nodes: int
    size: float
    byte_s: float
    start_s: float

    def __post_init__(self) -> None:
        require_positive("chain", size=self.size, byte_s=self.byte_s, start_s=self.start_s)
        if self.nodes < 2:
            raise ValueError(f"chain of {self.nodes} nodes; it has a master and at least one other")


def broadcast_time(chain: Chain, chunks: float) -> float:
    """T(p, k) = (p + k − 2)·(M/k·T_byte + T_start), seconds until the last node has the last chunk (C.2, Eq. 1)."""
    if not chunks >= 1:
        raise ValueError(f"{chunks:g} chunks; the weights are sent in at least one")
    return (chain.nodes + chunks - 2) * (chain.size / chunks * chain.byte_s + chain.start_s)


def optimal_chunks(chain: Chain) -> float:
    """k* = √((p − 2)·M·T_byte / T_start), not rounded (C.3). Below 1, the paper's formula has no meaning: for p = 2 it
    gives 0, and one chunk is best."""
    return math.sqrt((chain.nodes - 2) * chain.size * chain.byte_s / chain.start_s)


def best_chunks(chain: Chain) -> int:
    """The whole number of chunks, at least 1, that takes least time (T is convex in k: a neighbour of k*)."""
    k = optimal_chunks(chain)
    return min(max(1, math.floor(k)), max(1, math.ceil(k)), key=lambda chunks: broadcast_time(chain, chunks))


def least_time(chain: Chain) -> float:
    """T*(p) = M·T_byte + (p − 2)·T_start + 2√((p − 2)·M·T_byte·T_start), seconds (C.3).

    A lower bound on T(p, k) for every whole k, reached where k* is whole. For p = 2 it is M·T_byte, one T_start less
    than sending the weights in one chunk takes: it lets k go to 0.
    """
    hops, copy = chain.nodes - 2, chain.size * chain.byte_s
    return copy + hops * chain.start_s + 2.0 * math.sqrt(hops * copy * chain.start_s)
