"""Secrets are left out of every copy of a recipe, and of the command line that gave them."""

from __future__ import annotations

import json

import pytest

from asyncrl.config import dumps, load_table, loads_json
from asyncrl.config.redact import REDACTED, redacted_command

SECRET = "sk-very-secret-0123"


@pytest.mark.parametrize(
    "key", ["api_key", "API_KEY", "apikey", "judge_api_key", "hub_token", "password", "client-secret", "access_key"]
)
def test_a_key_that_says_so_hides_its_value_at_any_depth(key: str) -> None:
    kwargs = {key: SECRET, "judge": {"deep": [{key: SECRET}], key: [SECRET]}, "level": "easy"}
    table = {"env": {"kwargs": kwargs}, "sources": {"a": {"target": "x:Y", "train": "t", "kwargs": {key: SECRET}}}}
    text = dumps(load_table(table))
    assert SECRET.encode() not in text
    written = json.loads(text)
    assert written["env"]["kwargs"][key] == written["env"]["kwargs"]["judge"]["deep"][0][key] == REDACTED
    assert written["env"]["kwargs"]["level"] == "easy"
    loads_json(text)


def test_the_value_of_a_secret_variable_is_hidden_under_any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    monkeypatch.setenv("SOME_TOKEN", "easy")  # too short to be one
    recipe = load_table({"env": {"kwargs": {"header": SECRET, "level": "easy"}}})
    assert SECRET.encode() not in dumps(recipe)
    assert json.loads(dumps(recipe))["env"]["kwargs"]["level"] == "easy"
    assert recipe.env.kwargs["header"] == SECRET, "the run itself has it"


def test_of_a_url_the_password_is_hidden_and_the_rest_stays() -> None:
    recipe = load_table({"engine": {"urls": [f"http://me:{SECRET}@host:30000"]}})
    assert json.loads(dumps(recipe))["engine"]["urls"] == [f"http://me:{REDACTED}@host:30000"]


def test_settings_of_our_own_are_never_taken_for_secrets() -> None:
    recipe = load_table({})
    assert REDACTED.encode() not in dumps(recipe)
    assert loads_json(dumps(recipe)) == recipe


def test_a_command_line_is_written_without_them() -> None:
    command = ["asyncrl", "train", "r", "--set", f"env.kwargs.api_key={SECRET}", "--set", "run.steps=3", "--run-dir=x"]
    assert redacted_command(command) == [*command[:4], f"env.kwargs.api_key={REDACTED}", *command[5:]]
    assert redacted_command([f"--set=env.kwargs.api_key='{SECRET}'"]) == [f"--set=env.kwargs.api_key={REDACTED}"]
