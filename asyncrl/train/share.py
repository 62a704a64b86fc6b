"""A rank's share of each new version, which relays take from it (StaleFlow appendix A.2).

A rank offers the rows that it holds anyway, so these are not gathered, and no rank copies or sends more than its part.
What leaves the model in another form than it has there, every rank has for a moment: weights that are saved in other
pieces, and all of a model with low-rank adapters, which leave merged. The plan gives each of those to the rank that has
least to send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.core.manifest import Manifest
from asyncrl.core.transfer import Link, Slice, plan_senders
from asyncrl.core.types import Record
from asyncrl.core.weight_file import lay_out
from asyncrl.train import model
from asyncrl.train.model import Policy
from asyncrl.weights.outlet import Outlet

MASTER = "master relay"


class Piece(Record, frozen=True, kw_only=True):
    """Bytes ``start`` to ``end`` (exclusive) of a tensor, which ``rank`` offers."""

    tensor: str
    start: int
    end: int
    rank: int


def plan_pieces(weights: Manifest, in_rows: set[str], ranks: int) -> list[Piece]:
    """Who offers what of ``weights``, in their order. Of tensors ``in_rows`` each rank holds as many rows as any, the
    last ones fewer (FSDP2); the others all ranks have. Links to the master are taken to be alike."""
    everyone = [str(rank) for rank in range(ranks)]
    ranges, slices = [], []
    for tensor in weights.tensors:
        if tensor.name not in in_rows:
            ranges.append((tensor.name, 0, tensor.nbytes))
            slices.append(Slice(size=tensor.nbytes, receiver=MASTER, senders=everyone))
            continue
        row = tensor.nbytes // max(1, tensor.shape[0])
        held = -(-tensor.shape[0] // ranks) * row
        for rank in everyone:
            start, end = (min(n * held, tensor.nbytes) for n in (int(rank), int(rank) + 1))
            ranges.append((tensor.name, start, end))
            slices.append(Slice(size=end - start, receiver=MASTER, senders=[rank]))
    senders = plan_senders(slices, {(rank, MASTER): Link(bandwidth=1.0) for rank in everyone})
    return [
        Piece(tensor=name, start=start, end=end, rank=int(rank))
        for (name, start, end), rank in zip(ranges, senders, strict=True)
    ]


def spans_of(weights: Manifest, pieces: list[Piece], rank: int) -> tuple[tuple[int, int], ...]:
    """The parts (start, end) of the weights' file that ``rank`` offers; the header is rank 0's."""
    layout = lay_out(weights)
    starts = {place.tensor.name: place.start for place in layout.places}
    spans = [(0, len(layout.header))] if rank == 0 else []
    spans += [(starts[p.tensor] + p.start, starts[p.tensor] + p.end) for p in pieces if p.rank == rank]
    joined: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return tuple(joined)


class Share:
    """Of rank ``rank`` of ``ranks``. ``offer`` is a collective of all of them."""

    def __init__(self, policy: Policy, weights: Manifest, rank: int, ranks: int, address: str, token: str) -> None:
        """Listens at ``address``. Raises ``OSError``."""
        self._policy = policy
        self._weights = weights
        self._dtype: torch.dtype = getattr(torch, weights.tensors[0].dtype)
        self._in_rows = _in_rows(policy)
        pieces = plan_pieces(weights, set(self._in_rows.values()), ranks)
        self._mine = {piece.tensor: piece for piece in pieces if piece.rank == rank}
        self._outlet = Outlet(address, token, spans_of(weights, pieces, rank))
        self.address = f"{address}:{self._outlet.port}"

    def offer(self, version: int) -> None:
        """Copy what is this rank's, and let relays have it."""
        weights = msgspec.structs.replace(self._weights, version=version)
        layout, memory = self._outlet.begin(weights)
        starts = {place.tensor.name: place.start for place in layout.places}
        for name, held in self._held():
            piece = self._mine.get(name)
            if piece is None or piece.start == piece.end:
                continue
            target = starts[name] + piece.start
            copy = torch.frombuffer(memory, dtype=torch.uint8, count=piece.end - piece.start, offset=target)
            copy.copy_(held.contiguous().reshape(-1).view(torch.uint8))
        self._outlet.offer(weights)

    def close(self) -> None:
        self._outlet.close()

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of what it holds in rows, and all of the rest, under the names that go out."""
        others = []
        for name, parameter in model.named_parameters(self._policy):
            if name in self._in_rows:
                assert isinstance(parameter, DTensor)
                yield self._in_rows[name], parameter.to_local().detach().to(self._dtype)
            else:
                others.append((name, parameter))
        yield from model.exported(self._policy, model.whole(others, self._dtype), self._dtype)


def _in_rows(policy: Policy) -> Mapping[str, str]:
    """The parameters that leave the model row by row as the ranks hold them, and their names outside."""
    found = {}
    if not policy.lora_scale:
        for name, parameter in model.named_parameters(policy):
            meta = torch.empty(parameter.shape, device="meta")
            ((saved, part), *others) = model.exported(policy, [(name, meta)], meta.dtype)
            if part is meta and not others and isinstance(parameter, DTensor) and parameter.placements == (Shard(0),):
                found[name] = saved
    return found
