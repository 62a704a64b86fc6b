"""The trainer's benchmark, tiny: its peers compute the same, by the code that measures a GPU too."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    return importlib.import_module("trainer")


def test_packed_streamed_and_padded_steps_are_the_same_and_measured(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lengths as on a GPU. Losses that differ would end it."""

    def rounds(args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in args.only.split(","):
            result = trainer.measure(name, args)
            assert name == "padded" or 0 < result["mfu"] < 10  # shown of a GPU only, where it is no accident
            yield name, result
            if dist.is_initialized():
                dist.destroy_process_group()

    out = tmp_path / "trainer.json"
    given = f"--shape tiny --sequences 8 --shortest 300 --longest 500 --budget 400 --steps 1 --json {out}"
    monkeypatch.setattr(sys, "argv", ["trainer.py", *given.split(), "--only", "packed,streamed,padded"])
    monkeypatch.setattr(trainer, "rounds", rounds)
    trainer.main()
    peers = json.loads(out.read_bytes())["peers"]
    assert set(peers) == {"packed", "streamed", "padded"}
    for peer in peers.values():
        assert peer["seconds"] > 0 and peer["tokens_per_second"] > 0
        assert abs(peer["memory_mb"]) < 1000  # of this process, where it is noise
        assert peer["loss"] == pytest.approx(peers["packed"]["loss"], rel=1e-4) != 0
    assert 0.3 < peers["streamed"]["early"] < 1
    assert "tokens in 8 sequences" in capsys.readouterr().out


def test_peers_that_differ_are_no_comparison(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [(name, {"loss": loss, "seconds": [1.0], "memory": 1}) for name, loss in (("packed", 0.5), ("TRL", 0.6))]
    monkeypatch.setattr(trainer, "rounds", lambda args: iter(results))
    with pytest.raises(SystemExit, match=r"the peers do not compute the same: losses \[0\.5, 0\.6\]"):
        trainer.compare(trainer.arguments(["--shape", "tiny", "--sequences", "8"]))
