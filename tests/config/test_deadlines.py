"""An outer deadline that comes before an inner one is named, with both keys."""

from __future__ import annotations

from asyncrl.config import Recipe, load_table
from asyncrl.config.deadlines import inversions


def test_the_defaults_have_none() -> None:
    assert list(inversions(Recipe())) == []


def test_an_outer_deadline_that_comes_first_is_named() -> None:
    short = dict.fromkeys(("reset_timeout_s", "step_timeout_s", "reward_timeout_s"), 5)
    recipe = load_table({"env": {**short, "episode_timeout_s": 30}, "engine": {"patience_s": 10}})
    episode, patience = inversions(recipe)
    assert episode.startswith("env.episode_timeout_s = 30 comes before engine.idle_timeout_s = 120: ")
    assert patience.startswith("engine.patience_s = 10 comes before engine.connect_timeout_s = 300: ")


def test_without_streaming_a_request_is_silent_to_its_end() -> None:
    recipe = load_table({"engine": {"stream_interval": 0, "idle_timeout_s": 1e4}, "env": {"episode_timeout_s": 300}})
    [line] = inversions(recipe)
    assert "engine.request_timeout_s = 600" in line


def test_a_stall_is_what_outlasts_every_single_wait() -> None:
    assert Recipe().stall_s == 660
    assert load_table({"env": {"step_timeout_s": 3000, "episode_timeout_s": 9000}}).stall_s == 3060
    assert load_table({"trainer": {"compile": True}}).stall_s == 3660
    assert load_table({"run": {"stall_s": 45}}).stall_s == 45
