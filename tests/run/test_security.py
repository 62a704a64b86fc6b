"""A whole run: where its processes listen, who is answered, and that its secrets are nowhere to be read."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.access import VARIABLE

from .conftest import Train
from .test_train import set_

pytestmark = pytest.mark.timeout(600)

TOKEN = "the-token-of-this-test-0123"
KEY = "sk-the-key-of-a-judge-4567"
ENV = """
import asyncrl

class Judged(asyncrl.SyncEnv):
    cost = asyncrl.Cost(per_process=8)

    def __init__(self, api_key):
        assert api_key.startswith("sk-")

    def reset(self, task):
        return task.data["prompt"]

    def step(self, action):
        return asyncrl.Step(observation="", reward=action.text.count("0") / 12 + len(action.token_ids) / 99, done=True)
"""
LISTENS = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def listeners(pids: set[int]) -> Iterator[tuple[int, str]]:
    """Process and hexadecimal address of every TCP socket that one of them listens on."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                inodes[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = os.readlink(link)
            except OSError:  # closed meanwhile
                continue
            if found in inodes:
                yield pid, inodes[found]


def test_all_of_a_run_listens_on_loopback_asks_for_its_token_and_writes_no_secret(
    train: Callable[..., Train], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    (tmp_path / "judged.py").write_text(ENV)
    run = train(
        *set_(
            f"env.target={tmp_path}/judged.py:Judged",
            f"env.kwargs.api_key={KEY}",
            "weights.transport=collective",
            "run.steps=5000",
            "run.eval_tasks=1",
        )
    )
    run.until(lambda: run.steps() >= 2)
    pids = {run.process.pid, *run.processes()}
    found = dict.fromkeys(listeners(pids))
    assert len(found) >= 3, "two servers and rank 0"
    assert [place for place in found if place[1] not in LOOPBACK] == []

    for pid in run.processes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert TOKEN.encode() not in command and KEY.encode() not in command
    [server, *_] = run.processes("asyncrl.serve")
    words = Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")
    port = int(words[words.index(b"--port") + 1])
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/model_info", timeout=30)
    assert refusal.value.code == 401
    refusal.value.close()

    run.process.terminate()
    assert run.wait(240) == 130, run.text()
    run.check_ended_cleanly()
    texts = [run.text().encode(), *(file.read_bytes() for file in run.run_dir.rglob("*") if file.is_file())]
    assert len(texts) > 8
    assert not any(TOKEN.encode() in text or KEY.encode() in text for text in texts)
    assert "env.kwargs.api_key=(redacted)" in (run.run_dir / "summary.json").read_text()
