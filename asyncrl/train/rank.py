"""What every rank of the trainer has, and what ranks other than 0 do: follow rank 0, message by message."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from asyncrl.checksum import sum_of_words
from asyncrl.config import Recipe, RecipeError
from asyncrl.core.types import Record
from asyncrl.loading import load_own
from asyncrl.train import effort, lora, model
from asyncrl.train.channel import Channel, all_gather
from asyncrl.train.checkpoint import Checkpoints
from asyncrl.train.loss import LOSSES, check_loss
from asyncrl.train.model import Critic, ModelError, Policy
from asyncrl.train.share import Share
from asyncrl.train.step import Learner, StepBroken
from asyncrl.train.work import Part, StepRefused, Work

T = TypeVar("T")


class Train(Record, frozen=True, kw_only=True, tag=True):
    """To a rank: train this share of the batch."""

    work: Work


class Begin(Record, frozen=True, kw_only=True, tag=True):
    """To a rank: run the passes of this part of a batch that is not complete."""

    part: Part


class Gather(Record, frozen=True, kw_only=True, tag=True):
    """To a rank: take part in gathering the weights."""


class Offer(Record, frozen=True, kw_only=True, tag=True):
    """To a rank: offer its share of the weights to relays."""

    version: int


class Save(Record, frozen=True, kw_only=True, tag=True):
    """To a rank: begin to write its part of a checkpoint into ``folder``."""

    folder: str


class Stop(Record, frozen=True, kw_only=True, tag=True):
    """To a rank: end."""


class Offered(Record, frozen=True, kw_only=True):
    """Where relays reach a rank (``host:port``), or the line that says why they cannot."""

    address: str = ""
    error: str = ""


class Rank:
    """What every rank has: its shard, its learner, and its end of the channel. ``address`` is where relays reach it, if
    they show the ``token``."""

    def __init__(
        self, recipe: Recipe, folder: str, device: torch.device, address: str = "127.0.0.1", token: str = ""
    ) -> None:
        """Raises ``ModelError`` or ``RecipeError``."""
        self.recipe = recipe
        self._address = address
        self._token = token
        self._share: Share | None = None
        self._offered: list[Offered] = []
        self.folder = folder
        self.device = device
        self.dtype = getattr(torch, recipe.model.dtype)
        self.channel = Channel()
        algorithm = recipe.algorithm
        if recipe.trainer.offload != "none" and device.type != "cuda":
            raise RecipeError("trainer.offload: needs a GPU; on a CPU everything is in host memory anyway, use none")
        loss = load_own(algorithm.loss, "algorithm.loss") or LOSSES[algorithm.loss]
        check_loss(loss, algorithm)
        policy = model.load(folder, recipe.rollout.temperature or 1.0)
        self.weights = model.manifest(policy, 0, self.dtype)
        self.vocabulary = policy.vocabulary
        self.hidden: int = policy.lm.config.get_text_config().hidden_size
        self.parameters = sum(p.numel() for p in policy.parameters())
        if recipe.trainer.lora_rank:
            lora.inject(policy.lm, recipe.trainer, self.dtype, recipe.seed)
            policy.lora_scale = recipe.trainer.lora_alpha / recipe.trainer.lora_rank
        critic = None
        if algorithm.uses_critic and algorithm.critic == "value_head":
            policy.add_value_head()
        elif algorithm.uses_critic:
            path = algorithm.critic_path
            key = "algorithm.critic_path" if path else "model.path"
            judge = model.load(path or folder, 1.0, key, headless=True)
            if judge.vocabulary < self.vocabulary:
                raise self._other_vocabulary(key, path, judge.vocabulary)
            critic = Critic(judge.lm)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        model.shard(policy, mesh, self.dtype, recipe.trainer.activation_checkpointing)
        self._attend(policy)
        if critic is not None:
            model.shard(critic, mesh, self.dtype, recipe.trainer.activation_checkpointing)
            self._attend(critic)
        reference = None
        if algorithm.kl_coef:
            reference = self._reference(algorithm.reference or recipe.model.path or folder)
            model.shard(reference, mesh, self.dtype, False)
            self._attend(reference)
        self.learner = Learner(
            policy, recipe.trainer, algorithm, device, self.channel.group, loss=loss, reference=reference, critic=critic
        )
        self.checkpoints = Checkpoints(self.learner, recipe, Path(folder))
        self._peak = effort.peak_rate(device, self.dtype)
        self._idle = 0.0
        self.checksum = 0
        """Of the weights that the last step made."""

    def _attend(self, trunk: Policy | Critic) -> None:
        trainer = self.recipe.trainer
        model.attend(trunk, trainer.attention, trainer.sequence_parallel, self.device, self.dtype)
        if trainer.compile:
            model.compile_layers(trunk)

    def _reference(self, folder: str) -> Policy:
        """The frozen model of the KL term: no gradients, and no master weights of a higher precision."""
        reference = model.load(folder, self.recipe.rollout.temperature or 1.0)
        if reference.vocabulary != self.vocabulary:
            raise self._other_vocabulary("algorithm.reference", folder, reference.vocabulary)
        for parameter in reference.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(self.dtype)
        return reference

    def _other_vocabulary(self, key: str, folder: str, size: int) -> ModelError:
        return ModelError(
            f"{key}: {folder} has a vocabulary of {size} and the policy one of {self.vocabulary}; use a model with the "
            "policy's tokenizer"
        )

    def train(self, work: Work) -> dict[str, float]:
        """One step; see ``Learner.step`` and ``effort.over_ranks``."""
        metrics = self.learner.step(work)
        models = filter(None, (self.learner.policy, self.learner.critic))
        trained = (p for one in models for p in one.parameters() if p.requires_grad)
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in trained]
        total = torch.stack([sum_of_words(shard) for shard in shards]).sum().cpu()
        dist.all_reduce(total, group=self.channel.group)
        self.checksum = int(total) % 2**64
        metrics |= effort.over_ranks(
            self.learner.effort,
            idle=self._idle,
            memory=effort.peak_memory(self.device),
            peak=self._peak,
            group=self.channel.group,
        )
        self._idle = 0.0
        return metrics

    def commands(self, source: Iterable[T]) -> Iterator[T]:
        """What ``source`` gives; the time until it gives the next is that of an idle rank."""
        waiting = iter(source)
        while True:
            started = time.perf_counter()
            command = next(waiting, None)
            self._idle += time.perf_counter() - started
            if command is None:
                return
            yield command

    def gather(self, keep: bool) -> Iterator[dict[str, Tensor]]:
        limit = self.recipe.weights.bucket_mb * 2**20
        buckets = model.gather(self.learner.policy, self.weights, self.dtype, limit, keep)
        for number, bucket in enumerate(buckets, 1):
            self.learner.doing = f"gathers the weights: bucket {number}"
            yield bucket
        self.learner.doing = ""

    def offer(self, version: int) -> list[Offered]:
        """Each rank copies its share of the weights into memory from which relays take it; where, by rank. With an
        error among them nothing is offered. A collective."""
        if self._share is None:
            said = Offered()
            try:
                number, ranks = dist.get_rank(), dist.get_world_size()
                share = Share(self.learner.policy, self.weights, number, ranks, self._address, self._token)
                said = Offered(address=share.address)
            except OSError as error:
                said = Offered(error=f"{self._address}: {error.strerror or error}")
            self._offered = all_gather(said, Offered, self.channel.group)
            if any(one.error for one in self._offered):
                if said.address:
                    share.close()
                return self._offered
            self._share = share
        self.learner.doing = "offers the weights"
        self._share.offer(version)
        dist.barrier(self.channel.group)
        self.learner.doing = ""
        return self._offered

    def follow(self) -> None:
        """Ranks other than 0: do what rank 0 says, until it says stop."""
        for message in self.commands(iter(self.channel.receive, None)):
            match msgspec.msgpack.decode(message, type=Train | Begin | Gather | Offer | Save | Stop):
                case Train(work=work):
                    with suppress(StepRefused, StepBroken):  # rank 0 reports it, and ends the job
                        self.train(work)
                case Begin(part=part):
                    self.learner.begin(part)
                case Gather():
                    for _ in self.gather(keep=False):
                        pass
                case Offer(version=version):
                    self.offer(version)
                case Save(folder=folder):
                    self.checkpoints.begin(Path(folder))
                case Stop():
                    return
