"""TRL's side of ``trainer.py``, run by the Python that has TRL: ``trainer_trl.py DATA``; a line of JSON is the result.

Everything is ``GRPOTrainer``'s but generation and reward, in whose place the given batch is padded as they pad.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.before = self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.before:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = most_resident()
        self.began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time() - self.began)


def most_resident() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


class Given(GRPOTrainer):
    """Trains ``batch`` again and again. ``losses`` are those of its micro-batches."""

    batch: dict[str, torch.Tensor]
    losses: list[float]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.batch)

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(float(loss.detach()))
        return loss


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def column(name: str, dtype: torch.dtype, side: str) -> torch.Tensor:
        return pad_sequence([torch.tensor(r[name], dtype=dtype) for r in rows], batch_first=True, padding_side=side)

    for row in rows:
        row["prompt_mask"], row["completion_mask"] = [1] * len(row["prompt"]), [1] * len(row["completion"])
    return {
        "prompt_ids": column("prompt", torch.long, "left"),
        "prompt_mask": column("prompt_mask", torch.long, "left"),
        "completion_ids": column("completion", torch.long, "right"),
        "completion_mask": column("completion_mask", torch.long, "right"),
        "old_per_token_logps": column("logprobs", torch.float32, "right"),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": torch.tensor(sum(len(row["completion"]) for row in rows)),
    }


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    rows, group = given["rows"], given["group"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(Qwen3Config(**given["config"]), dtype=torch.float32)
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, "<pad>"))
    clock = Clock()
    trainer = Given(
        model=lm,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir="out",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=group,
            gradient_accumulation_steps=len(rows) // group,
            num_generations=group,
            max_steps=1 + given["steps"],
            learning_rate=given["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            loss_type="dapo",
            beta=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["<pad>"] * len(rows)}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        callbacks=[clock],
    )
    trainer.batch, trainer.losses = padded(rows), []
    trainer.train()
    loss = sum(trainer.losses[: len(rows) // group])
    result = {"loss": loss, "seconds": clock.seconds[1:], "memory": most_resident() - clock.before}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
