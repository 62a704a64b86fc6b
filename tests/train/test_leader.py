"""What rank 0 answers when something is wrong, with the other ranks and the model played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from asyncrl.config import Recipe
from asyncrl.core.manifest import Manifest, TensorInfo
from asyncrl.train import dump, export
from asyncrl.train.client import train_request
from asyncrl.train.leader import Leader
from asyncrl.train.rank import Offered
from asyncrl.train.server import Refused
from asyncrl.train.step import BadBatch, StepBroken
from asyncrl.train.work import StepRefused
from asyncrl.wire import PublishReq

from .batches import make_batch


class PlayedRank:
    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        self.folder = str(folder)
        self.recipe = Recipe()
        self.device = torch.device("cpu")
        self.learner = SimpleNamespace(version=4)
        self.channel = SimpleNamespace(send=lambda messages: None)
        self.weights = Manifest(
            version=0, tensors=tuple(TensorInfo(name=n, shape=(2,), dtype="float32") for n in ("a", "b", "c"))
        )
        self.gathered = 0

    def gather(self, keep: bool) -> Iterator[dict[str, Tensor]]:
        for tensor in self.weights.tensors:
            self.gathered += 1
            yield {tensor.name: torch.ones(tensor.shape)}


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedRank:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    source = tmp_path / "source"
    source.mkdir()
    return PlayedRank(source)


@pytest.fixture
def leader(rank: PlayedRank, tmp_path: Path) -> Leader:
    return Leader(rank, tmp_path)  # type: ignore[arg-type]


def test_a_full_disk_is_refused_only_after_the_gathering_has_run_to_its_end(
    leader: Leader, rank: PlayedRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks gather with it: to stop in the middle would leave them in a collective for ever."""

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(Refused, match=r"cannot write weights to .*out: .*No space left on device; make room"):
        leader.publish(PublishReq(version=4, transport="disk", path=str(tmp_path / "out")))
    assert rank.gathered == 3
    assert not (tmp_path / "out").exists()


@pytest.fixture
def failing(leader: Leader, rank: PlayedRank, tmp_path: Path) -> Callable[[Exception], str]:
    """Trains a batch in which the learner raises; what the controller is told."""

    def train(error: Exception) -> str:
        def step(work: Any) -> dict[str, float]:
            raise error

        rank.train = step
        rank.vocabulary, rank.hidden = 64, 32
        with pytest.raises((Refused, StepBroken)) as caught:
            leader.train_step(train_request(make_batch(4, seed=0), [1.0] * 16))
        assert isinstance(caught.value, StepBroken) == isinstance(error, StepBroken)
        return str(caught.value)

    return train


@pytest.mark.parametrize("kind", [BadBatch, StepBroken])
def test_the_batch_of_a_step_that_went_wrong_is_kept(
    failing: Callable[[Exception], str], tmp_path: Path, kind: type[Exception]
) -> None:
    assert failing(kind("step 4: bad")) == f"step 4: bad; the batch is kept in {tmp_path / 'bad-batch-4.safetensors'}"
    assert (tmp_path / "bad-batch-4.safetensors").is_file()


def test_a_batch_that_is_merely_refused_is_not_kept(failing: Callable[[Exception], str], tmp_path: Path) -> None:
    assert failing(StepRefused("sequence 2: too odd")) == "sequence 2: too odd"
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_batch_that_cannot_be_kept_is_no_new_error(
    failing: Callable[[Exception], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(dump, "save_file", full)
    assert failing(BadBatch("step 4: bad")) == "step 4: bad; the batch could not be kept (No space left on device)"


def test_only_the_current_version_is_published(leader: Leader, tmp_path: Path) -> None:
    for transport in ("disk", "stage"):
        with pytest.raises(Refused, match="version 3 cannot be published: the weights are version 4"):
            leader.publish(PublishReq(version=3, transport=transport, path=str(tmp_path / "v3")))


def test_relays_are_told_where_every_rank_offers_its_share(leader: Leader, rank: PlayedRank) -> None:
    rank.offer = lambda version: [Offered(address=f"h{n}:{version}") for n in (0, 1)]
    metrics = leader.publish(PublishReq(version=4, transport="relay"))
    assert metrics["bytes"] == 24 and metrics["seconds"] > 0
    assert leader._outlets == ["h0:4", "h1:4"]


def test_an_address_that_is_not_the_trainers_is_refused_with_the_key(leader: Leader, rank: PlayedRank) -> None:
    rank.offer = lambda version: [Offered(address="h0:4"), Offered(error="192.0.2.1: not mine")]
    with pytest.raises(Refused, match=r"relays at 192.0.2.1: not mine; set weights.address to where they reach"):
        leader.publish(PublishReq(version=4, transport="relay"))
    assert leader._outlets == []


def test_an_unknown_transport_is_refused_with_the_known_ones(leader: Leader) -> None:
    with pytest.raises(Refused, match="'pigeon' is not known; use disk, stage, hold, collective or relay"):
        leader.publish(PublishReq(version=4, transport="pigeon"))


def test_only_what_is_staged_and_held_is_broadcast_and_only_to_a_group(leader: Leader) -> None:
    hold, request = PublishReq(version=4, transport="hold"), PublishReq(version=4, transport="collective")
    with pytest.raises(Refused, match="version 4 cannot be broadcast: nothing is staged"):
        leader.hold(hold)
    leader.publish(PublishReq(version=4, transport="stage"))
    with pytest.raises(Refused, match="version 4 is not held to be broadcast"):
        leader.broadcast(request)
    leader.hold(hold)
    with pytest.raises(Refused, match="no update group"):
        leader.broadcast(request)
