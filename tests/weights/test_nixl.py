"""Weights through NIXL, where it is installed (pip install nixl): here over shared memory or TCP, by the calls that
RDMA takes. And what is said where it is not."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest

from asyncrl.ports import EngineError

from .relays import world

installed = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL (pip install nixl)")
pytestmark = pytest.mark.timeout(180)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="NIXL is installed")
async def test_where_it_is_not_installed_the_remedy_is_one_line(tmp_path: Path) -> None:
    async with world(tmp_path, 1, megabytes=1, link="nixl") as w:
        await w.transport.prepare(1)
        await w.transport.arrive(w.engines(), 1)
        with pytest.raises(EngineError, match=r"weights\.link = nixl: No module named 'nixl'; pip install nixl where"):
            await w.transport.deliver(w.engines(), 1)


@installed
async def test_versions_travel_down_the_chain(tmp_path: Path) -> None:
    async with world(tmp_path, 3, megabytes=24, link="nixl") as w:
        for version in (1, 2, 3):
            await w.broadcast(version)
            assert [server.version for server in w.servers] == [version] * 3
        size = (w.folder(0) / "v3" / "model.safetensors").stat().st_size
        assert [w.state(i).received for i in range(3)] == [3 * size] * 3, "no byte came twice"
        assert [w.state(i).refused for i in range(3)] == [0] * 3


@installed
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["the master", "in the middle", "the last"])
async def test_a_relay_killed_in_mid_broadcast_costs_the_others_no_byte(tmp_path: Path, victim: int) -> None:
    async with world(tmp_path, 3, megabytes=64, link="nixl") as w:
        others = [i for i in range(3) if i != victim]
        await w.transport.prepare(1)
        await w.until(lambda: w.state(victim).received > 2**20)
        await w.kill(victim)
        await w.transport.arrive(w.engines(*others), 1)
        await w.transport.deliver(w.engines(*others), 1)
        assert [w.servers[i].version for i in others] == [1, 1]
        size = (w.folder(others[0]) / "v1" / "model.safetensors").stat().st_size
        assert [w.state(i).received for i in others] == [size, size]
        await w.start(victim)
        await w.up()
        await w.transport.deliver(w.engines(victim), 1)


@installed
async def test_one_that_hangs_is_cut_out_and_what_it_still_sends_harms_nobody(tmp_path: Path) -> None:
    async with world(tmp_path, 2, megabytes=48, link="nixl", silence_s=4.0) as w:
        await w.transport.prepare(1)
        await w.until(lambda: w.state(0).received > 2**20)
        await w.kill(0, signal.SIGSTOP)
        await w.transport.arrive(w.engines(1), 1)
        await w.transport.deliver(w.engines(1), 1)
        await w.kill(0, signal.SIGCONT)
        await w.up()
        await w.broadcast(2)
        assert [server.version for server in w.servers] == [2, 2]
