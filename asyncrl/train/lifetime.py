"""A rank ends when those it works for are gone: torchrun (its parent) or the controller. Linux.

torchrun starts ranks in sessions of their own, so that killing the controller's process group does not reach them.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

PARENT_VARIABLE = "ASYNCRL_PARENT_PID"
"""Set by whoever launches torchrun and wants the ranks to end with it: its own process id."""

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """No effect unless ``ASYNCRL_PARENT_PID`` is set: a job launched by hand may outlive the shell that started it."""
    controller = os.environ.get(PARENT_VARIABLE)
    if not controller:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        handle = os.pidfd_open(int(controller))
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() == 1:  # torchrun died before it was watched
        os._exit(1)
    threading.Thread(target=_watch, args=(handle,), name="parent-watch", daemon=True).start()


def _watch(handle: int) -> None:
    """A process's handle becomes readable when it ends."""
    select.select([handle], [], [])
    os._exit(1)
