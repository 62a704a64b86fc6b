"""A published system is one row of settings (DESIGN.md §6); the recipe may override any of them by name."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # Synchronous training: nothing starts until the servers hold the new version.
    "sync": {
        "staleness": {"control": "inflight_cap", "bound": 0.0},
        "update": {"running": "drain"},
        "engine": {"routing": "least_loaded"},
    },
    # One step off-policy: the next batch is generated while this one is trained; no trajectory mixes versions.
    "one-step": {
        "staleness": {"control": "inflight_cap", "bound": 1.0},
        "update": {"running": "drain"},
        "engine": {"routing": "least_loaded"},
    },
    # ROLL Flash §4: suspend, update, resume; running requests go on with their tokens on the new weights.
    "roll-flash": {
        "staleness": {"control": "inflight_cap", "bound": 1.0},
        "update": {"running": "interrupt"},
        "engine": {"routing": "prefix_affine"},
    },
}
