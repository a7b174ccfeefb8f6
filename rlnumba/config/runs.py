"""The Run of each trainer, in the order in which commands, messages and documentation list them."""

from rlnumba.config.distill import DistillRun
from rlnumba.config.dpo import DPORun
from rlnumba.config.grpo import GRPORun
from rlnumba.config.kto import KTORun
from rlnumba.config.ppo import PPORun
from rlnumba.config.reward import RewardRun
from rlnumba.config.rloo import RLOORun
from rlnumba.config.schema import Run
from rlnumba.config.sft import SFTRun

# The Runs by the trainer's name.
RUNS = {each.trainer: each for each in (SFTRun, GRPORun, RLOORun, PPORun, DistillRun, DPORun, KTORun, RewardRun)}
# Messages name the trainers that read a key.
Run.of_all_trainers = tuple(RUNS.values())
