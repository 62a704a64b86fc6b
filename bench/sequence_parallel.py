"""One long row on one rank, and shared by two (``trainer.sequence_parallel``): memory, speed, and the same gradient.

    python bench/sequence_parallel.py --json bench/results/sequence_parallel.json

A tiny Qwen3 of random weights in float32, one sequence of ``--tokens``, every second of which is trained; gloo, one
thread a rank, activation checkpointing off. Measured is the forward and backward pass (``Learner.begin``), a process
each; seconds are a rank's CPU seconds, and memory is what a rank holds at its peak beyond what it held before. Then the
step is finished: its loss is compared, and before that the whole gradient.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from trainer import SHAPES, build_policy, machine, most_resident, resident


def row(args: argparse.Namespace) -> tuple[dict[str, float], Any]:
    """On each of the ranks that share it: what was measured, and the whole gradient."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from asyncrl.config import AlgorithmConfig, TrainerConfig
    from asyncrl.train import attention, model
    from asyncrl.train.step import Learner
    from asyncrl.train.work import plan_part, plan_work
    from asyncrl.wire import FeedReq, TrainReq, TrainSequence

    rank, ranks, cpu, shape = dist.get_rank(), dist.get_world_size(), torch.device("cpu"), SHAPES[args.shape]
    trainer = TrainerConfig(micro_batch_tokens=args.tokens // ranks, sequence_parallel=ranks, ranks=ranks)
    policy = build_policy(args)
    policy.lm.set_attn_implementation(attention.NAME)
    model.shard(policy, init_device_mesh("cpu", (ranks,)), torch.float32, activation_checkpointing=False)
    model.attend(policy, "blocks", ranks, cpu, torch.float32)
    learner = Learner(policy, trainer, AlgorithmConfig(), cpu, dist.new_group(backend="gloo"))
    count = args.tokens + 1  # the last one is only ever a target
    sequence = TrainSequence(
        tokens=array("i", (i * 7919 % shape["vocab_size"] for i in range(count))).tobytes(),
        loss_mask=bytes(i % 2 for i in range(count - 1)) + b"\x01",
        logprobs=array("f", [-5.0]).tobytes() * count,
        versions=array("i", [0]).tobytes() * count,
        advantage=1.0,
    )
    options: dict[str, Any] = {
        "ranks": ranks,
        "vocabulary": shape["vocab_size"],
        "hidden": shape["hidden_size"],
        "trainer": trainer,
        "algorithm": AlgorithmConfig(),
    }
    parts = plan_part(FeedReq(step=0, start=0, sequences=[sequence]), [sequence], first=True, **options)
    assert parts is not None
    before, started, wall = resident(), time.process_time(), time.perf_counter()
    learner.begin(parts[rank])
    found = {
        "cpu_s": time.process_time() - started,
        "wall_s": time.perf_counter() - wall,
        "memory_mb": (most_resident() - before) / 2**20,
    }
    gradient = torch.cat([p.grad.full_tensor().flatten() for p in policy.parameters()])  # type: ignore[union-attr]
    works = plan_work(TrainReq(step=0, sequences=[sequence]), done=[0], **options)
    found["loss"] = learner.step(works[rank])["loss"]
    return found, gradient


def on_rank(store: str, rank: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found, gradient = row(args)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.save(gradient, Path(folder) / f"{rank}.gradient")
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, args: argparse.Namespace) -> tuple[list[dict[str, float]], Any]:
    """What each rank found, and the gradient."""
    import torch

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            context.Process(target=on_rank, args=(f"{folder}/store", rank, ranks, args, folder))
            for rank in range(ranks)
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        if any(job.exitcode for job in jobs):
            raise SystemExit(f"a rank of {ranks} failed")
        return (
            [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)],
            torch.load(Path(folder) / "0.gradient"),
        )


def compare(args: argparse.Namespace) -> dict[str, Any]:
    (alone,), gradient = measure(1, args)
    shared, other = measure(2, args)
    slower = max(rank["cpu_s"] for rank in shared)
    return {
        "shape": args.shape,
        "tokens": args.tokens,
        "machine": machine("cpu"),
        "alone": alone,
        "shared": shared,
        "memory, shared over alone": max(rank["memory_mb"] for rank in shared) / alone["memory_mb"],
        "tokens a CPU second of the slower rank, shared over alone": alone["cpu_s"] / slower,
        "loss differs by": abs(shared[0]["loss"] / alone["loss"] - 1),
        "gradient differs by, of its norm": float((other - gradient).norm() / gradient.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = compare(args)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
