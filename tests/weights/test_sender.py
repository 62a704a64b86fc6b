"""What the sender asks of NCCL, whose part is played, so no GPU is needed. Gloo is tried with servers, in contract/."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.weights import sender
from asyncrl.weights.sender import UpdateGroup


class PlayedWork:
    """Done after so many looks; never, if there are none."""

    def __init__(self, looks: int, failure: RuntimeError | None) -> None:
        self.looks = looks
        self.failure = failure

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks == 0

    def wait(self) -> None:
        assert self.looks == 0, "it would return at once, with the tensor still to be sent"
        if self.failure is not None:
            raise self.failure


class PlayedNccl:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 3
        self.failure: RuntimeError | None = None
        self.log: list[str] = []
        self.stream = ""
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"own of {device}")
        monkeypatch.setattr(torch.cuda, "stream", self._within)
        monkeypatch.setattr(sender.dist, "broadcast", self._broadcast)
        monkeypatch.setattr(sender.c10d, "_abort_process_group", lambda group: self.log.append(f"abort {group}"))
        sender._stream.cache_clear()

    @contextmanager
    def _within(self, stream: str) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = ""

    def _broadcast(self, tensor: Tensor, **_: Any) -> PlayedWork:
        self.log.append(f"send {tensor.tolist()} on {self.stream}")
        return PlayedWork(self.looks, self.failure)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedNccl]:
    yield PlayedNccl(monkeypatch)
    sender._stream.cache_clear()


@pytest.fixture
def group() -> UpdateGroup:
    group = UpdateGroup("127.0.0.1", 2, "update", "nccl")
    group._group = "the group"  # type: ignore[assignment]
    return group


def send(group: UpdateGroup) -> None:
    group.broadcast([torch.ones(1), torch.zeros(2)], torch.device("cpu"))


def test_nccl_sends_on_a_stream_of_its_own_and_the_sender_waits_until_it_has(
    nccl: PlayedNccl, group: UpdateGroup
) -> None:
    send(group)
    assert nccl.log == ["send [1.0] on own of cpu", "send [0.0, 0.0] on own of cpu"]


def test_a_server_that_does_not_receive_is_given_up_before_nccl_ends_the_process(
    nccl: PlayedNccl, group: UpdateGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sender.BROADCAST_TIMEOUT.total_seconds() > sender.NCCL_BROADCAST_S
    monkeypatch.setattr(sender, "NCCL_BROADCAST_S", 0.02)
    nccl.looks = 0
    with pytest.raises(RuntimeError, match=r"a server did not receive within 0\.02 s"):
        send(group)
    group.close()
    assert nccl.log[-1] == "abort the group"


def test_what_went_wrong_in_nccl_is_raised(nccl: PlayedNccl, group: UpdateGroup) -> None:
    nccl.failure = RuntimeError("NCCL error: remote process exited")
    with pytest.raises(RuntimeError, match="remote process exited"):
        send(group)
