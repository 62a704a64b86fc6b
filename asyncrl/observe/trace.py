"""The trace: Chrome's trace-event JSON, which chrome://tracing and Perfetto load.

The file is a JSON array with one event a line. Both viewers accept an array without its closing bracket, so a killed
run leaves a valid trace. A track is a thread; tracks that begin with the same word ("server 0", "server 1") share a
process. Spans of one thread must not overlap, so spans that do take further threads of their track. An event's category
is its track, except for ``BUSY`` segments of servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.observe.busy import Segment
from asyncrl.observe.run_dir import RunDirError

BUSY = "busy"
"""Category of the segments in which a server was busy; ``args`` are ``server`` and ``version``."""


class TraceEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event. ``ts`` and ``dur`` are microseconds since the run began. ``ph``: X span, i instant, C counter, M name
    of a process or thread."""

    ph: str
    name: str
    pid: int
    tid: int = 0
    cat: str = ""
    ts: int = -1
    dur: int = -1
    s: str = ""
    args: dict[str, Any] = {}


class TraceEncoder:
    """Events to bytes. Owns the numbers of processes and threads. Expects a track's spans in the order of their ends.

    ``origin`` is the loop time of the trace's zero.
    """

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._processes: dict[str, int] = {}
        self._lanes: dict[str, list[tuple[int, int]]] = {}  # track → (tid, end of its last span in µs)
        self._threads = 0
        self._started = False

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any]) -> bytes:
        return self._span(track, track, name, start, end, dict(args))

    def busy(self, server: str, segment: Segment) -> bytes:
        args = {"server": server, "version": segment.version}
        return self._span(f"{server} busy", BUSY, f"v{segment.version}", segment.start, segment.end, args)

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any]) -> bytes:
        lines: list[bytes] = []
        pid, tid, ts = self._pid(track, lines), self._open_lane(track, 0, lines), self._us(at)
        event = TraceEvent(ph="i", s="t", name=name, cat=track, pid=pid, tid=tid, ts=ts, args=dict(args))
        lines.append(self._line(event))
        return b"".join(lines)

    def counter(self, name: str, at: float, value: float) -> bytes:
        lines: list[bytes] = []
        pid = self._pid("counters", lines)
        lines.append(self._line(TraceEvent(ph="C", name=name, pid=pid, ts=self._us(at), args={"value": value})))
        return b"".join(lines)

    def end(self) -> bytes:
        return b"\n]\n" if self._started else b"[]\n"

    def _us(self, at: float) -> int:
        return max(0, round((at - self._origin) * 1e6))

    def _span(self, track: str, cat: str, name: str, start: float, end: float, args: dict[str, Any]) -> bytes:
        lines: list[bytes] = []
        ts, end_us = self._us(start), self._us(end)
        pid, tid = self._pid(track, lines), self._lane(track, ts, end_us, lines)
        event = TraceEvent(ph="X", name=name, cat=cat, pid=pid, tid=tid, ts=ts, dur=max(0, end_us - ts), args=args)
        lines.append(self._line(event))
        return b"".join(lines)

    def _lane(self, track: str, start: int, end: int, lines: list[bytes]) -> int:
        """The thread of ``track`` that became free last before ``start`` (a new one if none is free)."""
        lanes = self._lanes.setdefault(track, [])
        best = -1
        for i, (_, free) in enumerate(lanes):
            if free <= start and (best < 0 or free > lanes[best][1]):
                best = i
        if best < 0:
            best = len(lanes)
            self._open_lane(track, best, lines)
        tid = lanes[best][0]
        lanes[best] = (tid, end)
        return tid

    def _open_lane(self, track: str, number: int, lines: list[bytes]) -> int:
        lanes = self._lanes.setdefault(track, [])
        if number == len(lanes):
            self._threads += 1
            lanes.append((self._threads, 0))
            label = track if number == 0 else f"{track} ({number})"
            pid, tid = self._pid(track, lines), self._threads
            lines.append(self._line(TraceEvent(ph="M", name="thread_name", pid=pid, tid=tid, args={"name": label})))
            order = TraceEvent(ph="M", name="thread_sort_index", pid=pid, tid=tid, args={"sort_index": tid})
            lines.append(self._line(order))
        return lanes[number][0]

    def _pid(self, track: str, lines: list[bytes]) -> int:
        process = track.split(" ", 1)[0]
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = len(self._processes) + 1
            lines.append(self._line(TraceEvent(ph="M", name="process_name", pid=pid, args={"name": process})))
        return pid

    def _line(self, event: TraceEvent) -> bytes:
        lead = b",\n" if self._started else b"[\n"
        self._started = True
        return lead + msgspec.json.encode(event)


def read_trace(path: Path) -> Iterator[TraceEvent]:
    """Events of a trace file, also of a run that was killed; none if there is no file."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(TraceEvent)
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.strip().removesuffix(b",")
            if text in (b"[", b"]", b"[]", b""):
                continue
            try:
                yield decoder.decode(text)
            except msgspec.DecodeError as error:
                if not line.endswith(b"\n"):
                    return
                raise RunDirError(f"{path}:{number}: not a trace event ({error}): remove the line") from None
