"""What killed processes leave is removed by one that outlives them."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.leftovers import Leftovers

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory to look at")

SERVER = """
import mmap, multiprocessing, os, sys, time
sys.stdin.readline()
lock = multiprocessing.get_context("spawn").Lock()  # as tqdm makes one in a process of SGLang
maps = []
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        maps.append(mmap.mmap(file.fileno(), 0))
open(os.path.join(os.environ["TMPDIR"], "socket"), "w").close()
if os.fork():
    print(lock._semlock.name, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_session_leaves_nothing_and_what_is_anothers_stays(tmp_path: Path) -> None:
    own, shared = (Path(tempfile.mkstemp(dir="/dev/shm", prefix="asyncrl-test-")[1]) for _ in range(2))
    relay = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="asyncrl-test-")) / "v7"
    temporary, told = tmp_path / "tmp", tmp_path / "told"
    temporary.mkdir()
    told.mkdir()
    try:
        for path in (own, shared, relay):
            path.write_bytes(bytes(100))
        with shared.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        with subprocess.Popen(
            [sys.executable, "-c", SERVER, own, shared, relay],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        ) as server:
            leftovers = Leftovers()
            leftovers.session(server.pid, temporary)
            assert server.stdin is not None and server.stdout is not None
            server.stdin.write("\n")
            server.stdin.flush()
            semaphore = Path("/dev/shm", f"sem.{server.stdout.readline().strip().removeprefix('/')}")
            assert semaphore.exists()
            leftovers.look()
            leftovers.session(_ended(), told)
            until(lambda: not told.exists())  # now it has looked, and a session that has ended is tidied up at once
            os.killpg(server.pid, signal.SIGKILL)
        until(lambda: not temporary.exists())
        assert not semaphore.exists() and not own.exists()
        assert shared.exists() and relay.exists()
        leftovers.close()
        leftovers.close()  # once is enough
        mapping.close()
    finally:
        for path in (own, shared, relay):
            path.unlink(missing_ok=True)
        relay.parent.rmdir()


def _ended() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_folders_go_with_whoever_named_them_even_if_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    (folder / "in it").mkdir(parents=True)
    script = (
        "import sys, time\nfrom asyncrl.leftovers import Leftovers\nleftovers = Leftovers()\n"
        "leftovers.folder(sys.argv[1])\nprint(flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert folder.exists()
        process.kill()
    until(lambda: not folder.exists())


def test_it_outlives_being_told_nothing_and_its_own_death_harms_nobody(tmp_path: Path) -> None:
    Leftovers().close()
    leftovers = Leftovers()
    leftovers._process.kill()
    leftovers._process.wait()
    leftovers.folder(tmp_path)
    leftovers.session(os.getpid(), tmp_path)
    leftovers.close()
    assert tmp_path.exists()


FORKS = """
import os, sys, time
from asyncrl.leftovers import Leftovers
leftovers = Leftovers()
leftovers.folder(sys.argv[1])
child = os.fork()  # as a reward's pool of processes does
if not child:
    time.sleep(600)
print(child, flush=True)
if sys.argv[2] == "closes":
    leftovers.close()
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_a_living_process_that_was_forked_meanwhile_holds_up_no_end(tmp_path: Path, end: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", FORKS, folder, end], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            if end == "is killed":
                process.kill()
            process.wait(60)
            until(lambda: not folder.exists())
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)
