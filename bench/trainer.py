"""One train step of asyncrl's trainer: packed against padded, streamed against not, and against TRL's GRPO trainer.

    python3.11 -m venv TRL && TRL/bin/pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0
    python bench/trainer.py --trl TRL/bin/python --json bench/results/trainer.json

One rank, one thread, float32, a small Qwen3 of random weights, the same for all by its seed; groups of 8 sequences,
prompts of 32 to 96 tokens, completions with a long tail. Everyone computes the same update from the same tokens, engine
logprobs and advantages: PPO's clipped loss as a mean over tokens, entropy for the log, gradient clipped to norm 1,
AdamW. That it is the same is checked by the loss. A process each, a step to warm up, then so many measured; the
processes take turns, and what is compared is CPU seconds, which other work on the machine changes least.

* packed: ``Learner.step``, all from the dealt batch to the new weights.
* streamed: the same step, 7 of 8 groups of which were fed in four parts before; "early" is the share of the seconds
  that had gone by when the batch was complete. (What that is worth in a run: bench/streaming.py.)
* padded: the plainest step with transformers, in micro-batches of 8 as they come, or sorted by length; all logits.
* TRL: ``GRPOTrainer.train`` with its own loop, micro-batches of 8 (its default) and its fused vocabulary head. Only
  generation and reward are replaced: by padding the given batch as they would. Measured from ``on_step_begin`` to
  ``on_step_end``.

Memory is what a step holds at its peak beyond what the process held before the first one (weights and imports).

On a GPU (not run yet; seconds are the wall's; MFU is against the chip's own matrix products in the same precision):

    python bench/trainer.py --device cuda --shape qwen3-0.6b --dtype bfloat16 --sequences 16 --shortest 8192 \\
        --longest 32768 --budget 32768 --only packed,streamed --json bench/results/trainer_gpu.json
    python bench/trainer.py --device cuda --shape qwen3-8b --offload …     (the same otherwise)
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.train.model import Policy
    from asyncrl.train.step import Learner
    from asyncrl.wire import TrainSequence

GROUP = 8
ROUNDS = 2
LEARNING_RATE = 1e-5


def qwen3(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": hidden < 4096,
    }


SHAPES = {
    "tiny": qwen3(2, 32, 64, 4, 2, 8, 128),
    "small": qwen3(4, 128, 384, 4, 2, 32, 2048),
    "qwen3-0.6b": qwen3(28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": qwen3(28, 2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": qwen3(36, 2560, 9728, 32, 8, 128, 151936),
    "qwen3-8b": qwen3(36, 4096, 12288, 32, 8, 128, 151936),
}


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Sequences: token ids, engine logprobs near those of random weights, and an advantage, of mean 0 in a group."""
    draw = random.Random(0)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    rows = []
    for number in range(args.sequences):
        if args.longest:
            prompt, completion = 256, draw.randint(args.shortest, args.longest) - 256
        else:
            if number % GROUP == 0:
                group_prompt = draw.randint(32, 96)
            prompt = group_prompt
            completion = min(512, max(4, int(draw.lognormvariate(math.log(96), 0.8))))
        rows.append(
            {
                "prompt": [draw.randrange(2, vocabulary) for _ in range(prompt)],
                "completion": [draw.randrange(2, vocabulary) for _ in range(completion)],
                "logprobs": [draw.gauss(-math.log(vocabulary), 0.1) for _ in range(completion)],
                "advantage": (-1.0) ** number * (1 + number // GROUP % 3),
            }
        )
    return rows


# --- the peers, each in a process of its own --------------------------------------------------------------------------


def train_sequences(rows: list[dict[str, Any]]) -> list[TrainSequence]:
    from asyncrl.wire import TrainSequence

    return [
        TrainSequence(
            tokens=array("i", row["prompt"] + row["completion"]).tobytes(),
            loss_mask=bytes(len(row["prompt"])) + b"\x01" * len(row["completion"]),
            logprobs=array("f", [0.0] * len(row["prompt"]) + row["logprobs"]).tobytes(),
            versions=array("i", [-1] * len(row["prompt"]) + [0] * len(row["completion"])).tobytes(),
            advantage=row["advantage"],
        )
        for row in rows
    ]


def build_policy(args: argparse.Namespace) -> Policy:
    """Random weights, the same wherever they are made, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from asyncrl.train.model import Policy

    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES[args.shape]), dtype=torch.float32)
    return Policy(lm.eval(), 1.0)


def build_learner(args: argparse.Namespace) -> tuple[Learner, int]:
    """The learner of one rank, and its model's hidden size."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from asyncrl.config import AlgorithmConfig, TrainerConfig
    from asyncrl.train import attention, model
    from asyncrl.train.step import Learner

    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = TrainerConfig(
        learning_rate=LEARNING_RATE,
        micro_batch_tokens=args.budget,
        activation_checkpointing=args.device == "cuda",
        offload="optimizer" if args.offload else "none",
    )
    policy = build_policy(args)
    policy.lm.set_attn_implementation(attention.NAME)
    model.shard(policy.to(device), init_device_mesh(args.device, (1,)), dtype, trainer.activation_checkpointing)
    model.attend(policy, "auto", 1, device, dtype)
    control = dist.new_group(backend="gloo")
    return Learner(policy, trainer, AlgorithmConfig(), device, control), SHAPES[args.shape]["hidden_size"]


def asyncrl_step(args: argparse.Namespace, parts: int) -> Callable[[], dict[str, float]]:
    """A step, of which 7 of 8 groups are fed before in ``parts``, if there are any."""
    import torch

    from asyncrl.config import AlgorithmConfig
    from asyncrl.train.effort import matmul_rate
    from asyncrl.train.work import plan_part, plan_work
    from asyncrl.wire import FeedReq, TrainReq

    learner, hidden = build_learner(args)
    sequences = train_sequences(make_rows(args))
    trainer, vocabulary = learner.trainer, SHAPES[args.shape]["vocab_size"]
    options: dict[str, Any] = {
        "ranks": 1,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "trainer": trainer,
        "algorithm": AlgorithmConfig(),
    }
    early = len(sequences) * 7 // 8 if parts else 0
    cuts = [early * part // parts for part in range(parts + 1)] if parts else []
    rate = matmul_rate(torch.device(args.device), getattr(torch, args.dtype))

    def step() -> dict[str, float]:
        number, done, clock = learner.version, 0, time.perf_counter if args.device == "cuda" else time.process_time
        started = clock()
        for end in cuts[1:]:
            request = FeedReq(step=number, start=0, sequences=sequences[:end])
            part = plan_part(request, sequences[done:end], first=done == 0, **options)
            if part is not None:
                learner.begin(part[0])
                done = end
        fed = clock() - started
        (work,) = plan_work(TrainReq(step=number, sequences=sequences), done=range(done), **options)
        metrics = learner.step(work)
        whole = clock() - started
        if args.device == "cuda":
            torch.cuda.synchronize()
        operations = math.fsum(learner.effort.passes)
        said = {"loss": metrics["loss"], "mfu": operations / ((clock() - started) * rate)}
        return said | {"early": fed / whole} if parts else said

    return step


def padded_step(args: argparse.Namespace, sort: bool) -> Callable[[], dict[str, float]]:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    device = torch.device(args.device)
    lm = build_policy(args).lm.to(device)
    lm.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rows = make_rows(args)
    if sort:
        rows.sort(key=lambda row: len(row["prompt"]) + len(row["completion"]))
    total = sum(len(row["completion"]) for row in rows)

    def column(chunk: list[dict[str, Any]], make: Callable[[dict[str, Any]], list[float]], dtype: Any) -> Any:
        return pad_sequence([torch.tensor(make(row), dtype=dtype) for row in chunk], batch_first=True).to(device)

    def step() -> dict[str, float]:
        whole = 0.0
        for start in range(0, len(rows), GROUP):
            chunk = rows[start : start + GROUP]
            ids = column(chunk, lambda row: row["prompt"] + row["completion"], torch.long)
            real = column(chunk, lambda row: [1] * (len(row["prompt"]) + len(row["completion"])), torch.long)
            mask = column(chunk, lambda row: [0] * len(row["prompt"]) + [1] * len(row["completion"]), torch.float32)
            old = column(chunk, lambda row: [0.0] * len(row["prompt"]) + row["logprobs"], torch.float32)[:, 1:]
            advantages = torch.tensor([[row["advantage"]] for row in chunk], device=device)
            with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
                logs = lm(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            with torch.no_grad():
                -(logs.exp() * logs).sum(-1)  # the entropy
            ratio = (logs.gather(-1, ids[:, 1:, None])[..., 0] - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -(gain * mask[:, 1:]).sum() / total
            loss.backward()
            whole += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return {"loss": whole}

    return step


PEERS: dict[str, Callable[[argparse.Namespace], Callable[[], dict[str, float]]]] = {
    "packed": lambda args: asyncrl_step(args, 0),
    "streamed": lambda args: asyncrl_step(args, 4),
    "padded": lambda args: padded_step(args, sort=False),
    "padded, sorted": lambda args: padded_step(args, sort=True),
}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """In this process: ``loss`` of the first step, and of each later one its CPU ``seconds`` (the wall's on a GPU);
    ``memory`` in bytes; and what else the peer says of its last step."""
    import torch

    torch.set_num_threads(1)
    step = PEERS[name](args)
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident()
    first = said = step()
    seconds = []
    for _ in range(args.steps):
        started = clock()
        said = step()
        seconds.append(clock() - started)
    held = torch.cuda.max_memory_allocated() if args.device == "cuda" else most_resident()
    return said | {"loss": first["loss"], "seconds": seconds, "memory": held - before}


def resident() -> int:
    """Bytes that the process holds now; begins to look for the most anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return most_resident()


def most_resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure_trl(python: str, args: argparse.Namespace) -> dict[str, Any]:
    script = Path(__file__).with_name("trainer_trl.py")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.json"
        given = {"config": SHAPES[args.shape], "rows": make_rows(args), "steps": args.steps, "group": GROUP}
        data.write_text(json.dumps(given | {"learning_rate": LEARNING_RATE}))
        done = subprocess.run(
            [python, str(script), str(data)], stdout=subprocess.PIPE, text=True, check=True, cwd=folder
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- all of them ------------------------------------------------------------------------------------------------------


def rounds(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    names = args.only.split(",") if args.only else [*PEERS, *(["TRL"] if args.trl else [])]
    context = multiprocessing.get_context("spawn")
    for _ in range(args.rounds):
        for name in names:
            if name == "TRL":
                yield name, measure_trl(args.trl, args)
            else:
                with ProcessPoolExecutor(1, mp_context=context) as pool:
                    yield name, pool.submit(measure, name, args).result()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    rows = make_rows(args)
    lengths = [len(row["prompt"]) + len(row["completion"]) for row in rows]
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, result in rounds(args):
        runs.setdefault(name, []).append(result)
    shown = ("early", "mfu") if args.device == "cuda" else ("early",)  # a CPU's rate depends on what else it does
    peers = {}
    for name, results in runs.items():
        seconds = [s for result in results for s in result["seconds"]]
        peers[name] = {
            "seconds": statistics.median(seconds),
            "all_seconds": seconds,
            "tokens_per_second": sum(lengths) / statistics.median(seconds),
            "memory_mb": max(result["memory"] for result in results) / 2**20,
            "loss": results[0]["loss"],
        } | {key: statistics.median(r[key] for r in results) for key in shown if key in results[0]}
    losses = [peer["loss"] for peer in peers.values()]
    if args.dtype == "float32" and not math.isclose(min(losses), max(losses), rel_tol=1e-3, abs_tol=1e-5):
        raise SystemExit(f"the peers do not compute the same: losses {losses}")
    return {
        "shape": args.shape,
        "sequences": len(rows),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "device": args.device,
        "dtype": args.dtype,
        "budget": args.budget,
        "seconds are": "wall" if args.device == "cuda" else "CPU, one thread",
        "machine": machine(args.device),
        "peers": peers,
    }


def machine(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    name = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition(":")[2].splitlines()[0].strip()
    return f"{os.cpu_count()} cores of an {name}, no GPU"


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=512, help="with --longest: the shortest sequence, tokens")
    parser.add_argument("--longest", type=int, default=0, help="lengths are even between --shortest and this")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a packed micro-batch")
    parser.add_argument("--offload", action="store_true", help="the optimiser's moments in host memory (GPU)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", help="peers, by commas: " + ", ".join([*PEERS, "TRL"]))
    parser.add_argument("--trl", help="the Python that has TRL")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(given)


def main() -> None:
    args = arguments(sys.argv[1:])
    result = compare(args)
    print(f"{result['tokens']} tokens in {result['sequences']} sequences; {result['machine']}")
    for name, peer in result["peers"].items():
        more = "".join(f"  {key} {100 * peer[key]:.0f} %" for key in ("early", "mfu") if peer.get(key))
        print(
            f"{name:16} {peer['seconds']:8.3f} s a step {peer['tokens_per_second']:10.0f} tokens/s "
            f"{peer['memory_mb']:8.0f} MB{more}"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
