"""Rank 0: carries the controller's commands out, with the other ranks where the model is needed.

main thread ── channel ──▶ ranks 1…           feed, train_step, publish (disk, stage, relay), save (copies, begins to
                                              write)
sender thread ── update group ──▶ servers     open_group, join_group, publish (hold, collective): may run beside a step
checkpoint thread ── gloo ──▶ ranks 1…        what save began: may run beside both
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from asyncrl.checksum import checksum
from asyncrl.train import model
from asyncrl.train.checkpoint import WriteFailed
from asyncrl.train.description import PREFIX, STATE
from asyncrl.train.dump import save_batch
from asyncrl.train.export import FolderWriter, drop_other_versions
from asyncrl.train.rank import Begin, Gather, Offer, Rank, Save, Stop, Train
from asyncrl.train.server import Refused
from asyncrl.train.statistics import advantage_moments
from asyncrl.train.step import BadBatch, StepBroken
from asyncrl.train.work import StepRefused, plan_part, plan_work, token_advantages
from asyncrl.weights.sender import UpdateGroup
from asyncrl.wire import FeedReq, OpenGroupReq, PublishReq, SaveReq, TrainerInfo, TrainReq, TrainSequence

REACHED = "set weights.address to where they reach the trainer"


class Fed:
    """The sequences that were fed for the next step, in that order; the first ``passed`` are in the gradient."""

    def __init__(self) -> None:
        self.sequences: list[TrainSequence] = []
        self.passed = 0
        self.seconds = 0.0


class Leader:
    """``server.Commands`` over one rank. Owns the staged weights and the update group. Bad batches are left in
    ``run_dir``."""

    def __init__(self, rank: Rank, run_dir: Path) -> None:
        self._rank = rank
        self._run_dir = run_dir
        self._fed = Fed()
        self._staged: tuple[int, dict[str, Tensor]] = (-1, {})
        self._held = self._staged
        """Of what was staged, what the sender is about to send, or sends."""
        self._checksums: list[int] = []
        """Of the staged tensors."""
        self._group: UpdateGroup | None = None
        self._outlets: list[str] = []
        self._checkpoint = Path()
        """The one that was begun last."""

    def info(self) -> TrainerInfo:
        tensors = self._rank.weights.tensors
        return TrainerInfo(
            version=self._rank.learner.version,
            checksum=self._rank.checksum,
            world_size=dist.get_world_size(),
            backend=dist.get_backend(),
            parameters=self._rank.parameters,
            names=[t.name for t in tensors],
            dtypes=[t.dtype for t in tensors],
            shapes=[list(t.shape) for t in tensors],
            checksums=self._checksums,
            outlets=self._outlets,
            doing=self._rank.learner.doing,
        )

    # --- main thread

    def feed(self, request: FeedReq) -> dict[str, float]:
        """Take what will be in the next batch, and run its passes once it fills a micro-batch on every rank."""
        rank = self._rank
        self._check_step(request.step)
        if request.start == 0:
            self._fed = Fed()
        fed = self._fed
        if request.start != len(fed.sequences):
            raise Refused(
                f"step {request.step}: {len(fed.sequences)} sequences were fed, but the next was sent as number "
                f"{request.start}; begin anew with 0"
            )
        started = time.perf_counter()
        fed.sequences += request.sequences
        try:
            parts = plan_part(
                request,
                fed.sequences[fed.passed :],
                first=fed.passed == 0,
                ranks=dist.get_world_size(),
                vocabulary=rank.vocabulary,
                hidden=rank.hidden,
                trainer=rank.recipe.trainer,
                algorithm=rank.recipe.algorithm,
            )
        except StepRefused as error:
            self._fed = Fed()
            raise Refused(str(error)) from error
        if parts is None:
            return {"micro_batches": 0.0}
        rank.channel.send([msgspec.msgpack.encode(Begin(part=part)) for part in parts])
        rank.learner.begin(parts[0])
        fed.passed = len(fed.sequences)
        fed.seconds += time.perf_counter() - started
        return {"micro_batches": float(len(parts[0].micro_batches))}

    def train_step(self, request: TrainReq) -> dict[str, float]:
        rank = self._rank
        self._check_step(request.step)
        started = time.perf_counter()
        fed, self._fed = self._fed, Fed()
        if not request.fed:
            fed = Fed()  # what was fed was of a controller that has gone
        request = _assembled(request, fed)
        try:
            works = plan_work(
                request,
                ranks=dist.get_world_size(),
                vocabulary=rank.vocabulary,
                hidden=rank.hidden,
                trainer=rank.recipe.trainer,
                algorithm=rank.recipe.algorithm,
                done=request.fed[: fed.passed],
            )
            rank.channel.send([msgspec.msgpack.encode(Train(work=work)) for work in works])
            metrics = rank.train(works[0])
        except BadBatch as error:
            raise Refused(f"{error}{self._kept(request, error)}") from error
        except StepBroken as error:
            raise StepBroken(f"{error}{self._kept(request, error)}") from error
        except StepRefused as error:
            raise Refused(str(error)) from error
        seconds = time.perf_counter() - started + fed.seconds
        tokens = sum(len(s.tokens) // 4 for s in request.sequences)
        if not rank.recipe.algorithm.uses_critic:
            metrics |= advantage_moments([token_advantages(s) for s in request.sequences])
        metrics |= {
            "seconds": seconds,
            "tokens": float(tokens),
            "sequences": float(len(request.sequences)),
            "tokens_per_second": tokens / seconds,
        }
        if fed.passed:
            metrics |= {"streamed_sequences": float(fed.passed), "streamed_seconds": fed.seconds}
        return metrics

    def _check_step(self, step: int) -> None:
        if step != (version := self._rank.learner.version):
            raise Refused(f"step {step} cannot be trained: the weights are version {version}")

    def _kept(self, request: TrainReq, error: Exception) -> str:
        try:
            return f"; the batch is kept in {save_batch(self._run_dir, request, str(error))}"
        except (OSError, SafetensorError) as failure:
            return f"; the batch could not be kept ({failure})"

    def publish(self, request: PublishReq) -> dict[str, float]:
        version = self._rank.learner.version
        if request.version != version:
            raise Refused(f"version {request.version} cannot be published: the weights are version {version}")
        started = time.perf_counter()
        if request.transport == "disk":
            path = Path(request.path)
            self._write(path)
            drop_other_versions(path.parent, version)
        elif request.transport == "stage":
            self._stage(version)
        elif request.transport == "relay":
            self._offer(version)
        else:
            raise Refused(f"transport {request.transport!r} is not known; use disk, stage, hold, collective or relay")
        return {"seconds": time.perf_counter() - started, "bytes": float(self._rank.weights.nbytes)}

    def save(self, request: SaveReq) -> dict[str, float]:
        """Copy the state and have it written; the seconds are those that training stood still."""
        started = time.perf_counter()
        rank, version = self._rank, self._rank.learner.version
        rank.checkpoints.wait()
        self._checkpoint = target = Path(request.folder) / f"{PREFIX}{version}"
        weights = msgspec.structs.replace(rank.weights, version=version)
        limit = rank.recipe.weights.bucket_mb * 2**20
        with ExitStack() as stack:
            try:
                writer = stack.enter_context(FolderWriter(target, Path(rank.folder), weights, limit, durable=True))
            except OSError as error:
                raise Refused(self._unwritten(error)) from error
            state = writer.folder / STATE
            written = stack.pop_all()

        def export() -> None:
            parameters = rank.checkpoints.read_weights(state, rank.dtype)
            for bucket in model.in_buckets(rank.learner.policy, weights, limit, True, parameters):
                writer.write(bucket)

        self._tell(Save(folder=str(state)))
        rank.checkpoints.begin(state, export, written)
        return {"seconds": time.perf_counter() - started}

    def saved(self) -> None:
        """Any thread. Returns when what ``save`` began is on the disk."""
        try:
            self._rank.checkpoints.saved()
        except (OSError, SafetensorError, WriteFailed) as error:
            raise Refused(self._unwritten(error)) from error

    def _unwritten(self, error: Exception) -> str:
        return f"checkpoint {self._checkpoint} was not written: {error}; make room or choose another folder"

    def shutdown(self) -> None:
        """Finish what is being written, and release the other ranks."""
        self._rank.checkpoints.wait()
        self._tell(Stop())

    def _tell(self, command: Gather | Offer | Save | Stop) -> None:
        self._rank.channel.send([msgspec.msgpack.encode(command)] * dist.get_world_size())

    def _write(self, path: Path) -> None:
        weights = msgspec.structs.replace(self._rank.weights, version=self._rank.learner.version)
        limit = self._rank.recipe.weights.bucket_mb * 2**20
        try:
            with FolderWriter(path, Path(self._rank.folder), weights, limit) as writer:
                self._tell(Gather())
                failure: Exception | None = None
                # The gathering is a collective: it has to be run to its end even when nothing can be written.
                for bucket in self._rank.gather(keep=True):
                    try:
                        if failure is None:
                            writer.write(bucket)
                    except (OSError, SafetensorError) as error:
                        failure = error
                if failure is not None:
                    raise failure
        except (OSError, SafetensorError) as error:
            raise Refused(f"cannot write weights to {path}: {error}; make room or choose another folder") from error

    def _stage(self, version: int) -> None:
        """A whole copy in rank 0's host memory (pinned beside a GPU), so that it can be sent to any server at any time
        while the next step changes the parameters."""
        self._tell(Gather())
        pin = self._rank.device.type == "cuda"
        staged: dict[str, Tensor] = {}
        for bucket in self._rank.gather(keep=True):
            for name, tensor in bucket.items():
                staged[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin).copy_(tensor)
        self._staged = (version, staged)
        self._checksums = [checksum(staged[t.name]) for t in self._rank.weights.tensors]

    def _offer(self, version: int) -> None:
        self._tell(Offer(version=version))
        offered = self._rank.offer(version)
        for one in offered:
            if one.error:
                raise Refused(f"cannot listen for relays at {one.error}; {REACHED}")
        self._outlets = [one.address for one in offered]

    # --- sender thread

    def open_group(self, request: OpenGroupReq) -> dict[str, float]:
        self._leave_group()
        try:
            self._group = UpdateGroup(request.address, request.world_size, request.group_name, request.backend)
        except (RuntimeError, ValueError, OSError) as error:
            raise Refused(f"cannot listen for servers at {request.address}: {_first_line(error)}; {REACHED}") from error
        return {"port": float(self._group.port)}

    def join_group(self, _: None) -> dict[str, float]:
        if self._group is None:
            raise Refused("no update group: open one first")
        started = time.perf_counter()
        try:
            self._group.join()
        except (RuntimeError, ValueError) as error:
            self._leave_group()  # which closes the store, and so ends the wait of servers
            raise Refused(f"the update group was not formed: {_first_line(error)}") from error
        return {"seconds": time.perf_counter() - started}

    def hold(self, request: PublishReq) -> dict[str, float]:
        staged, tensors = self._staged
        if request.version != staged:
            found = f"version {staged} is staged" if tensors else "nothing is staged"
            raise Refused(f"version {request.version} cannot be broadcast: {found}")
        self._held = staged, tensors
        return {}

    def broadcast(self, request: PublishReq) -> dict[str, float]:
        version, (held, tensors) = request.version, self._held
        if version != held:
            self._leave_group()  # the servers wait for what will not come
            raise Refused(f"version {version} is not held to be broadcast")
        if self._group is None:
            raise Refused("no update group: open one first")
        started = time.perf_counter()
        try:
            for bucket in self._rank.weights.buckets(self._rank.recipe.weights.bucket_mb * 2**20):
                # NCCL sends from the GPU, where one bucket at a time has room.
                self._group.broadcast([tensors[t.name] for t in bucket], self._rank.device)
        except (RuntimeError, ValueError) as error:
            # The other members wait for what will not come; a closed connection tells them so.
            self._leave_group()
            raise Refused(f"the broadcast of version {version} failed: {_first_line(error)}") from error
        finally:
            self._held = (-1, {})
        return {"seconds": time.perf_counter() - started, "bytes": float(self._rank.weights.nbytes)}

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):  # it may be broken already
                group.close()


def _assembled(request: TrainReq, fed: Fed) -> TrainReq:
    """The request with the whole batch. Raises ``Refused``."""
    places = dict(zip(request.fed, fed.sequences, strict=False))
    count = len(request.sequences) + len(request.fed)
    if not len(places) == len(request.fed) == len(fed.sequences) or not all(0 <= i < count for i in places):
        raise Refused(
            f"step {request.step}: {len(fed.sequences)} sequences were fed, but the batch has places for "
            f"{len(request.fed)} of them; send the batch whole"
        )
    others = iter(request.sequences)
    sequences = [places[i] if i in places else next(others) for i in range(count)]
    return msgspec.structs.replace(request, sequences=sequences)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
