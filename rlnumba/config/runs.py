"""Which Run a trainer's files are read as."""

from rlnumba.config.dpo import DPORun
from rlnumba.config.grpo import GRPORun
from rlnumba.config.kto import KTORun
from rlnumba.config.ppo import PPORun
from rlnumba.config.reward import RewardRun
from rlnumba.config.rloo import RLOORun
from rlnumba.config.sft import SFTRun

RUNS = {"sft": SFTRun, "grpo": GRPORun, "rloo": RLOORun, "ppo": PPORun}
RUNS |= {"dpo": DPORun, "kto": KTORun, "reward": RewardRun}
