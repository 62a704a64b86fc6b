"""How long new weights take from the trainer to the servers, per transport: pure formulas, for plans and simulations.

``prepare`` holds the trainer, ``arrive`` nobody, ``deliver`` the servers, which are paused. What a server itself needs
to take weights in comes on top (``sim.instance.load_s``).

    transport    prepare                 arrive                    deliver
    disk         gather, then write      –                         every server reads all of it from one shared folder
    collective   gather                  –                         one pipelined broadcast from the trainer to all
    relay        copy each rank's share  chain broadcast from      each server loads from its own host's memory
                                         host to host (Laminar
                                         appendix C)

Both broadcasts pass chunks down a chain of p = servers + 1 nodes, in the best whole number of chunks
(core/theory/broadcast.py); a ring or tree of a collective library is no slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from asyncrl.core.theory.broadcast import Chain, best_chunks, broadcast_time
from asyncrl.core.types import Record

Transport = Literal["disk", "collective", "relay"]


class Speeds(Protocol):
    """The recipe's ``[sim.weights]``: sizes in GB, speeds in GB/s, ``hop_s`` in seconds a chunk and hop."""

    @property
    def gigabytes(self) -> float: ...
    @property
    def gather_gb_s(self) -> float: ...
    @property
    def disk_gb_s(self) -> float: ...
    @property
    def link_gb_s(self) -> float: ...
    @property
    def hop_s(self) -> float: ...
    @property
    def local_gb_s(self) -> float: ...


def seconds_to_prepare(speeds: Speeds, transport: Transport) -> float:
    """From the end of a train step until the trainer may go on."""
    write_s = speeds.gigabytes / speeds.disk_gb_s if transport == "disk" else 0.0
    return speeds.gigabytes / speeds.gather_gb_s + write_s


def seconds_to_arrive(speeds: Speeds, transport: Transport, servers: int) -> float:
    """From then until ``deliver`` can begin, on a fleet of ``servers``, each on a host of its own."""
    return broadcast_seconds(speeds, servers) if transport == "relay" else 0.0


def seconds_to_deliver(speeds: Speeds, transport: Transport, servers: int) -> float:
    """Until the last of ``servers`` paused servers has received the weights; 0 for no server."""
    if not servers:
        return 0.0
    match transport:
        case "disk":
            return servers * speeds.gigabytes / speeds.disk_gb_s
        case "collective":
            return broadcast_seconds(speeds, servers)
        case "relay":
            return speeds.gigabytes / speeds.local_gb_s


def broadcast_seconds(speeds: Speeds, servers: int) -> float:
    """T(p, k) of a chain of the trainer and ``servers``, in the best number of chunks k (Laminar C.2, C.3)."""
    byte_s = 1e-9 / speeds.link_gb_s
    if not speeds.hop_s:  # chunks cost nothing: with ever more of them only the copy itself is left
        return speeds.gigabytes * 1e9 * byte_s
    chain = Chain(nodes=servers + 1, size=speeds.gigabytes * 1e9, byte_s=byte_s, start_s=speeds.hop_s)
    return broadcast_time(chain, best_chunks(chain))


class Slice(Record, frozen=True, kw_only=True):
    """A piece of a tensor of ``size`` bytes that ``receiver`` needs; each of ``senders`` has it."""

    size: int
    receiver: str
    senders: Sequence[str]


class Link(Record, frozen=True, kw_only=True):
    """From one sender to one receiver, as measured beforehand: bytes a second, and seconds that each slice costs."""

    bandwidth: float
    start_s: float = 0.0


def plan_senders(slices: Sequence[Slice], links: Mapping[tuple[str, str], Link]) -> tuple[str, ...]:
    """Who sends each of ``slices``, for trainers whose ranks share the sending (StaleFlow appendix A.2, figure 22).

    A sender's latency is the sum over its slices of size / bandwidth + start. Slice by slice, the candidate with the
    smallest latency so far gets it; of equal ones the first named. Raises ``ValueError`` for a slice that nobody has.
    """
    latency: dict[str, float] = {}
    chosen: list[str] = []
    for i, piece in enumerate(slices):
        if not piece.senders:
            raise ValueError(f"slice {i} for {piece.receiver}: nobody has it")
        sender = min(piece.senders, key=lambda name: latency.get(name, 0.0))
        link = links[sender, piece.receiver]
        latency[sender] = latency.get(sender, 0.0) + piece.size / link.bandwidth + link.start_s
        chosen.append(sender)
    return tuple(chosen)
