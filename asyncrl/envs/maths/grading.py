"""The final answer of a text, and whether it is right.

What a model writes can keep a computer algebra system busy for ever (``10^{10^{10^{10}}}`` is enough), and holds the
interpreter meanwhile. So math-verify runs in processes, which are killed when an answer takes too long or too much
memory; its own time limits are off, since they are signals of the main thread.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import logging
import multiprocessing
import multiprocessing.util
import os
import re
import resource
import threading
from typing import Any

from asyncrl.env import EnvDown
from asyncrl.leftovers import Leftovers

try:
    from pebble import ProcessExpired, ProcessPool

    if importlib.util.find_spec("math_verify") is None:  # imported in workers only: it takes a second
        raise ModuleNotFoundError("No module named 'math_verify'")
except ModuleNotFoundError as error:
    raise ImportError(f"maths cannot be graded ({error}); pip install 'asyncrl[maths]'") from None

TIME_LIMIT_S = 5.0
"""Of one verdict. The usual one takes 2 ms, the first of its kind in a process up to a second."""
MEMORY_MB = 4096
"""Address space of a worker process."""
MAX_CHARACTERS = 2000
"""A longer answer is wrong without being read."""
MAX_WORKERS = 8
_SOCKET_PATH = 107
"""Bytes that a Unix socket's path may have."""

_LINE = re.compile(r"\banswer\**[ \t]*(?:is[ \t]*)?:\**(?P<answer>[^\n]*)|^####(?P<hash>[^\n]*)", re.I | re.M)
_BRACE = re.compile(r"\\(?:boxed|fbox)[ \t]*\{|\\.|[{}]", re.DOTALL)


def final_answer(text: str) -> str | None:
    r"""The last of what a text gives as its answer, behind any thoughts: ``\boxed{…}``, a line ``Answer: …`` (DAPO) or
    ``#### …`` (GSM8K). None if it gives none. Linear in the text's length."""
    said = text.rpartition("</think>")[2]
    found, at = "", -1
    for line in _LINE.finditer(said):
        found, at = line["answer"] if line["hash"] is None else line["hash"], line.start()
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(said):
        if brace[0][-1] == "{" and brace[0] != r"\{":
            opened.append(brace)
        elif brace[0] == "}" and opened:
            box = opened.pop()
            if len(box[0]) > 1 and box.start() > at:
                found, at = said[box.end() : brace.start()], box.start()
    return found.strip().removesuffix(".").strip("*").strip() or None


async def score(text: str, gold: str, *, time_limit_s: float = TIME_LIMIT_S) -> float:
    """1.0 if the final answer of ``text`` equals ``gold``, else 0.0. Raises ``ValueError`` for a gold answer that
    math-verify cannot read."""
    answer = final_answer(text)
    return 0.0 if answer is None else float(await is_right(gold, answer, time_limit_s=time_limit_s))


async def is_right(gold: str, answer: str, *, time_limit_s: float = TIME_LIMIT_S) -> bool:
    """Whether ``answer`` is worth the same as ``gold``. One that cannot be judged within the limits of time and memory
    is not. Cancelled, it kills the process that was at it. Raises ``ValueError`` for the gold answer; ``EnvDown``."""
    if answer == gold:
        return True
    if len(answer) > MAX_CHARACTERS:
        return False
    try:
        pool = await _pool()
        return await asyncio.wrap_future(pool.schedule(_verdict, (gold, answer), timeout=time_limit_s))
    except (TimeoutError, MemoryError, ProcessExpired):
        return False
    except RuntimeError as error:  # of the pool; math-verify takes an exception for a wrong answer
        raise EnvDown(f"maths: no process to grade in ({error})") from None


_live: list[ProcessPool] = []
_starting = threading.Lock()


async def _pool() -> ProcessPool:
    """The one of this process, which lives as long; a broken one is replaced. It takes a second to start."""
    return _live[0] if _live and _live[0].active else await asyncio.to_thread(_start)


def _start() -> ProcessPool:
    with _starting:
        if not _live or not _live[0].active:
            context: Any = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__, "math_verify"])  # so that a killed worker is replaced in a moment
            if not _live:
                folder = multiprocessing.util.get_temp_dir()
                if len(os.fsencode(folder)) + len("/listener-12345678") > _SOCKET_PATH:  # pebble would not say why
                    raise EnvDown(f"maths: no socket to grade behind fits into {folder}; set TMPDIR to a shorter path")
                leftovers = Leftovers()
                leftovers.folder(folder)  # with that socket, if this process is killed
                multiprocessing.util.Finalize(None, leftovers.close, exitpriority=-200)  # the folder's own has -100
            workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
            _live[:] = [ProcessPool(workers, initializer=_begin, context=context)]
            atexit.register(_stop, _live[0])
            assert _live[0].active  # which starts it
        return _live[0]


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def _begin() -> None:
    """In a new worker."""
    limit = MEMORY_MB * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.disable(logging.WARNING)  # math-verify warns with each call that its time limits are off


def _verdict(gold: str, answer: str) -> bool:
    """In a worker."""
    from math_verify import parse, verify

    right = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    if not right:
        raise ValueError(f"math-verify cannot read the gold answer {gold!r:.100}")
    return bool(verify(right, parse(f"\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None))
