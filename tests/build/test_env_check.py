"""``asyncrl env check`` says what is wrong, and only that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.build.env_check import Report, check
from asyncrl.cli import main

FILE = Path(__file__).with_name("checked_envs.py")


def checked(name: str, **options: Any) -> Report:
    defaults: dict[str, Any] = {"kwargs": {}, "tasks": "", "actions": [], "episodes": 4, "max_turns": 10, "seed": 0}
    return check(f"{FILE}:{name}", **{**defaults, "timeout_s": 5.0, **options})


@pytest.mark.parametrize("name", ["Sound", "SoundSync", "Tidy", "sound"])
def test_nothing_is_wrong_with_what_is_sound(name: str) -> None:
    report = checked(name)
    assert report.findings == {}
    assert report.notes == []
    assert report.turns > 10


@pytest.mark.parametrize(
    ("name", "where", "what"),
    [
        ("Fragile", "step", "raised ValueError: could not convert string to float"),
        ("Blocks", "step", "held the event loop for up to 1"),
        ("Endless", "step", "no episode was done within 10 turns"),
        ("Infinite", "step", "gave nan as the reward"),
        ("Odd", "step", "returned str"),
        ("Mute", "reset", "gave an empty observation"),
        ("Roles", "reset", "gave a message with role 'human'"),
        ("Roles", "reset", "gave a tool that is none of OpenAI's"),
        ("Draws", "step", "the same task and actions brought something else the second time"),
        ("Leaks", "close", "leaves 1 temporary files behind an episode"),
        ("Leaks", "close", "leaves 1 open files behind an episode"),
        ("Together", "step", "an episode went another way with a second one beside it"),
        ("Stubborn", "step", "raised RuntimeError: clean-up failed"),
        ("NeedsRows", "reset", "raised KeyError: 'question'"),
        ("Mistyped", "reset", "gave NoneType as observation"),
        ("Mistyped", "reset", "gave int as the observation's messages"),
        ("Mistyped", "reset", "gave int as the observation's text"),
        ("Mistyped", "reset", "gave str as the observation's tools"),
        ("Untyped", "step", "gave 'high' as the reward"),
        ("Untyped", "step", "gave NoneType as metrics"),
        ("Cancels", "reset", "raised CancelledError"),
        ("Unsendable", "worker process", "TypeError: object is no plain data"),
        ("fragile", "reward", "raised ZeroDivisionError: division by zero"),
        ("slow", "reward", "held the event loop for up to 1"),
    ],
)
def test_a_fault_is_named(name: str, where: str, what: str) -> None:
    findings = checked(name).findings
    assert any(w == where and text.startswith(what) for w, text, _ in findings), findings
    assert all(remedy for _, _, remedy in findings)


@pytest.mark.parametrize(("name", "what"), [("Hangs", "gave no answer within 0.2 s"), ("Spins", "held its thread")])
def test_what_hangs_does_not_hang_the_check(name: str, what: str) -> None:
    findings = checked(name, timeout_s=0.2, episodes=1, actions=["x"]).findings
    assert any(text.startswith(what) for _, text, _ in findings)


def test_a_blocking_step_that_does_not_let_itself_be_interrupted_is_named() -> None:
    [(where, what, _)] = checked("Deaf", episodes=1).findings
    assert (where, what) == ("step", "went on after it was cancelled, so that its worker process was killed")


def test_rows_and_actions_are_the_users(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "who?"}) + "\n")
    report = checked("NeedsRows", tasks=str(rows))
    assert not any(where == "reset" for where, _, _ in report.findings)
    assert not checked("Fragile", actions=["1"]).findings.keys() & checked("Sound").findings.keys()


def test_the_command_prints_a_line_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", f"{FILE}:Sound", "--episodes", "2"]) == 0
    assert "all well" in capsys.readouterr().out
    assert main(["env", "check", f"{FILE}:Mute", "--episodes", "2"]) == 1
    assert "wrong reset: gave an empty observation" in capsys.readouterr().out
    assert main(["env", "check", f"{FILE}:Nobody"]) == 2
    assert main(["env", "check", f"{FILE}:drives"]) == 2
    assert main(["env", "check", f"{FILE}:Sound", "--kwargs", "{"]) == 2
    assert main(["env", "check", f"{FILE}:Sound", "--actions", "/no/file"]) == 2
