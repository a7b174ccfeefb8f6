"""A run's keys: `schema` has those of all trainers, a module of a trainer's name its own; `reading` makes a Run of TOML
files and command-line overrides, `writing` TOML."""

from rlnumba.config.distill import DistillConfig, DistillRun
from rlnumba.config.dpo import DPOConfig, DPORun, PreferenceLossConfig
from rlnumba.config.grpo import GRPOConfig, GRPORun, PolicyLossConfig
from rlnumba.config.keys import key
from rlnumba.config.kto import KTOConfig, KTOLossConfig, KTORun
from rlnumba.config.lora import LoraConfig, QuantizationConfig
from rlnumba.config.ppo import CriticConfig, PPOConfig, PPORun
from rlnumba.config.reading import likeliest_trainer, load_run
from rlnumba.config.reward import RewardConfig, RewardRun
from rlnumba.config.rloo import RLOOConfig, RLOORun
from rlnumba.config.schema import DataConfig, EngineConfig, EvalConfig, Run, TrainConfig
from rlnumba.config.sections.agents import EnvironmentConfig, RolloutConfig, ToolsConfig
from rlnumba.config.sections.asynchronous import AsyncConfig
from rlnumba.config.sections.deploy import DeployConfig
from rlnumba.config.sections.rewards import RewardsConfig
from rlnumba.config.sections.teacher import TeacherConfig
from rlnumba.config.sft import SFTConfig, SFTRun
from rlnumba.config.writing import to_toml
