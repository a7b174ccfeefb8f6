"""Which Run a trainer's files are read as."""

from rlnumba.config.dpo import DPORun
from rlnumba.config.grpo import GRPORun
from rlnumba.config.kto import KTORun
from rlnumba.config.reward import RewardRun
from rlnumba.config.sft import SFTRun

RUNS = {"sft": SFTRun, "grpo": GRPORun, "dpo": DPORun, "kto": KTORun, "reward": RewardRun}
