"""launch/sglang_cpu.py: what it fills in before SGLang starts. A stand-in for SGLang says what it was given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = Path(__file__).parents[1] / "launch" / "sglang_cpu.py"
BIND = "SGLANG_CPU_OMP_THREADS_BIND"
STAND_IN = {
    "launch_server": f"import os\ndef run_server(args):\n    print(args, os.environ.get('{BIND}'))\n",
    "srt/server_args": "def prepare_server_args(argv):\n    return ' '.join(argv)\n",
    "srt/utils": "def kill_process_tree(*args, **kwargs):\n    pass\n",
    # Else the placeholder of torchvision asks transformers first, which takes seconds.
    "../torchvision/__init__": "",
}


def start(folder: Path, *arguments: str, **environment: str) -> str:
    for name, text in STAND_IN.items():
        file = folder / "sglang" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, START, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_the_command_line_says_is_not_overwritten(tmp_path: Path) -> None:
    said = start(tmp_path, "--max-total-tokens", "99", "--attention-backend=triton")
    assert said.startswith("--max-total-tokens 99 --attention-backend=triton --device cpu ")
    assert "65536" not in said and "torch_native" not in said
    assert said.endswith(" None"), "a single rank has no core of its own"


@pytest.mark.parametrize("words", [("--tp-size", "3"), ("--tp=3",), ("--tensor-parallel-size", "3")])
def test_each_tensor_parallel_rank_has_a_core(tmp_path: Path, words: tuple[str, ...]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert start(tmp_path, *words).endswith("|".join(str(cores[i % len(cores)]) for i in range(3)))


def test_cores_that_the_user_chose_are_left(tmp_path: Path) -> None:
    assert start(tmp_path, "--tp-size", "2", **{BIND: "5|6"}).endswith("5|6")
