"""The server as a process: start, refusal, signals, and the death of its parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from asyncrl.access import VARIABLE
from asyncrl.serve.__main__ import main

from .harness import prompt, request

COMMAND = [sys.executable, "-m", "asyncrl.serve"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=30) as response:
        return bytes(response.read())


def until_healthy(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            get(port, "/health")
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    process = subprocess.Popen([*COMMAND, str(folder), "--port", str(port), "--device", "cpu"], stderr=subprocess.PIPE)
    try:
        until_healthy(port)
        yield process, port
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_at_once(folder: Path, number: signal.Signals) -> None:
    """Even with a stream under way and a worker thread inside a join that nobody answers."""
    with started(folder) as (process, port):
        with (
            socket.create_connection(("127.0.0.1", port)) as stream,
            socket.create_connection(("127.0.0.1", port)) as join,
        ):
            send(stream, "/generate", request(prompt(1), stream=True, max_new_tokens=1800))
            send(join, "/init_weights_update_group", {"master_address": "127.0.0.1", "master_port": free_port(),
                 "rank_offset": 1, "world_size": 2, "group_name": "g", "backend": "gloo"})  # fmt: skip
            assert stream.recv(100).startswith(b"HTTP/1.1 200")
            started_at = time.monotonic()
            process.send_signal(number)
            _, errors = process.communicate(timeout=30)
        assert time.monotonic() - started_at < 10
        assert process.returncode == 0, errors
        assert b"Traceback" not in errors


BREAKS = """
import sys, torch
from asyncrl.serve import __main__, model
def decode(*arguments):
    raise RuntimeError("boom")
model.Model.decode = decode
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_an_engine_that_breaks_ends_the_server(folder: Path) -> None:
    """It must not go on answering /health; whoever started it starts it again."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", BREAKS, str(folder), "--port", str(port)], stderr=subprocess.PIPE)
    try:
        until_healthy(port)
        with pytest.raises(OSError, match=r"Remote end closed|reset"):
            get(port, "/generate", request(prompt(1), max_new_tokens=5))
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert b"the engine broke: boom" in errors
    finally:
        process.kill()
        process.communicate()


def test_a_signal_while_loading_ends_it(folder: Path) -> None:
    loading = (
        "import os, signal; from asyncrl.serve import __main__ as m;"
        "m._load = lambda *a: os.kill(os.getpid(), signal.SIGTERM); raise SystemExit(m.main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", loading, str(folder), "--port", "0"], capture_output=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, b"")


def send(connection: socket.socket, path: str, body: object) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_it_dies_with_its_parent(folder: Path) -> None:
    """The parent is killed outright: it has no chance to clean up."""
    port = free_port()
    parent = subprocess.Popen(
        [sys.executable, "-c",
         "import os, subprocess, sys; os.environ['ASYNCRL_PARENT_PID'] = str(os.getpid());"
         "child = subprocess.Popen(sys.argv[1:]); print(child.pid, flush=True); child.wait()",
         *COMMAND, str(folder), "--port", str(port), "--device", "cpu", "--log-level", "error"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    until_healthy(port)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that ``main`` prints when it refuses."""
    assert main([*arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("asyncrl serve: ")
    return err


def with_config(folder: Path, target: Path, **changes: object) -> str:
    target.mkdir(exist_ok=True)
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (target / "config.json").write_bytes(msgspec.json.encode({**config, **changes}))
    return str(target)


def test_bad_folders_are_refused_in_one_line(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    assert "no such model folder" in refused(capsys, str(tmp_path / "none"))
    assert "no config.json" in refused(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(capsys, str(tmp_path))
    port = ("--port", "0")
    assert "no model.safetensors" in refused(capsys, with_config(folder, tmp_path), *port)
    for changes, words in (
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not served"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"num_key_value_heads": 3}, "must divide"),
        ({"hidden_size": None}, "config.json"),
    ):
        assert words in refused(capsys, with_config(folder, tmp_path, **changes), *port)
    broken = with_config(folder, tmp_path, hidden_size=64, head_dim=16)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert "has shape" in refused(capsys, broken, *port)


def test_bad_arguments_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "for-another-machine-than-this")
    for arguments, words in (
        (["--context-length", "2049"], "exceeds the model's 2048"),
        (["--max-running-requests", "0"], "--max-running-requests must be at least 1"),
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
    ):
        assert words in refused(capsys, str(folder), *arguments)


def test_a_busy_port_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in refused(
            capsys, str(folder), "--port", str(port)
        )


def test_a_dead_parent_is_noticed_at_the_start(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    environment = {**os.environ, "ASYNCRL_PARENT_PID": gone.stdout.decode().strip()}
    result = subprocess.run([*COMMAND, str(folder)], env=environment, capture_output=True, timeout=60)
    assert result.returncode == 2
    assert b"is gone" in result.stderr
