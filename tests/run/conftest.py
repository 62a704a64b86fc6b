"""A tiny recipe, and ``asyncrl train`` on it as a user would start it: real servers, torchrun with two ranks, files."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ENV = """
import asyncio, os, random, time
import asyncrl

def reward(task, response):
    # The more zeros the better: any policy gets some reward, and no two responses quite the same.
    return response.text.count("0") / 12 + len(response.token_ids) / 1000

def broken(task, response):
    raise KeyError("no such board")

class Moody(asyncrl.Env):
    # Two turns; now and then one raises, hangs or blocks the loop.
    async def reset(self, task):
        self.turn = 0
        return task.data["prompt"]

    async def step(self, action):
        self.turn += 1
        mood = random.random()
        if mood < 0.02:
            raise ValueError("bad move")
        if mood < 0.04:
            await asyncio.Event().wait()
        if mood < 0.05:
            time.sleep(1000)
        await asyncio.sleep(0.01)
        return asyncrl.Step(observation="1=", reward=action.text.count("0") / 12, done=self.turn == 2)

class Slow(asyncrl.Env):
    # Three turns, each with an answer that takes its time: episodes outlast a training step.
    async def reset(self, task):
        self.turn = 0
        return task.data["prompt"]

    async def step(self, action):
        self.turn += 1
        await asyncio.sleep(random.uniform(0.1, 0.8))
        return asyncrl.Step(observation="1=", reward=action.text.count("0") / 12, done=self.turn == 3)

class Engine(asyncrl.SyncEnv):
    # The same, blocking; now and then its process dies.
    cost = asyncrl.Cost(per_process=8)

    def reset(self, task):
        self.turn = 0
        return task.data["prompt"]

    def step(self, action):
        self.turn += 1
        mood = random.random()
        if mood < 0.02:
            raise ValueError("bad move")
        if mood < 0.03:
            time.sleep(1000)
        if mood < 0.06:
            os._exit(3)
        return asyncrl.Step(observation="1=", reward=action.text.count("0") / 12, done=self.turn == 2)
"""

RECIPE = """
[model]
path = "model"
[task]
train = "train.jsonl"
heldout = "heldout.jsonl"
[env]
target = "env.py:reward"
[rollout]
batch_groups = 4
group_size = 4
num_envs = 32
max_new_tokens = 12
max_tokens = 48
[engine]
count = 2
max_running_requests = 16
max_total_tokens = 2048
stream_interval = 4
probe_s = 0.5
[trainer]
ranks = 2
learning_rate = 1e-3
[run]
steps = 4
eval_tasks = 8
"""


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipe, environment, data and a random Qwen3 of a few thousand parameters."""
    folder = tmp_path_factory.mktemp("tiny")
    characters = ["<pad>", "<eos>", *"0123456789=+"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(characters),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    for name, count in (("train", 64), ("heldout", 16)):
        rows = [json.dumps({"prompt": f"{i}+{i + 1}="}) for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "env.py").write_text(ENV)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def _limit_files(size: int) -> None:
    """Writing beyond ``size`` bytes of a file fails with EFBIG, also in child processes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _own_shm(folder: Path) -> list[str]:
    """A command before another's that lets it see ``folder`` as /dev/shm; none where that is not allowed."""
    unshare = ["unshare", "--mount"]
    try:
        allowed = subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    return [*unshare, "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(folder)] if allowed else []


class Train:
    """``asyncrl train`` in a process of its own, in a new run directory; ``resume``: in the one that is there, from its
    newest or the named checkpoint."""

    def __init__(
        self,
        recipe: Path,
        run_dir: Path,
        *arguments: str,
        file_limit: int | None = None,
        resume: bool | str = False,
        output: Path | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.output = output or run_dir.with_suffix(".out")
        where = ["--resume", str(run_dir / resume if isinstance(resume, str) else run_dir)]
        where = where if resume else ["--run-dir", str(run_dir)]
        # What it leaves in shared memory and in the folder for temporary files shows in folders of its own.
        self._left = [run_dir.with_suffix(".shm"), run_dir.with_suffix(".tmp")]
        for folder in self._left:
            folder.mkdir(exist_ok=True)
        # The environment marks every process of this run, so that orphans can be found.
        self._mark = f"ASYNCRL_TEST_RUN={run_dir}"
        name, _, value = self._mark.partition("=")
        command = [sys.executable, "-m", "asyncrl.cli", "train"]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*_own_shm(self._left[0]), *command, str(recipe), *where, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._left[1]), name: value},
                start_new_session=True,
                preexec_fn=None if file_limit is None else lambda: _limit_files(file_limit),
            )

    def wait(self, timeout: float = 240) -> int:
        return self.process.wait(timeout)

    def text(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], Any], timeout: float = 240) -> Any:
        """Wait for a condition while the run goes on."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"timed out:\n{self.text()}"
            time.sleep(0.05)
        return value

    def steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return loaded

    def processes(self, *words: str) -> list[int]:
        """Processes of this run, other than the controller, whose command line has all ``words``."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == self.process.pid:
                continue
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if self._mark.encode() in environment and not zombie and all(word in command for word in words):
                found.append(int(entry.name))
        return sorted(found)

    def check_ended_cleanly(self) -> None:
        """No process, shared memory or temporary file is left, and the ledger of the summary balances."""
        assert self.processes() == []
        assert self.leftovers() == []
        ledger = self.summary["ledger"]
        final = sum(ledger[state] for state in ("consumed", "filtered", "surplus", "failed", "aborted"))
        live = sum(ledger[state] for state in ("reserved", "running", "waiting", "scored", "occupied"))
        assert final == ledger["reserved_ever"] and live == 0

    def leftovers(self) -> list[str]:
        """Names of files in shared memory and in TMPDIR."""
        return sorted(str(path.relative_to(folder.parent)) for folder in self._left for path in folder.rglob("*"))

    def kill(self) -> None:
        for pid in [self.process.pid, *self.processes()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@pytest.fixture
def train(tiny_recipe: Path, tmp_path: Path) -> Iterator[Callable[..., Train]]:
    """Starts runs of the tiny recipe; whatever is left of them is killed afterwards."""
    runs: list[Train] = []

    def start(*arguments: str) -> Train:
        runs.append(Train(tiny_recipe, tmp_path / f"run{len(runs)}", *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
