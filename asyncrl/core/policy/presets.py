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
    # What ROLL Flash (figure 1, §5.1) compares itself with: a batch is split over the servers, a group is one request,
    # and nothing counts before all of it has ended.
    "sync-naive": {
        "staleness": {"control": "inflight_cap", "bound": 0.0},
        "update": {"running": "drain"},
        "rollout": {"queue_scheduling": False, "expand_num_return_sequences": False},
        "engine": {"routing": "round_robin"},
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
    # AReaL, as StaleFlow (§2.2) compares itself with it: what is in flight is capped as a whole; all servers take new
    # weights after each step, and running requests go on with their tokens on any of them.
    "areal": {
        "staleness": {"control": "inflight_cap", "bound": 1.0},
        "update": {"running": "interrupt"},
        "engine": {"routing": "least_loaded"},
    },
    # StaleFlow §4, §5: a place for every group from its first token on; a coordinator that sends each request where it
    # helps most, moves requests between servers, and has each server take new weights when that lets new work in.
    "staleflow": {
        "staleness": {"control": "buffers", "bound": 1.0},
        "update": {"running": "interrupt", "overlap": True, "synchronization": "selective"},
        "engine": {"routing": "waterfall", "migration": "throughput"},
    },
    # Laminar §3 to §6: each server generates a batch of its own on one version and takes new weights when that has
    # ended or gone to another server; no trajectory mixes versions, no bound is set. The buffer's capacity is our
    # choice, the paper gives none.
    "laminar": {
        "staleness": {"control": "inherent", "queue": 2.0},
        "update": {"running": "drain", "overlap": True, "synchronization": "when_empty"},
        "engine": {"routing": "own_batch", "migration": "repack", "fit_cost": False},
    },
    # DORA §4: a sliding window of versions that generate side by side, each trajectory wholly by one; servers are
    # shared out among the versions in proportion to their work. τ and the threshold are our choice.
    "dora": {
        "staleness": {"control": "window", "bound": 2.0},
        "update": {"running": "drain", "overlap": True, "synchronization": "when_empty"},
        "engine": {"routing": "newest_first", "migration": "repartition", "kv_threshold": 0.9, "fit_cost": False},
    },
    # Ours, the default: ROLL Flash's columns, and a trainer that begins with what is certain of its batch while the
    # rest is generated. Under a bound, servers wait for the longest episodes of a batch, and training waits for them
    # too: what of it is done before they end is won (bench/figures/presets.py).
    "asyncrl": {
        "staleness": {"control": "inflight_cap", "bound": 1.0},
        "update": {"running": "interrupt"},
        "engine": {"routing": "prefix_affine"},
        "trainer": {"stream": True},
    },
    # The staleness paper: servers never wait, weights come in flight, and a full queue drops its oldest group; a queue
    # of one batch is what it recommends.
    "queue-drop": {
        "staleness": {"control": "queue_drop", "queue": 1.0},
        "update": {"running": "interrupt"},
        "engine": {"routing": "least_loaded"},
    },
    # Its counterpart: what is too stale is dropped, which favours short trajectories.
    "queue-max": {
        "staleness": {"control": "queue_max", "bound": 2.0},
        "update": {"running": "interrupt"},
        "engine": {"routing": "least_loaded"},
    },
}
