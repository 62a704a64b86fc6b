"""A kept batch holds everything that was sent, and says why it was kept."""

from __future__ import annotations

from array import array
from pathlib import Path

from safetensors import safe_open

from asyncrl.core.advantage import TurnRewards
from asyncrl.train.client import train_request
from asyncrl.train.dump import save_batch

from .batches import make_batch


def test_a_kept_batch_is_what_was_sent_and_why(tmp_path: Path) -> None:
    batch = make_batch(7, seed=0, groups=1, group_size=3)
    first, second, third = batch.trajectories
    column = array("f", [0.25] * len(second.tokens))
    path = save_batch(tmp_path, train_request(batch, [1.5, column, None]), "the loss is not finite")
    assert path == tmp_path / "bad-batch-7.safetensors"
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"step": "7", "reason": "the loss is not finite"}
        assert file.get_tensor("lengths").tolist() == [len(t.tokens) for t in batch.trajectories]
        for name in ("tokens", "logprobs", "versions"):
            assert file.get_tensor(name).tolist() == [v for t in batch.trajectories for v in getattr(t, name)]
        mask = [*first.loss_mask, *second.loss_mask, *[0] * len(third.loss_mask)]
        assert file.get_tensor("loss_mask").tolist() == mask
        values = [1.5] * len(first.tokens) + [0.25] * len(second.tokens) + [0.0] * len(third.tokens)
        assert file.get_tensor("advantages").tolist() == [v * m for v, m in zip(values, mask, strict=True)]
        assert "rewards" not in file.keys()  # noqa: SIM118


def test_of_a_batch_for_a_critic_the_rewards_are_kept(tmp_path: Path) -> None:
    batch = make_batch(7, seed=0, groups=1, group_size=1)
    [trajectory] = batch.trajectories
    rewards = TurnRewards(ends=(len(trajectory.tokens),), rewards=(1.5,))
    with safe_open(save_batch(tmp_path, train_request(batch, [rewards]), "why"), "numpy") as file:
        column = file.get_tensor("rewards")
    last = max(t for t, m in enumerate(trajectory.loss_mask) if m)
    assert column.tolist() == [1.5 if t == last else 0.0 for t in range(len(column))]
