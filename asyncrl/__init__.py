"""asyncrl: an asyncio single-controller runtime for asynchronous RL post-training of language models.

What a user imports. General layout, bottom to top (DESIGN in README.md): ``core`` decides in plain functions; ``env``,
``ports``, ``wire`` and ``config`` are the contracts; ``runtime`` acts in coroutines; ``engine``, ``serve``, ``train``,
``weights``, ``sim``, ``envs`` and ``observe`` are worlds and adapters; ``build`` wires them; ``cli`` starts them.
"""

from typing import TYPE_CHECKING, Any

from asyncrl.env import (
    Action,
    Agent,
    Cost,
    Env,
    EnvDown,
    EpisodeOver,
    Observation,
    Reply,
    Response,
    Step,
    SyncEnv,
    Task,
    ToolCall,
    rows_by,
)

if TYPE_CHECKING:
    from asyncrl.envs.program import run_program

__all__ = [
    "Action",
    "Agent",
    "Cost",
    "Env",
    "EnvDown",
    "EpisodeOver",
    "Observation",
    "Reply",
    "Response",
    "Step",
    "SyncEnv",
    "Task",
    "ToolCall",
    "__version__",
    "rows_by",
    "run_program",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``run_program`` when it is first asked for: it brings asyncio, which a plan or a check does without."""
    if name == "run_program":
        from asyncrl.envs.program import run_program

        return run_program
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
