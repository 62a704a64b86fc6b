"""Maths: what counts as the final answer and as right, rows of the usual data sets, and that no answer stalls a run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl import EnvDown, Response, Task
from asyncrl.config import EnvConfig, RecipeError
from asyncrl.envs.maths import final_answer, grading, is_right, parse_row, reward, score
from asyncrl.loading import load_environment, load_tasks

ENDLESS = "10^{10^{10^{10}}}"
"""Keeps math-verify busy until it is killed, in one big multiplication that no signal handler interrupts."""

# --- grading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"first \boxed{3}, no: $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{never closed", "1"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"f(x) = { \\{ \boxed{8}", "8"),
        ("Thus.\nAnswer: 34", "34"),
        ("**Answer:** 34.", "34"),
        (r"Answer: \boxed{5}", "5"),
        ("The final answer is: $x$\n", "$x$"),
        ("#### 1,000\n", "1,000"),
        ("#### 1\nAnswer: 2", "2"),
        ("<think>\\boxed{1}</think>I do not know", None),
        ("<think>\\boxed{1}</think>\\boxed{2}", "2"),
        ("it is 4", None),
        ("Answer:", None),
        ("", None),
    ],
)
def test_the_last_of_what_is_given_as_the_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize("text", ["answer" + " " * 100_000, "\\boxed{" * 20_000, "answer is" * 20_000])
def test_looking_for_it_takes_no_time(text: str) -> None:
    began = time.perf_counter()
    assert final_answer(text) is None
    assert time.perf_counter() - began < 2


async def test_right_is_what_is_worth_the_same() -> None:
    right = [("5", "5"), (r"\frac{1}{2}", "0.5"), ("(1,2)", "(1, 2)"), ("1000", "1,000"), ("x^2+1", "1+x^2")]
    wrong = [
        ("5", "6"),
        ("3", "5,3"),
        ("(1,2)", "(2,1)"),
        ("5", "1" * 5000),
        ("5", r"\frac{"),
        ("5", "}{"),
        ("5", "(" * 900),
    ]
    async with asyncio.TaskGroup() as group:
        found = {pair: group.create_task(is_right(*pair, time_limit_s=60)) for pair in right + wrong}
    assert {pair: task.result() for pair, task in found.items()} == dict.fromkeys(right, True) | dict.fromkeys(
        wrong, False
    )
    assert await score(r"\boxed{0.5}", r"\frac{1}{2}") == 1.0
    assert await score("0.5", r"\frac{1}{2}") == 0.0
    with pytest.raises(ValueError, match="cannot read the gold answer"):
        await is_right("", "5")


async def test_an_endless_answer_is_wrong_in_time_and_stalls_nobody() -> None:
    await is_right("1", "2")  # the workers are there
    loop = asyncio.get_running_loop()
    worst = 0.0

    async def feel() -> None:
        nonlocal worst
        while True:
            began = loop.time()
            await asyncio.sleep(0.005)
            worst = max(worst, loop.time() - began - 0.005)

    began = loop.time()
    async with asyncio.TaskGroup() as group:
        feeling = group.create_task(feel())
        stuck = [group.create_task(is_right("5", ENDLESS, time_limit_s=0.5)) for _ in range(2)]
        results = [await one for one in stuck]
        feeling.cancel()
    assert results == [False, False]
    assert loop.time() - began < 20
    assert worst < 0.5
    assert await is_right("4", "2+2", time_limit_s=60)  # in a new worker


async def test_a_missed_deadline_kills_the_worker() -> None:
    await is_right("1", "2", time_limit_s=60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await is_right("5", ENDLESS, time_limit_s=3600)
    assert await is_right("4", "2+2", time_limit_s=60)
    assert await is_right("4", "8/2", time_limit_s=60)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """An empty folder for temporary files, its path short enough for a socket there."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_workers_go_with_a_controller_that_is_killed(tmp_path: Path, temporary: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import asyncio, multiprocessing, os\nfrom asyncrl.envs.maths import is_right\n"
        "async def main():\n    await is_right('1', '1+0', time_limit_s=60)\n"
        "    print(*[p.pid for p in multiprocessing.active_children()], flush=True)\n    await asyncio.sleep(600)\n"
        "if __name__ == '__main__':\n    asyncio.run(main())\n"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as controller:
        assert controller.stdout is not None
        workers = [int(pid) for pid in controller.stdout.readline().split()]
        assert workers
        os.kill(controller.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) or list(temporary.iterdir()):
        assert time.monotonic() < deadline, "workers, or their files, outlived their controller"
        time.sleep(0.05)


