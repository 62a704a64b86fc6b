"""Weights by RDMA through NIXL (StaleFlow appendix A): the taker reads the memory of the giver, whose processor has no
part in it where the network can do that. NIXL's UCX finds the way: InfiniBand, RoCE, shared memory or TCP.

    giver → taker    FetchReply with a ``door``; then, as more of the file is there, its end so far (8 bytes each time)
    taker            reads what is there, piece by piece; closes the connection when it has all

What was asked and who has gone is told by the TCP connection of ``link.py``, and for as long as it is open the giver's
memory stays where it is. NIXL's own connections know no token: they belong into a trusted network (``UCX_NET_DEVICES``
names its devices), or on loopback, where they are if the relays are.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from asyncrl.access import is_loopback
from asyncrl.weights.link import LinkBroken, LinkMissing, exactly
from asyncrl.wire import Door

BUFFER_BYTES = 2**24
"""Read at once: at 25 GB/s that takes longer than a pause."""

POLL_S = 0.0002
"""NIXL has nothing to wait for: whether a read has ended is asked."""

_stranded: list[object] = []
"""Memory that a read which could not be called off may still write to."""


_first = threading.Lock()


def _agent() -> Any:
    """This process's. Blocks for a second when it is made. Raises ``LinkMissing``."""
    with _first:
        return _made()


@cache
def _made() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        locks = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # it has none of its own accord, and the loop is not alone
        return nixl_agent(secrets.token_hex(8), nixl_agent_config(backends=["UCX"], sync_mode=locks))
    except Exception as error:  # a library without its driver raises what it likes
        why = str(error) or type(error).__name__
        raise LinkMissing(f"weights.link = nixl: {why}; pip install nixl where relays and trainer run") from None


def stay_local(host: str) -> None:
    """Before the first use: no other machine is to reach what listens on loopback."""
    if is_loopback(host):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


class Shown:
    """``spans`` (start, end) of ``memory``, which others may read until ``close``."""

    def __init__(self, memory: mmap.mmap, spans: Sequence[tuple[int, int]]) -> None:
        """Blocks while the memory is registered. Raises ``LinkMissing`` or ``OSError``."""
        agent = _agent()
        self._memory = memory
        address = _address(memory)
        self._regions = agent.get_reg_descs([(address + a, b - a, 0, "") for a, b in spans if a < b], "DRAM")
        try:
            agent.register_memory(self._regions, backends=["UCX"])
            metadata = agent.get_partial_agent_metadata(self._regions, inc_conn_info=True, backends=["UCX"])
        except Exception as error:  # NIXL's have no base of their own
            raise OSError(f"NIXL cannot register {memory.size()} bytes: {error}") from None
        self.door = Door(agent=metadata, address=address)

    def close(self) -> None:
        _agent().deregister_memory(self._regions, backends=["UCX"])


class Reader:
    """Reads a file by its giver's ``door``; ``sock`` brings how much of it is there."""

    def __init__(self, sock: socket.socket, door: Door) -> None:
        """Blocks while it connects. Raises ``LinkMissing`` or ``LinkBroken``."""
        self._sock = sock
        self._door = door
        self._there = 0
        self._agent = agent = _agent()
        self._memory = mmap.mmap(-1, BUFFER_BYTES)
        self._buffer = memoryview(self._memory)
        self._address = _address(self._memory)
        self._regions = agent.get_reg_descs([(self._address, BUFFER_BYTES, 0, "")], "DRAM")
        try:
            agent.register_memory(self._regions, backends=["UCX"])
        except Exception as error:  # NIXL's have no base of their own
            raise LinkBroken(f"NIXL cannot register memory: {error}") from None
        try:
            self._giver = agent.add_remote_agent(door.agent)
        except Exception as error:
            agent.deregister_memory(self._regions, backends=["UCX"])
            raise LinkBroken(f"NIXL cannot connect: {error}") from None

    async def receive_into(self, start: int, view: memoryview) -> int:
        """At least one byte of the file from ``start`` on. Raises ``LinkBroken`` or ``OSError``."""
        while self._there <= start:
            self._there = int.from_bytes(await exactly(self._sock, 8), "little")
        count = min(len(view), self._there - start, BUFFER_BYTES)
        try:
            await self._read(start, count)
        except Exception as error:  # NIXL's have no base of their own
            raise LinkBroken(f"NIXL cannot read: {error}") from None
        view[:count] = self._buffer[:count]
        return count

    async def _read(self, start: int, count: int) -> None:
        here = self._agent.get_xfer_descs([(self._address, count, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(self._door.address + start, count, 0)], "DRAM")
        read = self._agent.initialize_xfer("READ", here, there, self._giver)
        try:
            state = self._agent.transfer(read)
            while state == "PROC":
                await asyncio.sleep(POLL_S)
                state = self._agent.check_xfer_state(read)
            if state != "DONE":
                raise LinkBroken("it failed")
        finally:
            try:
                self._agent.release_xfer_handle(read)
            except Exception:  # it goes on, with a giver that hangs
                _stranded.append((self._memory, read))

    def close(self) -> None:
        try:
            self._agent.remove_remote_agent(self._giver)
            self._agent.deregister_memory(self._regions, backends=["UCX"])
        except Exception:  # the giver has gone, and with it the connection
            _stranded.append(self._memory)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
