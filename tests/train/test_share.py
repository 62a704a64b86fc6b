"""What each rank offers to relays: together exactly the weights, nobody much more than its part, and nothing gathered
that need not be."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load

from asyncrl.checksum import checksum
from asyncrl.config import ModelConfig, Recipe, TrainerConfig
from asyncrl.core.manifest import Manifest, TensorInfo
from asyncrl.core.weight_file import lay_out
from asyncrl.train import model, worker
from asyncrl.train.rank import Offered, Rank
from asyncrl.train.share import plan_pieces, spans_of
from asyncrl.weights.link import Source, connect
from asyncrl.wire import FetchReq

from .ranks import on_ranks


@pytest.mark.parametrize("seed", range(5))
def test_the_ranks_spans_are_the_whole_file_once_and_the_load_is_balanced(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [tuple(rng.randrange(1, 40) for _ in range(rng.randrange(1, 4))) for _ in range(60)]
    types = [rng.choice(["float32", "bfloat16", "uint8"]) for _ in shapes]
    weights = Manifest(
        version=1,
        tensors=tuple(
            TensorInfo(name=f"t{i}", shape=shape, dtype=kind)
            for i, (shape, kind) in enumerate(zip(shapes, types, strict=True))
        ),
    )
    in_rows = {t.name for t in weights.tensors if rng.random() < 0.5}
    ranks = rng.randrange(1, 6)
    pieces = plan_pieces(weights, in_rows, ranks)
    spans = sorted(span for rank in range(ranks) for span in spans_of(weights, pieces, rank))
    assert spans[0][0] == 0 and spans[-1][1] == lay_out(weights).size
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    loads = [sum(p.end - p.start for p in pieces if p.rank == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(t.nbytes for t in weights.tensors)


def offered(folder: str, lora: int) -> tuple[bytes, Manifest, dict[str, torch.Tensor], list[tuple[int, int]]]:
    """On each rank: the file as a relay gets it, and the weights as they are gathered."""
    recipe = Recipe(model=ModelConfig(path=folder, dtype="bfloat16"), trainer=TrainerConfig(lora_rank=lora))
    rank = Rank(recipe, folder, torch.device("cpu"))
    with torch.no_grad():
        for parameter in rank.learner.policy.parameters():
            parameter.add_(0.01)
    addresses = rank.offer(0)
    assert rank.offer(0) == addresses, "a rank listens once"
    manifest, file = asyncio.run(taken([one.address for one in addresses]))
    gathered = {name: tensor.clone() for bucket in rank.gather(keep=True) for name, tensor in bucket.items()}
    assert rank._share is not None
    return file, manifest, gathered, list(rank._share._outlet._parts)


async def taken(addresses: list[str]) -> tuple[Manifest, bytes]:
    sockets = [await connect(address) for address in addresses]
    source = Source(sockets)
    await source.ask(FetchReq(run="", version=0, offset=0))
    assert source.manifest is not None
    data = bytearray(lay_out(source.manifest).size)
    at = 0
    while at < len(data):
        at += await source.receive_into(at, memoryview(data)[at:])
    checksums = await source.checksums()
    for sock in sockets:
        sock.close()
    return msgspec.structs.replace(source.manifest, checksums=checksums), bytes(data)


@pytest.mark.parametrize("lora", [0, 4])
def test_what_relays_take_from_all_ranks_is_what_rank_0_would_have_gathered(model_folder: Path, lora: int) -> None:
    results = on_ranks(2, offered, str(model_folder), lora)
    for file, manifest, gathered, _ in results:
        found = load(file)
        assert found.keys() == gathered.keys()
        for name, tensor in gathered.items():
            assert torch.equal(found[name], tensor), name
            assert manifest.checksums[name] == checksum(tensor)
    sizes = [sum(end - start for start, end in spans) for *_, spans in results]
    assert sum(sizes) == len(results[0][0])
    assert min(sizes) > 0.4 * sum(sizes)


def without_gathering(folder: str) -> list[Any]:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("rows that a rank holds were gathered")

    rank = Rank(Recipe(model=ModelConfig(path=folder)), folder, torch.device("cpu"))
    model.DTensor.full_tensor = forbidden  # type: ignore[method-assign]  # in this process, which ends with it
    return rank.offer(0)


def test_a_model_that_is_saved_as_it_is_held_is_not_gathered(model_folder: Path) -> None:
    for addresses in on_ranks(2, without_gathering, str(model_folder)):
        assert len(addresses) == 2


def cannot_listen(folder: str) -> tuple[list[Offered], list[Offered]]:
    """Rank 1 first has an address that is not its own."""
    wrong = "192.0.2.1" if dist.get_rank() else "127.0.0.1"
    rank = Rank(Recipe(model=ModelConfig(path=folder)), folder, torch.device("cpu"), wrong)
    first = rank.offer(0)
    rank._address = "127.0.0.1"
    return first, rank.offer(0)


def test_one_rank_that_cannot_listen_is_an_answer_on_all_and_holds_up_none(model_folder: Path) -> None:
    for first, second in on_ranks(2, cannot_listen, str(model_folder)):
        assert first[0].address and "192.0.2.1" in first[1].error
        assert all(one.address for one in second)


def test_a_rank_on_another_machine_listens_where_it_reaches_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "9")
    monkeypatch.setenv("GROUP_RANK", "0")
    assert worker._address("10.1.2.3") == "10.1.2.3"
    monkeypatch.setenv("GROUP_RANK", "1")
    assert worker._address("10.1.2.3") == "127.0.0.1"
