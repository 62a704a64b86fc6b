"""Ranks end with those they work for: real processes, without torch."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RANK = (
    "import time; from asyncrl.train.lifetime import die_with_parent;"
    "die_with_parent(); print('up', flush=True); time.sleep(60)"
)
MIDDLE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RANK!r}])"
OUTER = (
    "import os, subprocess, sys, time; os.environ['ASYNCRL_PARENT_PID'] = str(os.getpid());"
    f"child = subprocess.Popen([sys.executable, '-c', {MIDDLE!r}], start_new_session=True);"
    "print(child.pid, flush=True); child.wait(); time.sleep(60)"
)


@pytest.mark.parametrize("victim", ["controller", "torchrun"])
def test_a_rank_dies_with_the_controller_and_with_torchrun(victim: str) -> None:
    with subprocess.Popen([sys.executable, "-c", OUTER], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        torchrun = int(controller.stdout.readline())
        assert controller.stdout.readline() == "up\n"
        (rank,) = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
        handle = os.pidfd_open(int(rank))
        os.kill(controller.pid if victim == "controller" else torchrun, signal.SIGKILL)
        assert select.select([handle], [], [], 20)[0], "the rank outlived its parent"
        os.close(handle)
        controller.kill()