def test_a_controller_that_graded_ends_without_a_word(tmp_path: Path, temporary: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import asyncio\nfrom asyncrl.envs.maths import is_right\n"
        "if __name__ == '__main__':\n    print(asyncio.run(is_right('1', '1+0', time_limit_s=60)))\n"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("True\n", "") and not list(temporary.iterdir())


async def test_a_folder_too_deep_for_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = str(tmp_path / ("d" * 100))
    monkeypatch.setattr("multiprocessing.util.get_temp_dir", lambda: deep)
    monkeypatch.setattr(grading, "_live", [])
    with pytest.raises(EnvDown, match=f"no socket to grade behind fits into {deep}; set TMPDIR"):
        await is_right("1", "1+0")


async def test_the_reward_function() -> None:
    task = Task(id="1", data={"prompt": "?", "answer": "7"})
    assert await reward(task, Response(text=r"\boxed{7}", token_ids=[], finish_reason="stop")) == 1.0
    assert await reward(task, Response(text=r"\boxed{8}", token_ids=[], finish_reason="stop")) == 0.0


# --- rows -------------------------------------------------------------------------------------------------------------

DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve: 1+1. End with Answer: $Answer.", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "a"},
}


@pytest.mark.parametrize(
    ("row", "problem", "answer"),
    [
        (DAPO, DAPO["prompt"][0]["content"], "2"),  # type: ignore[index]
        ({"question": " 1+1? ", "answer": "1 and 1\n#### 1,002"}, "1+1?", "1002"),
        ({"problem": "p", "solution": "s", "answer": r"\frac12", "subject": "a", "level": 1}, "p", r"\frac12"),
        ({"problem": "p", "solution": r"so \boxed{3}", "level": "Level 1"}, "p", "3"),
        ({"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 204}, "p", "204"),
        ({"id": 60, "problem": "p", "solution": "s", "answer": "204", "url": "u"}, "p", "204"),
        ({"prompt": "text", "answer": 4}, "text", "4"),
    ],
)
def test_rows_are_recognised_by_their_fields(row: dict[str, Any], problem: str, answer: str) -> None:
    data = parse_row(row)
    assert (data["problem"], data["answer"]) == (problem, answer)
    if "prompt" in row:
        assert data["prompt"] == row["prompt"]
    else:
        assert data["prompt"][0]["role"] == "user" and data["prompt"][0]["content"].startswith(f"{problem}\n\n")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "x"}, "its fields are not those of DAPO-Math-17k"),
        ({"problem": "p", "solution": "no box"}, "it has no final answer (in problem, solution)"),
        ({"problem": "p", "answer": ""}, "it has no final answer"),
        ({"problem": " ", "answer": "1"}, "its fields are not"),
        ({**DAPO, "reward_model": {"style": "rule"}}, "it has no final answer"),
        ({**DAPO, "prompt": [{"role": "user"}]}, "its prompt is neither text nor chat messages"),
        ({**DAPO, "prompt": []}, "its prompt is neither"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(DAPO) + "\n" + json.dumps(row) + "\n")
    environment = load_environment(EnvConfig(target="asyncrl.envs.maths:reward"))
    with pytest.raises(RecipeError) as error:
        load_tasks(str(file), "task.train", environment.required, parse_row=environment.parse_row)
    assert str(error.value).startswith(f"task.train: {file}:2: {why}")
    assert "\n" not in str(error.value)


def test_repeated_rows_are_one_task(tmp_path: Path) -> None:
    """DAPO-Math-17k's differ in what is not used."""
    file = tmp_path / "rows.jsonl"
    copies = [{**DAPO, "extra_info": {"index": str(n)}} for n in range(100)]
    other = {**DAPO, "reward_model": {"ground_truth": "3"}}
    file.write_text("".join(json.dumps(row) + "\n" for row in [*copies, other, *copies]))
    tasks = load_tasks(str(file), "task.train", parse_row=parse_row)
    assert [task.id for task in tasks] == ["rows/1", "rows/101"]
    assert len(load_tasks(str(file), "task.train")) == 201
