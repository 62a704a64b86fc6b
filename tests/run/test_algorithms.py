"""A user's own loss and advantage in the main job, with everything else that a step can have; and how they fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Train

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., Train]

OWN = """
import asyncrl

def loss(tokens, options):
    ratio = (tokens.logprobs - tokens.proximal).exp()
    return -ratio.clamp(max=options.importance_cap) * tokens.advantages

def advantage(batch):
    mean = sum(t.reward for t in batch.trajectories) / len(batch.trajectories)
    return [[t.reward - mean] * len(t.tokens) for t in batch.trajectories]

def confused(batch):
    return [1.0]

class Dialogue(asyncrl.Env):
    async def reset(self, task):
        self.turn = 0
        return task.data["prompt"]

    async def step(self, action):
        self.turn += 1
        return asyncrl.Step(observation="1=", reward=action.text.count("0") / 12, done=self.turn == 3)

async def two_questions(task, agent):
    await agent.complete(task.data["prompt"])
    reply = await agent.complete("2+2=")
    return reply.text.count("0") / 12
"""


def set_(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", f"algorithm.{override}")]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_own_loss_and_advantage_with_a_reference_and_several_updates(
    train: Start, tiny_recipe: Path, own: Path
) -> None:
    run = train(
        *set_(
            f"loss={own}:loss",
            f"advantage={own}:advantage",
            "mini_batches=2",
            "epochs=2",
            "kl_coef=0.01",
            "entropy_coef=0.001",
            "reject=sequence",
            "overlong_limit=12",
            "overlong_buffer=6",
        )
    )
    assert run.wait() == 0, run.text()
    run.check_ended_cleanly()
    metrics = run.lines("metrics.jsonl")
    assert [line["trainer/updates"] for line in metrics] == [4.0] * 4
    assert metrics[-1]["trainer/reference_kl"] > 0
    assert all(line["trainer/advantage_std"] > 0 for line in metrics)
    assert (
        sum(metrics[-1].get(f"trainer/tokens_staleness_{n}", 0) for n in range(9))
        == metrics[-1]["trainer/trained_tokens"]
    )


def test_turns_are_credited_one_by_one_in_a_dialogue(train: Start, tiny_recipe: Path, own: Path) -> None:
    run = train(
        *["--set", f"env.target={own}:Dialogue", "--set", "env.max_turns=3", "--set", "run.steps=2"],
        *set_("credit=turn", "gamma=0.9", "advantage=rloo", "loss=gspo", "aggregation=sequence_mean"),
    )
    assert run.wait() == 0, run.text()
    assert all(line["trainer/grad_norm"] > 0 for line in run.lines("metrics.jsonl"))


def test_a_critic_judges_segments_by_those_that_follow(train: Start, tiny_recipe: Path, own: Path) -> None:
    run = train(
        *["--set", f"env.target={own}:two_questions", "--set", "env.max_turns=2", "--set", "run.steps=2"],
        *["--set", "staleness.bound=0"],
        *set_("advantage=gae", "credit=turn", "gamma=0.5", "gae_lambda=1.0"),
    )
    assert run.wait() == 0, run.text()
    run.check_ended_cleanly()
    trained = [line for line in run.lines("trajectories.jsonl") if line["state"] == "consumed"]
    assert all(len(line["segment_ends"]) == 2 for line in trained)
    # Two steps a trajectory, of which the first has half the return of the second.
    metrics = run.lines("metrics.jsonl")
    for step, line in enumerate(metrics):
        rewards = [t["reward"] for t in trained[16 * step : 16 * (step + 1)]]
        assert line["trainer/return_mean"] == pytest.approx(0.75 * sum(rewards) / 16, rel=1e-4)
    assert all(line["trainer/value_loss"] > 0 for line in metrics)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("advantage={own}:confused", "own.py:confused: returned 1 advantages for 16 trajectories; return one for each"),
        ("loss={own}:confused", "own.py:confused failed on a trial"),
    ],
)
def test_what_cannot_be_used_ends_the_run_with_one_line(
    train: Start, tiny_recipe: Path, own: Path, override: str, says: str
) -> None:
    run = train(*set_(override.format(own=own)))
    assert run.wait() != 0
    assert says in run.text()
    assert "Traceback" not in run.text()
