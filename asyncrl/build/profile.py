"""The profile of a server: what ``asyncrl plan --fit`` writes and ``sim.instance.profile`` names.

A JSON file with the cost model's coefficients, the points they were fitted to, the errors, and where that was. Only the
coefficients are used again; the rest says how far to trust them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.config import InstanceModel, RecipeError
from asyncrl.core.cost_model import CostModel
from asyncrl.core.fitting import Fit, PrefillPoint, StepPoint
from asyncrl.core.hardware import cost_model, named
from asyncrl.core.types import Record


class Profile(Record, frozen=True, kw_only=True):
    """``about`` describes engine, model, machine and measurement. ``decode`` and ``prefill`` are the measured points,
    in the order of ``fit``'s errors."""

    about: Mapping[str, str | int]
    fit: Fit
    decode: tuple[StepPoint, ...]
    prefill: tuple[PrefillPoint, ...]


def cost_of(instance: InstanceModel) -> CostModel:
    """The cost model of a simulated server: that of a profile, of a model and a GPU by name, or as written in the
    recipe. Raises ``RecipeError``."""
    if not instance.profile:
        return instance.cost
    if "@" not in instance.profile:
        return load_profile(Path(instance.profile))
    try:
        return cost_model(*named(instance.profile))
    except ValueError as error:
        raise RecipeError(f"sim.instance.profile = {instance.profile}: {error}") from None


def kv_token_s(instance: InstanceModel) -> float:
    """Seconds for the KV of a token from one server to another."""
    known = "@" in instance.profile
    return (named(instance.profile)[0].kv_bytes if known else instance.kv_bytes) / (instance.kv_gb_s * 1e9)


def load_profile(path: Path) -> CostModel:
    """The coefficients of a profile. Raises ``RecipeError`` for a file that is not there, is no profile, or would have
    servers work in no time."""
    remedy = "make it anew with asyncrl plan --fit"
    try:
        cost = msgspec.json.decode(path.read_bytes(), type=Profile).fit.cost
    except OSError as error:
        raise RecipeError(f"sim.instance.profile = {path}: {error.strerror}; {remedy}") from None
    except msgspec.DecodeError as error:
        raise RecipeError(f"sim.instance.profile = {path}: no profile ({error}); {remedy}") from None
    for name in CostModel.__struct_fields__:
        value = getattr(cost, name)
        if not (math.isfinite(value) and value >= 0.0):
            raise RecipeError(f"sim.instance.profile = {path}: {name} = {value:g} is not 0 or more; {remedy}")
    if cost.step(1, 0) <= 0.0:
        raise RecipeError(f"sim.instance.profile = {path}: k2, k3 and k4 are 0: steps take no time; {remedy}")
    return cost


def write_profile(path: Path, profile: Profile) -> None:
    """Write it. Raises ``RecipeError``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    except OSError as error:
        raise RecipeError(f"{path}: cannot write the profile ({error.strerror}); name another file") from None
