"""Gymnasium's own text games, and GEM's where they are installed.

python -m venv /tmp/gem && /tmp/gem/bin/pip install gem-llm==0.1.0 gymnasium pytest pytest-asyncio pytest-timeout
PYTHONPATH=. /tmp/gem/bin/python -m pytest --noconftest -c /dev/null tests/envs/adapters/test_gymnasium.py
"""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.env import Action, Observation, Step, Task

pytest.importorskip("gymnasium", reason="needs Gymnasium: pip install 'asyncrl[gymnasium]'")

from asyncrl.envs.adapters.gymnasium import GymEnv

MOVES = ("left", "down", "right", "up")
LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "options": {"is_slippery": False}, "actions": MOVES}
GOAL = ("down", "down", "right", "right", "down", "right")
TAXI_MOVES = ("south", "north", "east", "west", "pickup", "dropoff")


def act(text: str) -> Action:
    return Action(text=text, token_ids=[], finish_reason="stop")


def task(seed: int | None = None, number: int = 1) -> Task:
    return Task(id=f"train/{number}", data={} if seed is None else {"seed": seed})


def texts(steps: list[Step]) -> list[str]:
    assert all(isinstance(step.observation, str) for step in steps)
    return [str(step.observation) for step in steps]


def test_frozen_lake_is_played_to_the_goal() -> None:
    env = GymEnv(**LAKE)
    assert env.reset(task(0)) == "[S]FFF\nFHFH\nFFFH\nHFFG\n>"
    steps = [env.step(act(f" {move.upper()}\nand more")) for move in GOAL]
    assert texts(steps)[0] == "\n  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n>"
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert steps[-1].metrics == {"success": 1.0, "steps": 6.0, "invalid": 0.0}
    assert env.reset(task(0)) == "[S]FFF\nFHFH\nFFFH\nHFFG\n>", "the object serves the next episode"
    env.close()


def test_what_is_no_action_is_said_and_not_played() -> None:
    env = GymEnv(**LAKE)
    env.reset(task(0))
    for nonsense in ("", "jump", "4", "-1", "--1", "²", "9" * 5000, "\x00", "left right"):
        step = env.step(act(nonsense))
        assert step.observation == "\nThat is no action here. Actions: left, down, right, up.\n>"
        assert (step.reward, step.done) == (0.0, False)
    steps = [env.step(act(str(MOVES.index(move)))) for move in GOAL]  # numbers are understood
    assert steps[-1].reward == 1.0 and steps[-1].metrics["invalid"] == 9.0


def test_a_hole_and_the_time_limit_are_no_success() -> None:
    env = GymEnv(**LAKE)
    env.reset(task(0))
    env.step(act("down"))
    fallen = env.step(act("right"))
    assert fallen.done and fallen.metrics["success"] == 0.0
    env.reset(task(0))
    steps = [env.step(act("left")) for _ in range(100)]
    assert [step.done for step in steps] == [False] * 99 + [True], "truncated by Gymnasium's own limit"


def test_the_members_of_a_group_begin_alike() -> None:
    env, other = GymEnv(id="Taxi-v4"), GymEnv(id="Taxi-v4")
    assert env.reset(task()) == other.reset(task()) != env.reset(task(number=2))
    assert env.reset(task(3)) == other.reset(task(3, number=2)) != env.reset(task(4))


def test_taxi_in_chat_messages() -> None:
    env = GymEnv(id="Taxi-v4", actions=TAXI_MOVES, style="chat", instructions="Bring the passenger.")
    first = env.reset(task(1))
    assert isinstance(first, Observation)
    [message] = first.messages
    assert message["role"] == "user" and message["content"].startswith(
        "Bring the passenger.\n\n+---------+\n|R(magenta): "
    )
    assert "[ ]" in message["content"] and "B(blue)" in message["content"] and "\x1b" not in message["content"]
    assert env.step(act("I am not there yet.\nAction: dropoff.")).reward == -10.0
    assert env.step(act("dropoff")).metrics["invalid"] == 1.0, "in chat it stands behind Action:"


def test_observations_without_a_rendering_are_shown_as_they_are() -> None:
    env = GymEnv(id="Blackjack-v1", actions=["stick", "hit"])
    assert env.reset(task(1)).startswith("(")  # type: ignore[union-attr]
    assert env.step(act("stick")).done


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "give either id"),
        ({"id": "FrozenLake-v1", "target": "x:y"}, "give either id"),
        ({"target": "gymnasium"}, "write package.module:callable"),
        ({**LAKE, "actions": ["left"]}, r"1 names for the 4 values of Discrete\(4\)"),
        ({**LAKE, "style": "loud"}, "must be plain or chat"),
    ],
)
def test_wrong_kwargs_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymEnv(**kwargs)


def test_gem_guess_the_number() -> None:
    """The real package: whole replies go to the game, which wants ``\\boxed{}``."""
    pytest.importorskip("gem", reason="needs GEM in an environment of its own; see the top of this file")
    env = GymEnv(target="gem.envs.registration:make", options={"env_id": "game:GuessTheNumber-v0-hard"})
    assert "Guess The Number" in str(env.reset(task(5)))
    low, high = 1, 50
    for _ in range(7):
        guess = (low + high) // 2
        step = env.step(act(f"My guess is \\boxed{{{guess}}}."))
        if step.done:
            break
        low, high = (guess + 1, high) if "higher" in str(step.observation) else (low, guess - 1)
    assert step.metrics["success"] == 1.0 and step.reward > 0
    env.reset(task(5))
    assert env.step(act("nonsense")).done, "the game ends at a guess that it cannot read"
    env.close()
