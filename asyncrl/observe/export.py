"""``asyncrl export``: the episodes of a run that ended, as a Parquet file, also while the run goes on."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.observe.run_dir import TRAJECTORIES, RunDirError, read_lines

ROWS = 256
"""In memory at once."""


def export(run_dir: Path, target: Path) -> int:
    """Write ``target``, whole or not at all; the number of episodes. A column for each key of a line in
    ``trajectories.jsonl`` (``recorder.trajectory_line``). Raises ``RunDirError``."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise RunDirError(f"{target}: needs pyarrow; pip install 'asyncrl[parquet]'") from None
    source = run_dir / TRAJECTORIES
    if not source.exists():
        raise RunDirError(f"{source}: not there: give the directory of a run")
    schema, rows, written = _schema(pyarrow), read_lines(source), 0
    part = target.with_name(f"{target.name}.part")
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            while lines := list(islice(rows, ROWS)):
                writer.write_table(pyarrow.Table.from_pylist([_row(line) for line in lines], schema=schema))
                written += len(lines)
        part.replace(target)
    except OSError as error:
        raise RunDirError(f"{target}: cannot write ({error.strerror or error})") from None
    finally:
        part.unlink(missing_ok=True)
    return written


def _row(line: dict[str, Any]) -> dict[str, Any]:
    line["versions"] = [{"version": version, "tokens": tokens} for version, tokens in line["versions"]]
    line["turn_seconds"] = [
        {"waiting": waiting, "generating": generating, "env": env} for waiting, generating, env in line["turn_seconds"]
    ]
    line["metrics"] = list(line["metrics"].items())
    return line


def _schema(pa: Any) -> Any:
    """With types of its own, so that it does not depend on what the first episodes have."""
    i32, f32, f64, text = pa.int32(), pa.float32(), pa.float64(), pa.string()
    seconds = pa.struct([("waiting", f64), ("generating", f64), ("env", f64)])
    columns: dict[str, Any] = {
        **dict.fromkeys(("id", "group"), pa.int64()),
        "index": i32,
        "task": text,
        "state": text,
        "reward": f64,
        "v_traj": i32,
        "versions": pa.list_(pa.struct([("version", i32), ("tokens", i32)])),
        "turns": i32,
        "finish_reason": text,
        "at": f64,
        "metrics": pa.map_(text, f64),
        "turn_ends": pa.list_(i32),
        "turn_rewards": pa.list_(f64),
        "segment_ends": pa.list_(i32),
        "turn_seconds": pa.list_(seconds),
        "reset_s": f64,
        "tokens": pa.list_(i32),
        "logprobs": pa.list_(f32),
        "text": pa.list_(pa.struct([("by", text), ("text", text)])),
    }
    return pa.schema(columns.items())
