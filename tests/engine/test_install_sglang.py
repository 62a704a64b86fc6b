"""launch/install_sglang.sh: what it says before it downloads anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"


def install(*arguments: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None
    return subprocess.run(
        [LAUNCH / "install_sglang.sh", *arguments], capture_output=True, text=True, timeout=60, env=environment
    )


def executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_without_a_folder_it_says_how_to_call_it() -> None:
    done = install()
    assert done.returncode != 0
    assert done.stderr == "install_sglang: usage: launch/install_sglang.sh VENV [PYTHON]\n"


def test_a_complete_environment_is_left_alone(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python", "exit 1")
    requirements = (LAUNCH / "sglang-cpu-requirements.txt").read_text()
    (tmp_path / "asyncrl-sglang-0.5.23.txt").write_text(requirements)
    done = install(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "already installed" in done.stdout


def test_a_machine_with_a_gpu_is_sent_to_the_normal_server(tmp_path: Path) -> None:
    executable(tmp_path / "tools" / "nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    done = install(tmp_path / "venv", path=tmp_path / "tools")
    assert done.returncode != 0
    assert "pip install sglang==0.5.23" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_a_failing_pip_is_one_line_that_names_the_log(tmp_path: Path) -> None:
    executable(tmp_path / "tools" / "nvidia-smi", "exit 1")
    executable(tmp_path / "venv" / "bin" / "python", "echo 'ERROR: No matching distribution found'; exit 1")
    done = install(tmp_path / "venv", path=tmp_path / "tools")
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "No matching distribution found" in done.stderr
    assert str(tmp_path / "venv" / "install.log") in done.stderr
    assert not list((tmp_path / "venv").glob("asyncrl-sglang-*"))


def test_the_list_leaves_out_what_would_break_a_cpu() -> None:
    lines = (LAUNCH / "sglang-cpu-requirements.txt").read_text().splitlines()
    names = [line.partition("=")[0].strip() for line in lines if line and not line.startswith("#")]
    assert len(names) == len(set(names)) > 30
    assert not {"torchvision", "torchaudio", "sgl-kernel", "sglang"} & set(names)
