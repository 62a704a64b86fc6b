"""Chain broadcast: the formulas of Laminar's appendix C against a pipeline simulated chunk by chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.theory.broadcast import Chain, best_chunks, broadcast_time, least_time, optimal_chunks

chains = st.builds(
    Chain,
    nodes=st.integers(2, 300),
    size=st.floats(1e3, 1e12),
    byte_s=st.floats(1e-11, 1e-8),
    start_s=st.floats(1e-6, 1e-1),
)


def pipeline(chain: Chain, chunks: int) -> float:
    """When the last node has the last chunk: a node sends a chunk when it has it and has sent the one before."""
    one = chain.size / chunks * chain.byte_s + chain.start_s
    has = [0.0] * chunks  # the master has every chunk at once
    for _ in range(chain.nodes - 1):
        sent = 0.0
        for chunk in range(chunks):
            sent = max(sent, has[chunk]) + one
            has[chunk] = sent
    return has[-1]


@given(chain=chains, chunks=st.integers(1, 40))
def test_time_is_that_of_the_pipeline(chain: Chain, chunks: int) -> None:
    assert broadcast_time(chain, chunks) == pytest.approx(pipeline(chain, chunks), rel=1e-9)


@given(chain=chains, chunks=st.integers(1, 10_000))
def test_time_as_expanded_in_equation_1(chain: Chain, chunks: int) -> None:
    copy, hops = chain.size * chain.byte_s, chain.nodes - 2
    expanded = copy + hops * chain.start_s + chunks * chain.start_s + hops * copy / chunks
    assert broadcast_time(chain, chunks) == pytest.approx(expanded, rel=1e-9)


@given(
    nodes=st.integers(2, 60),
    size=st.floats(1e3, 1e9),
    byte_s=st.floats(1e-10, 1e-8),
    start_s=st.floats(1e-3, 1e-1),
)
def test_best_chunks_by_scanning_all(nodes: int, size: float, byte_s: float, start_s: float) -> None:
    chain = Chain(nodes=nodes, size=size, byte_s=byte_s, start_s=start_s)
    scanned = min(range(1, 2500), key=lambda k: broadcast_time(chain, k))
    assert broadcast_time(chain, best_chunks(chain)) == pytest.approx(broadcast_time(chain, scanned), rel=1e-12)


@given(chain=chains)
def test_least_time_is_the_time_at_the_optimum_and_a_lower_bound(chain: Chain) -> None:
    k = optimal_chunks(chain)
    if k >= 1:
        assert broadcast_time(chain, k) == pytest.approx(least_time(chain), rel=1e-9)
    assert broadcast_time(chain, best_chunks(chain)) >= least_time(chain) * (1 - 1e-12)


def test_two_nodes_take_one_chunk_although_the_formula_says_none() -> None:
    chain = Chain(nodes=2, size=1e9, byte_s=1e-9, start_s=0.5)
    assert optimal_chunks(chain) == 0.0
    assert best_chunks(chain) == 1
    assert broadcast_time(chain, 1) == pytest.approx(1.5)
    assert least_time(chain) == pytest.approx(1.0)


def test_the_papers_example_is_nearly_flat_in_the_number_of_nodes() -> None:
    # 140 GB, start-up 5 µs, 2,000 nodes: the latency term is 10 ms (C.3). At 50 GB/s the weights take 2.8 s.
    times = [least_time(Chain(nodes=p, size=140e9, byte_s=1 / 50e9, start_s=5e-6)) for p in (2, 16, 128, 2000)]
    assert times[0] == pytest.approx(2.8)
    assert times == sorted(times)
    assert times[2] < 1.04 * times[0]
    assert times[3] < 1.13 * times[0]


def test_nonsense_is_refused() -> None:
    chain = Chain(nodes=3, size=1.0, byte_s=1.0, start_s=1.0)
    for nonsense in (
        lambda: Chain(nodes=1, size=1.0, byte_s=1.0, start_s=1.0),
        lambda: Chain(nodes=3, size=0.0, byte_s=1.0, start_s=1.0),
        lambda: broadcast_time(chain, 0),
    ):
        with pytest.raises(ValueError):
            nonsense()
