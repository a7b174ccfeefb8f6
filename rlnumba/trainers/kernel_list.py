"""Which kernels a run is going to launch: its steps, run without memory (runtime/shapes.py).

A trainer on rows takes a step on the rows of its largest micro-batch, by its own train_step; one on prompts takes steps
on invented completions of several lengths, after the engine's steps of all sizes (engine/kernel_list.py).
runtime/ahead_of_time.py compiles what is listed.
"""

from dataclasses import replace

import numpy as np

from rlnumba.data.files import sampled_rows
from rlnumba.distributed.kernel_list import part_of
from rlnumba.engine import kernel_list
from rlnumba.kernels.checksum import BLOCKS, checksum
from rlnumba.kernels.nn.elementwise import accumulate
from rlnumba.model.lora import lora_of_run
from rlnumba.runtime import device
from rlnumba.runtime.buckets import bucket_of
from rlnumba.runtime.shapes import launches_only
from rlnumba.trainers import grpo, plan, ppo, rloo, rollout
from rlnumba.trainers.micro_batch import target_bucket_of
from rlnumba.trainers.prompt_run import sampling_params

# Completions are taken to have max_completion_length divided by these.
SHORTER = (1, 2, 4, 8)
GIB = 1 << 30
# Rows of the data whose lengths decide, if a step has no more. Tokenizing all of GSM8K takes five seconds.
SAMPLED_ROWS = 256


def list_signatures(request, properties):
    """The kernels that a run needs on a GPU of these device.Properties: two lists of signatures, those of the engine
    and those of the optimizer steps.

    request: (trainer's name, Run). Raises UserError for a model or data that the run could not read.
    """
    kind, run = request
    train = run.train
    with sampled_rows(max(SAMPLED_ROWS, 8 * train.per_device_train_batch_size, num_prompts(kind, train))):
        planner = plan.Planner(kind, run, True, 64 * GIB)
        step, dtype = plan.step_of(planner, run), train.dtype or planner.config.dtype
        config = planner.config
        if run.lora is not None:
            lora = replace(lora_of_run(run.lora, config), init=None)
            run = replace(run, lora=kernel_list.of_all_layers(lora, config))
        with launches_only(properties) as of_engine:
            if step.prompts:
                request = engine_request(config, run, dtype, step.prompts)
                kernel_list.launch_steps(request)
                if run.deploy.tensor_parallel_size > 1:
                    kernel_list.launch_steps(request, part_of(run.deploy.tensor_parallel_size))
            if run.deploy.num_infer_gpus:
                # Of weights that are pushed.
                checksum(*(device.xp().empty(size, np.int64) for size in (1, BLOCKS)))
        with launches_only(properties) as of_steps:
            policy, critic = plan.make_policies(config, dtype, run, step)
            with policy.context.use():
                if train.accumulates_gradients and policy.grads.lm_head is not None:
                    # What a step launches from its second micro-batch on.
                    accumulate(policy.grads.lm_head, policy.grads.lm_head)
                launch_longest(kind, run, policy, critic, step)
            if kind not in plan.ROW_TRAINERS:
                # Of a run that recomputes the first layers alone, some layers do not stand for all.
                some = config if train.recompute_num_layers else kernel_list.short(config)
                policy, critic = plan.make_policies(some, dtype, run, step)
                with policy.context.use():
                    launch_prompt_trainer(kind, run, policy, critic, step.prompts, SHORTER[1:])
                    launch_token_buckets(kind, run, policy, critic, step.prompts)
            if train.chooses_activations:
                # Of its modes, "full" and "minimal" have the same kernels, and "selective" has one of its own.
                selective = replace(run, train=replace(train, activation_memory="selective"))
                policy, critic = plan.make_policies(kernel_list.short(config), dtype, selective, step)
                with policy.context.use():
                    launch_longest(kind, selective, policy, critic, step)
    return [of_engine, of_steps]


def launch_longest(kind, run, policy, critic, step):
    """An optimizer step on the largest micro-batch of a trainer."""
    if kind in plan.ROW_TRAINERS:
        step.run(policy, critic)
    else:
        launch_prompt_trainer(kind, run, policy, critic, step.prompts, SHORTER[:1])


def num_prompts(kind, train):
    """How many prompts a generation has: int, 0 of a trainer on rows."""
    return 0 if kind in plan.ROW_TRAINERS else train.prompts_per_rollout


def engine_request(config, run, dtype, prompt_lengths):
    """The engine's Request of a run on prompts."""
    train = run.train
    params = sampling_params(train, 0, train.rollout_batch_size // train.prompts_per_rollout)
    if run.is_stale:
        # Completions run ahead of training: there are as many more, and some begin while others are decoded.
        prompt_lengths = [*prompt_lengths] * (run.asynchronous.max_staleness + 1)
    workload = tuple(prompt_lengths), params.n, params.max_tokens, kernel_list.extras_of([params])
    return kernel_list.Request(config, dtype, run.lora, run.engine, *workload, mixes=run.is_stale)


def launch_token_buckets(kind, run, policy, critic, prompt_lengths):
    """Optimizer steps of a trainer on prompts in every bucket of tokens and of targets that micro-batches may have:
    the GEMM's configuration follows from these numbers, and completions become shorter or longer in a run."""
    train = run.train
    for length in lengths_of_buckets(train, prompt_lengths):
        rollouts = invented_rollouts(train, prompt_lengths, length)
        if kind == "ppo":
            launch_ppo(run, policy, critic, rollouts)
        else:
            rollouts.is_stale = run.is_stale
            add_logprobs(kind, policy, rollouts)
            parts = rollouts.parts(train.per_device_train_batch_size, on_policy=True)
            (grpo if kind == "grpo" else rloo).train_step(policy, parts, 0.0)


def add_logprobs(kind, policy, rollouts):
    """The log-probs that a step of GRPO or RLOO reads beside those of the rollout."""
    if kind == "grpo":
        grpo.add_logprobs(policy, rollouts, on_policy=False)
    else:
        rloo.add_logprobs(policy, rollouts)


def lengths_of_buckets(train, prompt_lengths):
    """Lengths of completions, one for each pair of buckets, of tokens and of targets, that a micro-batch may have."""
    rows = train.per_device_train_batch_size
    of_prompts, found = int(np.resize(np.array(prompt_lengths), rows).sum()), {}
    for length in range(1, train.max_completion_length + 1):
        targets = rows * length
        found.setdefault((bucket_of(of_prompts + targets), target_bucket_of(targets)), length)
    return list(found.values())


def launch_prompt_trainer(kind, run, policy, critic, prompt_lengths, divisors):
    """Optimizer steps of a trainer on prompts, on completions of its longest length divided by each of the divisors."""
    train = run.train
    for divisor in divisors:
        rollouts = invented_rollouts(train, prompt_lengths, max(train.max_completion_length // divisor, 1))
        if kind == "ppo":
            launch_ppo(run, policy, critic, rollouts)
            continue
        trainer = grpo if kind == "grpo" else rloo
        # Also the first generations of a run with older ones are not old.
        for rollouts.is_stale in {False, run.is_stale}:
            if kind == "grpo":
                launch_advantages(train, run.rewards.funcs)
            else:
                rloo.leave_one_out(np.zeros(train.num_generations), train)
            add_logprobs(kind, policy, rollouts)
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
