"""The trainer's end of the ``relay`` transport: a rank's share of the newest version, for the master relay to take.

Laid out as the file that the relays keep, in memory without a name, so that the kernel sends it from there while the
next step runs. A thread listens, and each relay that asks has one of its own: the master, or the next where that dies.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from asyncrl.access import matches
from asyncrl.checksum import checksum_of_part
from asyncrl.core.manifest import Manifest
from asyncrl.core.weight_file import WeightFile, lay_out
from asyncrl.weights import nixl
from asyncrl.weights.link import STRANGER, LinkBroken, LinkMissing, decode, frame, length
from asyncrl.wire import FetchEnd, FetchReply, FetchReq


class Outlet:
    """Listens at ``address`` from the beginning; ``port`` says where. ``begin``, fill the memory, ``offer``. Takers
    have to show the ``token``. With ``spans`` (start, end), in order, it is only those parts of the file, perhaps none,
    that are filled, offered, and take memory."""

    def __init__(self, address: str, token: str = "", spans: Sequence[tuple[int, int]] | None = None) -> None:
        """Raises ``OSError``, where ``address`` is none of this machine for instance."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._token = token
        self._spans = None if spans is None else tuple(spans)
        self._file = os.memfd_create("asyncrl-weights")
        self._memory = mmap.mmap(-1, 1)
        self._layout = WeightFile(header=b"", places=(), size=0)
        self._lock = threading.Condition()
        # What follows is touched under the lock.
        self._offered: Manifest | None = None
        self._sums: Future[dict[str, int]] | None = None
        """The checksums of what is offered, from when a relay first asked for it."""
        self._takers: set[socket.socket] = set()
        threading.Thread(target=self._listen, name="outlet", daemon=True).start()

    def begin(self, manifest: Manifest) -> tuple[WeightFile, mmap.mmap]:
        """The layout of ``manifest``'s file, and the memory that its tensors are to be written into. The version before
        is no longer offered, and who still took it is cut off."""
        layout = lay_out(manifest)
        with self._lock:
            self._offered = None
            for taker in self._takers:
                with suppress(OSError):  # it has gone by itself
                    taker.shutdown(socket.SHUT_RDWR)
            self._lock.wait_for(lambda: not self._takers)
        if layout.size != self._layout.size:
            if self._sums is not None:  # still reads what would end
                self._sums.result()
            os.ftruncate(self._file, layout.size)
            self._memory = mmap.mmap(self._file, layout.size)
        self._layout = layout
        if not self._spans or self._spans[0][0] == 0:
            self._memory[: len(layout.header)] = layout.header
        return layout, self._memory

    def offer(self, manifest: Manifest) -> None:
        """Its tensors are in the memory. Their checksums are made while the first relay takes it, off the trainer's
        way."""
        with self._lock:
            self._offered = msgspec.structs.replace(manifest, checksums={})
            self._sums = None

    def close(self) -> None:
        """Offer nothing more; the thread that listens ends."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):  # closed
            while True:
                taker, _ = self._listener.accept()
                threading.Thread(target=self._give, args=(taker,), name="outlet", daemon=True).start()

    def _give(self, taker: socket.socket) -> None:
        with suppress(OSError, LinkBroken), taker:
            taker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = decode(_exactly(taker, length(_exactly(taker, 4))), FetchReq)
            if not matches(request.token, self._token):
                taker.sendall(frame(FetchReply(error=STRANGER)))
                return
            with self._lock:
                offered = self._offered
                if offered is None or offered.version != request.version:
                    taker.sendall(frame(FetchReply()))
                    return
                self._takers.add(taker)
                if self._sums is None:
                    self._sums = _sums_to_come(self._layout, self._parts, memoryview(self._memory))
                sums = self._sums
            try:
                if request.link == "nixl" and self._parts:
                    self._give_by_nixl(taker, request.offset, offered, sums)
                    return
                taker.sendall(frame(FetchReply(manifest=offered, spans=self._spans)))
                for start, end in self._parts:
                    offset = max(start, request.offset)
                    while offset < end:
                        offset += os.sendfile(taker.fileno(), self._file, offset, end - offset)
                taker.sendall(frame(FetchEnd(checksums=sums.result())))
            finally:
                with self._lock:
                    self._takers.discard(taker)
                    self._lock.notify_all()

    def _give_by_nixl(self, taker: socket.socket, offset: int, offered: Manifest, sums: Future[dict[str, int]]) -> None:
        nixl.stay_local(self._listener.getsockname()[0])
        try:
            shown = nixl.Shown(self._memory, self._parts)
        except LinkMissing as error:
            taker.sendall(frame(FetchReply(error=str(error))))
            return
        try:
            taker.sendall(frame(FetchReply(manifest=offered, spans=self._spans, door=shown.door)))
            if any(end > offset for _, end in self._parts):  # else it does not read how much is there
                taker.sendall(self._layout.size.to_bytes(8, "little"))
            taker.sendall(frame(FetchEnd(checksums=sums.result())))
            taker.recv(1)  # it closes the connection when it reads no more
        finally:
            shown.close()

    @property
    def _parts(self) -> Sequence[tuple[int, int]]:
        """What is offered of the file."""
        return ((0, self._layout.size),) if self._spans is None else self._spans


def _sums(layout: WeightFile, spans: Sequence[tuple[int, int]], data: memoryview) -> dict[str, int]:
    """What the bytes in ``spans`` add to each tensor's checksum."""
    sums = {place.tensor.name: 0 for place in layout.places}
    pending = deque(spans)
    for place in layout.places:
        while pending and (start := max(pending[0][0], place.start)) < place.end:
            end = min(pending[0][1], place.end)
            sums[place.tensor.name] += checksum_of_part(data[start:end], start - place.start)
            if pending[0][1] > place.end:
                break
            pending.popleft()
    return {name: total % 2**64 for name, total in sums.items()}


def _sums_to_come(layout: WeightFile, spans: Sequence[tuple[int, int]], data: memoryview) -> Future[dict[str, int]]:
    """The same, made in a thread of its own, which does not outlive the process."""
    sums: Future[dict[str, int]] = Future()

    def run() -> None:
        try:
            sums.set_result(_sums(layout, spans, data))
        except Exception as error:
            sums.set_exception(error)

    threading.Thread(target=run, name="outlet", daemon=True).start()
    return sums


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise LinkBroken("the other side closed the connection")
        data += part
    return data
