"""The command line: exit codes, one line for bad input, and nothing half-written."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from asyncrl.access import VARIABLE
from asyncrl.cli import main
from asyncrl.config import loads_json

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe all of whose inputs pass the checks that come before anything starts."""
    folder = tmp_path / "toy"
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").touch()
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(model / "tokenizer.json"))
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "env.py").write_text("def reward(task, response):\n    return 1.0\n")
    (folder / "recipe.toml").write_text(
        'model.path = "model"\ntask.train = "train.jsonl"\nenv.target = "env.py:reward"\n[staleness]\nbound = 2\n'
    )
    return folder


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr."""
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.endswith("\n"), text
    return text[:-1]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.suffix in {".jsonl", ".json"}
    }


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_prints_the_recipe_as_resolved_and_starts_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = recipe / "overlay.toml"
    overlay.write_text("run.steps = 7\nseed = 1")
    assert main(["check", str(recipe), "--with", str(overlay), "--set", "seed=5", "--set", "engine.count=3"]) == 0
    printed, errors = capsys.readouterr()
    resolved = loads_json(printed.encode())
    assert errors == ""
    assert (resolved.name, resolved.run.steps, resolved.seed, resolved.engine.count) == ("toy", 7, 5, 3)
    assert resolved.staleness.bound == 2.0
    assert resolved.model.path == str(recipe / "model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "staleness.bound=-1"], "asyncrl: staleness.bound = -1.0: must be 0 or more"),
        (["--set", "egnine.count=1"], "asyncrl: egnine: unknown key; did you mean 'engine'?"),
        (
            ["--set", "staleness.queue=inf"],
            "asyncrl: staleness.queue = inf: must hold at least one batch, and not endlessly many",
        ),
        (
            ["--set", "nonsense"],
            "asyncrl: --set 'nonsense': write key=value, for instance --set trainer.learning_rate=1e-5",
        ),
        (
            ["--with", "/no/such.toml"],
            "asyncrl: /no/such.toml: No such file or directory; give a recipe.toml or its folder",
        ),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_bad_recipe_is_one_line_and_exit_code_2(
    recipe: Path, command: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(recipe), *arguments]) == 2
    assert one_line(capsys) == message


def test_a_missing_recipe_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none")]) == 2
    assert one_line(capsys).startswith(f"asyncrl: {tmp_path / 'none'}: No such file or directory")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["check"],
        ["train", "x", "--sett", "a=b"],
        ["view", "x", "--last", "-1"],
        ["view", "x", "--last", "0"],
        ["sim", "x", "--seeds", "0"],
        ["sim", "x", "--seeds", "2", "--jobs", "-1"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: asyncrl" in capsys.readouterr().err


def test_as_a_process(recipe: Path) -> None:
    """What the functions above return is the exit code, and errors are on stderr alone."""
    command = [sys.executable, "-m", "asyncrl.cli", "check", str(recipe)]
    good = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["name"] == "toy"
    bad = subprocess.run([*command, "--set", "run.steps=0"], capture_output=True, text=True, timeout=60)
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", "asyncrl: run.steps = 0: must be at least 1\n")


# --- train ------------------------------------------------------------------------------------------------------------


BROKEN = [
    ("model", None, "model.path: no folder {path}; make it with save_pretrained, or set setup.script"),
    ("model/config.json", None, "model.path: no config.json in {model}; give a folder in Hugging Face format"),
    ("model/tokenizer.json", None, "model.path: no tokenizer.json in {model}; give a folder saved by save_pretrained"),
    ("train.jsonl", '{"prompt": "a"}\n{', "task.train: {path}:2: not a JSON object: Input data was truncated"),
    ("train.jsonl", '{"question": "a"}', "task.train: {path}:1: the row has no 'prompt' (it has question)"),
    ("train.jsonl", "", "task.train: {path} has no rows"),
    ("train.jsonl", None, "task.train: no file {path}"),
    ("env.py", None, "env.target: no file {path}"),
    ("env.py", "1 / 0", "env.target: cannot import {path}: ZeroDivisionError: division by zero ({path}:1)"),
    ("env.py", "x = 1", "env.target: {path} has no 'reward'"),
]
"""A file of the recipe's folder, what it holds instead (None: it is missing), and the line that says so."""


