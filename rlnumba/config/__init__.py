"""A run's keys: `schema` has them, with defaults and checks; TOML files and command-line overrides become a Run."""

from rlnumba.config.schema import (
    ALIASES,
    DataConfig,
    EngineConfig,
    GRPOConfig,
    GRPORun,
    RewardsConfig,
    Run,
    SFTConfig,
    SFTRun,
    TrainConfig,
    key,
    keys_of,
    load_run,
    split_optional,
    to_toml,
    toml_value,
)

__all__ = [
    "ALIASES",
    "DataConfig",
    "EngineConfig",
    "GRPOConfig",
    "GRPORun",
    "RewardsConfig",
    "Run",
    "SFTConfig",
    "SFTRun",
    "TrainConfig",
    "key",
    "keys_of",
    "load_run",
    "split_optional",
    "to_toml",
    "toml_value",
]
