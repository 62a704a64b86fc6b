"""The recipe: what a run is, and how it is read. Imports no torch.

Paths in a recipe are relative to the recipe's own folder.
"""

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.base import RecipeError, Section
from asyncrl.config.load import check, dumps, load, load_table, loads_json, under_preset
from asyncrl.config.recipe import (
    EngineConfig,
    EnvConfig,
    ModelConfig,
    Recipe,
    RolloutConfig,
    RunConfig,
    SetupConfig,
    Source,
    SourceConfig,
    StalenessConfig,
    TaskConfig,
    TrainerConfig,
    UpdateConfig,
    WeightsConfig,
)
from asyncrl.config.virtual import (
    EnvModel,
    FaultConfig,
    InstanceModel,
    SimConfig,
    TrainerModel,
    WeightsModel,
)

__all__ = [
    "AlgorithmConfig",
    "EngineConfig",
    "EnvConfig",
    "EnvModel",
    "FaultConfig",
    "InstanceModel",
    "ModelConfig",
    "Recipe",
    "RecipeError",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SetupConfig",
    "SimConfig",
    "Source",
    "SourceConfig",
    "StalenessConfig",
    "TaskConfig",
    "TrainerConfig",
    "TrainerModel",
    "UpdateConfig",
    "WeightsConfig",
    "WeightsModel",
    "check",
    "dumps",
    "load",
    "load_table",
    "loads_json",
    "under_preset",
]