@pytest.mark.parametrize(("broken", "content", "message"), BROKEN)
def test_bad_input_is_one_line_and_nothing_is_written(
    recipe: Path, broken: str, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe / broken
    if content is not None:
        path.write_text(content)
    elif path.is_dir():
        path.rename(recipe / "elsewhere")
    else:
        path.unlink()
    run_dir = recipe / "run"
    assert main(["train", str(recipe), "--run-dir", str(run_dir)]) == 2
    assert one_line(capsys) == "asyncrl: " + message.format(path=path, model=recipe / "model")
    assert not run_dir.exists()


def test_a_folder_that_holds_a_run_is_left_as_it_is(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = recipe / "run"
    run_dir.mkdir()
    for name in ("metrics.jsonl", "trajectories.jsonl", "recipe.json", "summary.json"):
        (run_dir / name).write_text(f"the {name} of the last run\n")
    before = files(run_dir)
    assert main(["train", str(recipe), "--run-dir", str(run_dir)]) == 1
    assert one_line(capsys) == (
        f"asyncrl: {run_dir / 'metrics.jsonl'}: already exists: this folder holds a run; give another --run-dir"
    )
    assert files(run_dir) == before
    assert len(list(run_dir.iterdir())) == len(before)


def test_a_run_directory_that_cannot_be_made_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_the_way = recipe / "file"
    in_the_way.touch()
    assert main(["train", str(recipe), "--run-dir", str(in_the_way / "run")]) == 1
    assert one_line(capsys).startswith(f"asyncrl: {in_the_way / 'run'}: cannot make the folder (Not a directory)")


def test_a_setup_script_that_fails_is_one_line_of_ours(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe / "prepare.py").write_text("import sys; sys.exit(4)")
    run_dir = recipe / "run"
    arguments = ["--set", f"setup.script={recipe / 'prepare.py'}", "--run-dir", str(run_dir)]
    assert main(["train", str(recipe), *arguments]) == 2
    assert one_line(capsys) == (f"asyncrl: setup.script: {recipe / 'prepare.py'} exited with 4; its last line says why")
    assert not run_dir.exists() and not (recipe / "build").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_setup_ends_it_and_leaves_nothing(recipe: Path, number: signal.Signals) -> None:
    (recipe / "prepare.py").write_text("print('up', flush=True)\nimport time; time.sleep(600)")
    run_dir = recipe / "run"
    command = [sys.executable, "-u", "-m", "asyncrl.cli", "train", str(recipe), "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        [*command, "--set", f"setup.script={recipe / 'prepare.py'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() != "up\n":
            assert process.poll() is None, process.stderr.read()
        process.send_signal(number)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read().splitlines() == [
            "",
            "asyncrl: stopping; press Ctrl-C again to stop at once",
            "asyncrl: interrupted",
        ]
    assert not run_dir.exists()
    assert not list(recipe.glob("build*"))


# --- serve, relay and report ------------------------------------------------------------------------------------------


def test_serve_on_a_port_in_use_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(recipe / "model"), "--port", str(port)]) == 2
    assert one_line(capsys) == (
        f"asyncrl serve: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"
    )


def test_serve_without_a_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert one_line(capsys).startswith(f"asyncrl serve: {tmp_path / 'none'}: no such model folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:0: Cannot assign requested address; choose another port"),
        (["--memory", "/no/such"], "--memory /no/such: No such file or directory; name a folder in shared memory"),
        (["--chunk-mb", "0"], "--chunk-mb 0: must be at least 1"),
    ],
)
def test_a_relay_that_cannot_start_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "for-another-machine-than-this")
    assert main(["relay", "--port", "0", *arguments]) == 2
    assert one_line(capsys) == f"asyncrl relay: {message}"


def test_report_of_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert str(tmp_path) in one_line(capsys)
