"""All trainers: commands, Python classes, ranks, evaluations, plans and kernel lists iterate over these records."""

from rlnumba.trainers import distill, dpo, grpo, kto, ppo, reward, rloo, sft

# By the name of their command.
TRAINERS = {
    module.TRAINER.run_class.trainer: module.TRAINER for module in (sft, grpo, rloo, ppo, distill, dpo, kto, reward)
}
