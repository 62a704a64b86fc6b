"""Which samplers go with which controls, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RecipeError, load, load_table


@pytest.mark.parametrize("preset", ["roll-flash", "laminar", "queue-drop"])
def test_presets_that_leave_the_order_to_a_sampler(preset: str) -> None:
    buffer = {"sampler": "advantage", "reuse": 2, "capacity": 0.0 if preset == "queue-drop" else 2.0}
    recipe = load_table({"preset": preset, "buffer": buffer})
    assert recipe.buffer.samples
    assert not load_table({"buffer": {"reuse": 2}}).trainer.stream, "a preset streams where it can"
    assert not load_table({"preset": "staleflow", "buffer": {"writer": "own.py:mine"}}).buffer.samples


def test_own_functions_are_found_relative_to_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('preset = "laminar"\n[buffer]\nsampler = "own.py:mine"\nwriter = "package.own:mine"\n')
    recipe = load(file)
    assert (recipe.buffer.sampler, recipe.buffer.writer) == (f"{tmp_path}/own.py:mine", "package.own:mine")


@pytest.mark.parametrize(
    ("buffer", "tables", "message"),
    [
        ({"sampler": "newest"}, {}, "buffer.sampler: unknown 'newest'; known are fifo, staleness, advantage"),
        ({"writer": "all"}, {}, "buffer.writer = all: name your function: file.py:function"),
        ({"reuse": 0}, {}, "buffer.reuse = 0: must be at least 1"),
        ({"capacity": 0.5}, {}, "buffer.capacity = 0.5: must hold at least one batch"),
        (
            {"sampler": "advantage"},
            {"rollout": {"group_size": 1}, "algorithm": {"advantage": "reinforce"}},
            "group_size",
        ),
        (
            {"sampler": "staleness"},
            {"staleness": {"control": "buffers"}},
            'buffer.sampler = staleness: staleness.control = "buffers" needs its own order to keep its word;',
        ),
        ({"reuse": 2}, {"staleness": {"control": "queue_max"}}, 'buffer.reuse = 2: staleness.control = "queue_max"'),
        (
            {"capacity": 2.0},
            {"staleness": {"control": "queue_drop"}},
            "queue_drop has one already; set staleness.queue",
        ),
        ({"reuse": 2}, {"staleness": {"bound": 0}}, "staleness.bound is 0; set that to at least 1"),
        ({"reuse": 2}, {"trainer": {"stream": True}}, "set it to false, or leave out buffer.reuse"),
    ],
)
def test_what_does_not_go_together_is_refused_with_one_line(
    buffer: dict[str, Any], tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        load_table({"preset": "roll-flash", **tables, "buffer": buffer})
    assert message in str(raised.value) and "\n" not in str(raised.value)
