"""Seconds of a weight update, by hand."""

from __future__ import annotations

import pytest

from asyncrl.config import WeightsModel
from asyncrl.core.transfer import (
    Link,
    Slice,
    broadcast_seconds,
    plan_senders,
    seconds_to_arrive,
    seconds_to_deliver,
    seconds_to_prepare,
)

MODEL = WeightsModel(gigabytes=12.0, gather_gb_s=6.0, disk_gb_s=3.0, link_gb_s=4.0, hop_s=0.01, local_gb_s=24.0)


def test_disk_writes_once_and_every_server_reads_from_the_same_folder() -> None:
    assert seconds_to_prepare(MODEL, "disk") == pytest.approx(2 + 4)
    assert [seconds_to_deliver(MODEL, "disk", n) for n in (0, 1, 5)] == pytest.approx([0, 4, 20])


def test_collective_gathers_and_then_broadcasts_to_all_at_once() -> None:
    assert seconds_to_prepare(MODEL, "collective") == pytest.approx(2)
    assert seconds_to_arrive(MODEL, "collective", 5) == seconds_to_arrive(MODEL, "disk", 5) == 0
    assert seconds_to_deliver(MODEL, "collective", 5) == broadcast_seconds(MODEL, 5)
    assert seconds_to_deliver(MODEL, "collective", 0) == 0


def test_relay_broadcasts_beside_training_and_generation_and_loads_from_the_own_host() -> None:
    assert seconds_to_prepare(MODEL, "relay") == pytest.approx(2)
    assert seconds_to_arrive(MODEL, "relay", 5) == broadcast_seconds(MODEL, 5)
    assert [seconds_to_deliver(MODEL, "relay", n) for n in (1, 5, 100)] == pytest.approx([0.5] * 3)


def test_a_broadcast_takes_laminars_time() -> None:
    """p = 10 nodes, M·T_byte = 3 s, T_start = 0.01 s: k* = √(8 · 3 / 0.01) = 48.99, so T(10, 49)."""
    assert broadcast_seconds(MODEL, 9) == pytest.approx((10 + 49 - 2) * (3 / 49 + 0.01))


def test_one_server_gets_everything_in_one_chunk() -> None:
    assert broadcast_seconds(MODEL, 1) == pytest.approx(3 + 0.01)


def test_without_a_cost_of_hops_only_the_copy_is_left() -> None:
    free = WeightsModel(gigabytes=12.0, link_gb_s=4.0, hop_s=0.0)
    assert broadcast_seconds(free, 1) == broadcast_seconds(free, 500) == pytest.approx(3)


def test_a_broadcast_is_nearly_flat_in_the_number_of_servers() -> None:
    """Laminar §4.2: less than 1.6 s for a 72B model to 127 relays. 144 GB at 100 GB/s and 4 µs a hop."""
    large = WeightsModel(gigabytes=144.0, link_gb_s=100.0, hop_s=4e-6)
    assert broadcast_seconds(large, 127) < 1.6
    assert broadcast_seconds(large, 127) < 1.05 * broadcast_seconds(large, 1)


# --- senders (StaleFlow appendix A.2)


def test_each_slice_goes_to_the_candidate_with_the_smallest_latency_so_far() -> None:
    """By hand: a is at 10 s after its first slice, b at 6 s after its second; then b (6 < 10) and a (10 < 11) again."""
    links = {("a", "x"): Link(bandwidth=1.0), ("b", "x"): Link(bandwidth=2.0, start_s=1.0)}
    slices = [Slice(size=10, receiver="x", senders=s) for s in ("ab", "b", "ab", "ab")]
    assert plan_senders(slices, links) == ("a", "b", "b", "a")


def test_a_slice_with_one_holder_is_sent_by_it_however_busy() -> None:
    links = {(s, "x"): Link(bandwidth=1.0) for s in "ab"}
    assert plan_senders([Slice(size=5, receiver="x", senders="a")] * 3, links) == ("a", "a", "a")


def test_equal_slices_of_equal_ranks_are_shared_evenly_over_all_receivers() -> None:
    ranks, hosts = [f"rank {i}" for i in range(4)], [f"host {i}" for i in range(3)]
    links = {(r, h): Link(bandwidth=1e9, start_s=1e-4) for r in ranks for h in hosts}
    plan = plan_senders([Slice(size=100, receiver=h, senders=ranks) for _ in range(8) for h in hosts], links)
    assert [plan.count(rank) for rank in ranks] == [6] * 4


def test_a_slice_that_nobody_has_is_refused() -> None:
    with pytest.raises(ValueError, match="slice 0 for x: nobody has it"):
        plan_senders([Slice(size=1, receiver="x", senders=())], {})
