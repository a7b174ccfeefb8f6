"""Which kernels a run is going to launch: its steps, run without memory (runtime/shapes.py).

    python -m rlnumba.trainers.kernel_list        the process that compiles them (runtime/ahead_of_time.py)

A trainer on rows takes a step on the rows of its largest micro-batch, by its own train_step; one on prompts takes steps
on invented completions of several lengths, after the engine's steps of all sizes (engine/kernel_list.py).
"""

import numpy as np

from rlnumba.engine import kernel_list
from rlnumba.model.lora import Adapter, lora_of_run
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import Weights
from rlnumba.runtime import compile_pool
from rlnumba.runtime.shapes import launches_only
from rlnumba.trainers import grpo, plan, ppo, rloo, rollout

# Completions are taken to have max_completion_length divided by these: the GEMM's configuration follows from the tokens
# of a micro-batch.
SHORTER = (1, 2, 4, 8)
GIB = 1 << 30


def list_signatures(request, properties):
    """The signatures of the kernels that a run needs on a GPU of these device.Properties: list.

    request: (trainer's name, Run). Raises UserError for a model or data that the run could not read.
    """
    kind, run = request
    planner = plan.Planner(kind, run, True, 64 * GIB)
    step, dtype = plan.step_of(planner, run), run.train.dtype or planner.config.dtype
    with launches_only(properties) as signatures:
        if step.prompts:
            launch_engine(planner, run, dtype, step.prompts)
        policy, critic = plan.make_policies(planner.config, dtype, run, step)
        with policy.context.use():
            if kind in plan.ROW_TRAINERS:
                step.run(policy, critic)
            else:
                launch_prompt_trainer(kind, run, policy, critic, step.prompts)
    return signatures


def launch_engine(planner, run, dtype, prompt_lengths):
    """The steps of the engine that generates for a run on prompts."""
    train = run.train
    model = Transformer(planner.config, Weights(planner.config, dtype))
    lora = None if run.lora is None else lora_of_run(run.lora, planner.config)
    if lora is not None:
        model.adapter = Adapter(planner.config, lora, dtype)
    n, longest = train.rollout_batch_size // train.prompts_per_rollout, train.max_completion_length
    workload = tuple(prompt_lengths), n, longest, train.sampling_mask_replay
    kernel_list.launch_steps(model, kernel_list.Request(planner.config, dtype, lora, run.engine, *workload))


def launch_prompt_trainer(kind, run, policy, critic, prompt_lengths):
    """Optimizer steps of a trainer on prompts, on completions of several lengths."""
    train = run.train
    for divisor in SHORTER:
        rollouts = invented_rollouts(train, prompt_lengths, max(train.max_completion_length // divisor, 1))
        if kind == "ppo":
            launch_ppo(run, policy, critic, rollouts)
            continue
        trainer = grpo if kind == "grpo" else rloo
        if kind == "grpo":
            launch_advantages(train, run.rewards.funcs)
            grpo.add_logprobs(policy, rollouts, on_policy=False)
        else:
            rloo.add_logprobs(policy, rollouts)
            rloo.leave_one_out(np.zeros(train.num_generations), train)
        for on_policy in (True, False):
            trainer.train_step(policy, rollouts.parts(train.per_device_train_batch_size, on_policy), 0.0)


def launch_advantages(train, functions):
    """GRPO's advantages of one group, of one reward of each function."""
    samples = [rollout.Sample(None, None, np.zeros(len(functions)), float(i), {}) for i in range(train.num_generations)]
    rollout.set_advantages([samples], np.ones(len(functions)), train.scale_rewards, train.multi_objective_aggregation)


def launch_ppo(run, policy, critic, rollouts):
    """PPO's evaluation of a batch, and its optimizer steps on it."""
    actor = ppo.ActorCritic(policy, critic, run)
    actor.experience = ppo.Experience(rollouts, 0, 0.0, actor.score_moments)
    ppo.evaluate_tokens(actor, rollouts)
    ppo.estimate_advantages(actor.buffer, rollouts, np.zeros(len(rollouts.advantages)), run.train)
    ppo.train_step(actor, None, 0.0)


def invented_rollouts(train, prompt_lengths, completion_length):
    """Rollouts of one micro-batch: completions of one length, of prompts of these lengths in turn."""
    rows = train.per_device_train_batch_size
    prompts = np.resize(np.array(prompt_lengths, np.int32), rows)
    completions = np.full(rows, completion_length, np.int32)
    tokens, none = rows * completion_length, np.empty(0, np.float32)
    zeros = np.zeros(tokens, np.float32)
    return rollout.Rollouts(
        token_ids=np.zeros(int(prompts.sum()) + tokens, np.int32),
        prompt_lengths=prompts,
        completion_lengths=completions,
        loss_mask=zeros + 1,
        rollout_logprobs=zeros - 1,
        advantages=np.ones(rows, np.float32),
        old_logprobs=none,
        ref_logprobs=none,
        thresholds=zeros if train.sampling_mask_replay else none,
    )


if __name__ == "__main__":
    compile_pool.compile_listed(list_signatures)
