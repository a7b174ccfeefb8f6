"""The kernels that a run is going to launch, found by its steps run without memory (runtime/shapes.py).

A trainer on rows takes a step on the rows of its largest micro-batch, by its own train_step; one on prompts takes steps
on invented completions of several lengths, after the engine's steps of all sizes (engine/kernel_list.py).
runtime/compile/ahead_of_time.py compiles what is listed.
"""

from dataclasses import replace

import numpy as np

from rlnumba.data.files import sampled_rows
from rlnumba.engine import kernel_list
from rlnumba.kernels.logprob.ops import launch_copies
from rlnumba.kernels.nn.elementwise import accumulate
from rlnumba.kernels.peer.checksum import BLOCKS, checksum
from rlnumba.model.lora import lora_of_run
from rlnumba.parallel.kernel_list import part_of
from rlnumba.runs.micro_batch import target_bucket_of
from rlnumba.runs.planning.plan import Planner, step_of
from rlnumba.runs.planning.planned import invented_rollouts, make_policies
from rlnumba.runs.prompt_run import generation_params
from rlnumba.runtime import device
from rlnumba.runtime.buckets import bucket_of
from rlnumba.runtime.shapes import launches_only

# Completions are also taken to have max_completion_length divided by these.
SHORTER = (2, 4, 8)
GIB = 1 << 30
# Rows of the data whose lengths decide, if a step has no more. Tokenizing all of GSM8K takes five seconds.
SAMPLED_ROWS = 256


def list_signatures(run, properties):
    """The kernels that a run needs on a GPU of these device.Properties: two lists of signatures, those of the engine
    and those of the optimizer steps.

    Raises UserError for a model or data that the run could not read.
    """
    train = run.train
    num_prompts = train.generation.num_prompts if run.generates else 0
    with sampled_rows(max(SAMPLED_ROWS, 8 * train.per_device_train_batch_size, num_prompts)):
        planner = Planner(run, True, 64 * GIB)
        step, dtype = step_of(planner, run), train.dtype or planner.config.dtype
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
                # The checksums of weights that are pushed.
                checksum(*(device.xp().empty(size, np.int64) for size in (1, BLOCKS)))
        with launches_only(properties) as of_steps:
            policy, critic = make_policies(config, dtype, run, step)
            with policy.context.use():
                if train.accumulates_gradients and policy.grads.lm_head is not None:
                    # A step launches it from its second micro-batch on.
                    accumulate(policy.grads.lm_head, policy.grads.lm_head)
                launch(step.calls(policy, critic))
            if step.rehearse is not None:
                # Some layers do not stand for all in a run that recomputes the first layers alone.
                some = config if train.recompute_num_layers else kernel_list.short(config)
                policy, critic = make_policies(some, dtype, run, step)
                with policy.context.use():
                    for rollouts, every_form in other_rollouts(planner.trainer, train, step.prompts):
                        launch(step.rehearse(policy, critic, rollouts, every_form))
                    # Rows of groups with equal rewards have no gradient. Which ones, only the device knows.
                    launch_copies()
            if train.chooses_activations:
                # The modes "full" and "minimal" have the same kernels, and "selective" has one of its own.
                selective = replace(run, train=replace(train, activation_memory="selective"))
                selective_step = step_of(planner, selective)
                policy, critic = make_policies(kernel_list.short(config), dtype, selective, step)
                with policy.context.use():
                    launch(selective_step.calls(policy, critic))
    return [of_engine, of_steps]


def launch(calls):
    """Take a step on the largest micro-batch, or on other ones: the functions of Step.calls or Step.rehearse."""
    for call in calls:
        call()


def engine_request(config, run, dtype, prompt_lengths):
    """The engine's Request of a run on prompts."""
    train = run.train
    params = generation_params(train, 0)
    if run.is_stale:
        # Completions run ahead of training: there are as many more, and some begin while others are decoded.
        prompt_lengths = [*prompt_lengths] * (run.asynchronous.max_staleness + 1)
    workload = tuple(prompt_lengths), params.n, params.max_tokens, kernel_list.extras_of([params])
    options = {"mixes": run.is_stale, "quantization": run.quantization}
    return kernel_list.Request(config, dtype, run.lora, run.engine, *workload, **options)


def other_rollouts(trainer, train, prompt_lengths):
    """(Rollouts of a micro-batch, whether it is of every form that a step may have) of a trainer on prompts: shorter
    completions, and those of each bucket of tokens and of targets that micro-batches may have. The GEMM's configuration
    follows from these numbers, and completions become shorter or longer in a run."""
    for divisor in SHORTER:
        length = max(train.max_completion_length // divisor, 1)
        yield invented_rollouts(train, prompt_lengths, length, num_rows(trainer, train, prompt_lengths, length)), True
    for rows, length in sizes_of_buckets(trainer, train, prompt_lengths):
        yield invented_rollouts(train, prompt_lengths, length, rows), False


def num_rows(trainer, train, prompt_lengths, length):
    """The most completions of this length that a micro-batch may have: int."""
    return trainer.completions_at_once(train, max(prompt_lengths) + length)


def sizes_of_buckets(trainer, train, prompt_lengths):
    """(Number, length) of completions, one for each pair of buckets, of tokens and of targets, that a micro-batch may
    have: list."""
    found = {}
    for length in range(1, train.max_completion_length + 1):
        rows = num_rows(trainer, train, prompt_lengths, length)
        of_prompts, targets = int(np.resize(np.array(prompt_lengths), rows).sum()), rows * length
        found.setdefault((bucket_of(of_prompts + targets), target_bucket_of(targets)), (rows, length))
    return list(found.values())
