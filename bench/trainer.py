"""Train step of the packed trainer against padding: CPU seconds and tokens per CPU second, one rank, one thread.

    python bench/trainer.py MODEL [--sequences 128] [--steps 3]

Sequences as in the shipped recipe's task (lengths 10 … 190, long tail). The peers are the same model in transformers,
forward and backward of the logprobs alone (no loss, no optimiser), sorted by length and padded in batches of 16, and
padded as one batch. Everything runs in one process, alternating, so that a busy machine hits all alike.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from array import array
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.core.types import Batch, Group, Task, Trajectory
from asyncrl.train import model
from asyncrl.train.client import train_request
from asyncrl.train.step import Learner
from asyncrl.train.work import plan_work


def make_batch(sequences: int, vocabulary: int) -> Batch:
    draw = random.Random(0)
    trajectories = []
    for i in range(sequences):
        digits = min(48, max(2, int(draw.lognormvariate(math.log(4), 0.9))))
        mask = array("b", [0] * (digits + 1) + [1] * (3 * digits + 3))
        trajectories.append(
            Trajectory(
                id=i,
                group_id=0,
                index=i,
                task_id="t",
                v_traj=0,
                tokens=array("i", [draw.randrange(vocabulary) for _ in mask]),
                loss_mask=mask,
                logprobs=array("f", [-2.0 if m else 0.0 for m in mask]),
                versions=array("i", [0 if m else -1 for m in mask]),
                turns=1,
                reward=0.0,
                finish_reason="stop",
            )
        )
    task = Task(id="t", data={})
    return Batch(step=0, groups=(Group(id=0, task=task, v_traj=0, trajectories=tuple(trajectories)),))


def packed(folder: str, batch: Batch, budget: int) -> Callable[[], None]:
    trainer, algorithm = TrainerConfig(micro_batch_tokens=budget), AlgorithmConfig()
    policy = model.load(folder, 1.0)
    config = policy.lm.config.get_text_config()
    model.shard(policy, init_device_mesh("cpu", (1,)), torch.float32, False)
    assert dist.group.WORLD is not None
    learner = Learner(policy, trainer, algorithm, torch.device("cpu"), dist.group.WORLD)
    request = train_request(batch, [1.0 if i % 2 else -1.0 for i in range(len(batch.trajectories))])
    (work,) = plan_work(
        request,
        ranks=1,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        trainer=trainer,
        algorithm=algorithm,
    )
    return lambda: learner.step(work) and None


def padded(folder: str, batch: Batch, size: int) -> Callable[[], None]:
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    rows = sorted((torch.tensor(t.tokens) for t in batch.trajectories), key=len)

    def run() -> None:
        for start in range(0, len(rows), size):
            chunk: Sequence[torch.Tensor] = rows[start : start + size]
            ids = torch.nn.utils.rnn.pad_sequence(list(chunk), batch_first=True)
            real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in chunk], batch_first=True)
            logs = lm(input_ids=ids, attention_mask=real).logits.log_softmax(-1)
            (logs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] * real[:, 1:]).sum().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    vocabulary = AutoModelForCausalLM.from_pretrained(args.model).config.get_text_config().vocab_size
    batch = make_batch(args.sequences, vocabulary)
    tokens = sum(len(t.tokens) for t in batch.trajectories)
    runs = {f"packed, {budget} tokens": packed(args.model, batch, budget) for budget in (1024, 4096, 8192)}
    runs["sorted, padded by 16"] = padded(args.model, batch, 16)
    runs["padded as one batch"] = padded(args.model, batch, args.sequences)
    seconds = dict.fromkeys(runs, 0.0)
    for number in range(args.steps + 1):
        for name, run in runs.items():
            started = time.process_time()
            run()
            seconds[name] += (time.process_time() - started) if number else 0.0  # the first is warm-up
    print(f"{tokens} tokens in {args.sequences} sequences, torch {torch.__version__}, 1 thread")
    for name, spent in seconds.items():
        print(f"{name:24} {spent / args.steps:7.3f} CPU s a step  {tokens * args.steps / spent:9.0f} tokens/CPU s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
