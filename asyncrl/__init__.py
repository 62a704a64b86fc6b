"""asyncrl: an asyncio single-controller runtime for asynchronous RL post-training of language models.

What a user imports. General layout, bottom to top (DESIGN in README.md): ``core`` decides in plain functions; ``env``,
``ports``, ``wire`` and ``config`` are the contracts; ``runtime`` acts in coroutines; ``engine``, ``serve``, ``train``,
``weights``, ``sim``, ``envs`` and ``observe`` are worlds and adapters; ``build`` wires them; ``cli`` starts them.
"""

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
