"""A run's keys: `schema` has them, `reading` makes a Run of TOML files and command-line overrides, `writing` TOML."""

from rlnumba.config.reading import load_run
from rlnumba.config.schema import (
    DataConfig,
    EngineConfig,
    GRPOConfig,
    GRPORun,
    PolicyLossConfig,
    RewardsConfig,
    Run,
    SFTConfig,
    SFTRun,
    TrainConfig,
    key,
)
from rlnumba.config.writing import to_toml
