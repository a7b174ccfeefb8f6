"""Group Relative Policy Optimization: prompts in, better weights out.

    generation       prompts_per_rollout prompts x num_generations completions from the engine, with their rewards;
                     shuffled once, cut into rollout_steps micro-batches, each trained on num_iterations times
    optimizer step   gradient_accumulation_steps micro-batches, or those of global_batch_size completions

Engine and policy read the same weights, so nothing is copied between them. Where their arithmetic agrees bit for bit,
the sampler's log-probs are the old policy's and need no forward, and on-policy they give the loss's gradient before the
forward has ended.

Sources: DeepSeekMath (arXiv 2402.03300); TRL 1.16's GRPOTrainer, whose names, defaults and semantics these are.
Dynamic sampling: DAPO (arXiv 2503.14476).
"""

import copy
import json
import math
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from itertools import groupby, takewhile
from typing import NamedTuple

import numpy as np

from rlnumba import data
from rlnumba.config.rollout import SAMPLING_KEYS
from rlnumba.distributed.ray_cluster import connected
from rlnumba.distributed.replicas import llm_on_ranks
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.nn.elementwise import fill
from rlnumba.kernels.rl.policy_loss import METRICS, policy_loss, policy_loss_scale, policy_metrics
from rlnumba.model.config import LM_HEAD
from rlnumba.optim import learning_rate_at
from rlnumba.rewards import TrainerState
from rlnumba.runtime import device
from rlnumba.trainers import dynamic_sampling, evaluation, rollout
from rlnumba.trainers import entropy as entropies
from rlnumba.trainers.asynchronous import encoded, start_ahead
from rlnumba.trainers.core import LateMetrics, Schedule
from rlnumba.trainers.engine_size import engine_size_of
from rlnumba.trainers.loading import load_policy
from rlnumba.trainers.micro_batch import costliest_first
from rlnumba.trainers.prompt_order import PromptOrder, curriculum_values
from rlnumba.trainers.rejection import normalize_corrections, reject
from rlnumba.trainers.replay_buffer import ReplayBuffer
from rlnumba.trainers.reward_model import load_rewards
from rlnumba.trainers.run_folder import Clock, begin_run, log, memory_metrics
from rlnumba.trainers.shared_rollout import RewardsOnRanks


def run_grpo(run, resume=False, reward_funcs=(), communicator=None):
    """Train a GRPORun; writes its output_dir.

    resume: True to continue from the newest readable checkpoint there, an int from that of this step. reward_funcs:
    the functions themselves, where run.rewards.funcs only names them. communicator: of the ranks that train together
    and call this with the same arguments, or None. A signal in the middle of the run and a reward that fails leave a
    checkpoint of the last complete step.
    """
    algorithm = Algorithm("grpo", load, generate, train_step)
    train_on_prompts(algorithm, run.weighted(), resume, reward_funcs, communicator)


def save_final(folder, policy, tokenizer):
    """Write final/ of a RunFolder, the policy as a causal language model."""
    policy.gather_adapter()
    folder.finish(policy.model, tokenizer, LM_HEAD)


class Algorithm(NamedTuple):
    """Where trainers on the model's own completions differ; their loop, train_on_prompts, is the same.

    load(run, folder): (Policy, Tokenizer), folder being the RunFolder. generate(policy, llm, rewards, prompts, order,
    run, trainer_state, index, on_policy, clock, writer): (Rollouts, list of Generation, metrics), where order and index
    are roll_out's and on_policy add_logprobs'; raises RewardError; with [async] it has the keyword ahead, an Ahead.
    train_step(policy, micro_batches, learning_rate): LateMetrics, or a dict. save_final(folder, policy, tokenizer):
    writes what a run ends with.
    """

    name: str
    load: Callable
    generate: Callable
    train_step: Callable
    save_final: Callable = save_final


def train_on_prompts(algorithm, run, resume=False, reward_funcs=(), communicator=None):
    """Train a Run of prompts and rewards by an Algorithm; the arguments are run_grpo's."""
    # A ConfigError of generation_kwargs comes before anything is loaded.
    sampling_params(run.train, 0, 1)
    run = engine_size_of(run, communicator)
    with nodes_of(run, communicator):
        _train_on_prompts(algorithm, run, resume, reward_funcs, communicator)


def nodes_of(run, communicator):
    """A context manager in which the first rank is connected to the Ray cluster of its inference engines, if any."""
    deploy, is_first = run.deploy, communicator is None or communicator.rank == 0
    if not deploy.num_infer_nodes or not is_first:
        return nullcontext()
    processes = deploy.num_infer_gpus // deploy.num_infer_nodes
    return connected("deploy.num_infer_nodes", deploy.num_infer_nodes, processes, device.name() == "cuda")


def _train_on_prompts(algorithm, run, resume, reward_funcs, communicator):
    train = run.train
    folder = begin_run(algorithm.name, run, resume, communicator)
    rewards = load_rewards(run, reward_funcs) if folder.is_first_rank else None
    if rewards is not None:
        # While the model is loaded.
        rewards.start()
    policy, tokenizer = algorithm.load(run, folder)
    model = policy.model
    llm = generator = LLM(model, tokenizer, run.engine)
    if not folder.is_alone:
        generator, rewards = llm_on_ranks(llm, communicator), RewardsOnRanks(rewards, communicator)
    prompts = load_prompts(run.data.train, run, llm)
    eval_data = load_prompts(run.data.eval, run, llm, for_eval=True) if run.data.eval else None
    schedule = MicroBatchSchedule(train, run.data.train, len(prompts.prompts))
    order = prompt_order(prompts, run)
    state = DataState(order)
    groups, ahead = [], None
    if folder.state is not None:
        policy.load_state_dict(folder.state["policy"])
        state.load_state_dict(folder.state["data"], train)
        groups = folder.state["data"].get("groups", [])
        llm.update_weights(folder.step)
    if run.asynchronous is not None:

        def params_of(step, index):
            return sampling_params(train, rollout.derived_seed(run.seed, step, index, 0), train.num_generations)

        ahead = start_ahead(run, policy, llm, prompts, rewards, state, schedule, folder.step, groups, params_of)
        algorithm = algorithm._replace(generate=partial(algorithm.generate, ahead=ahead))
    elif groups:
        raise ConfigError(
            f"{folder.model_folder} has {len(groups)} prompts of an asynchronous run that are not trained on yet: "
            "resume it with its section [async]"
        )

    def completed(step):
        """What a checkpoint keeps of the data after so many steps."""
        return step, state.state_dict(schedule.within_generation(step)), ahead.state() if ahead else []

    complete = completed(folder.step)

    def save():
        writer.flush()
        step, data_state, groups = complete
        data_state |= {"groups": encoded(groups)} if groups else {}
        folder.save(step, model, tokenizer, {"policy": policy.state_dict(), "data": data_state})

    callbacks, control = folder.callbacks, folder.callbacks.control
    with (
        policy.context.use(),
        folder.writer(schedule.total_steps) as writer,
        folder.kept_on_interruption(save),
        closing(ahead) if ahead else nullcontext(),
    ):
        folder.hold_signals()
        if eval_data and train.eval_on_start and folder.step == 0:
            writer.log(0, evaluate(generator, rewards, eval_data, run, TrainerState(0, schedule.total_steps, 0.0)))
        callbacks.begin(folder.step, schedule.total_steps, model)
        if ahead:
            ahead.start()
        clock = Clock()
        for step in range(folder.step, schedule.total_steps):
            trainer_state = TrainerState(step, schedule.total_steps, schedule.epochs_done(step))
            rollouts_of_micro_steps, generation_metrics_of, num_generated = [], [], 0
            micro_steps = schedule.micro_steps(step)
            for micro in micro_steps:
                if micro.begins_generation or state.rollouts is None:
                    with clock.phase("generate"):
                        rollouts, generations, own_metrics = algorithm.generate(
                            policy, generator, rewards, prompts, state.order, run, trainer_state, micro.index,
                            schedule.on_policy, clock, writer,
                        )  # fmt: skip
                    with clock.phase("log"):
                        state.begin(rollouts, generations, rewards.names, own_metrics)
                        num_generated += sum(each.num_generated + each.num_unused for each in generations)
                        writer.completions(step + 1, (row for each in generations for row in each.rows(rewards.names)))
                rollouts_of_micro_steps.append(state.rollouts)
                generation_metrics_of.append(state.metrics)
            with clock.phase("train"):
                micro_batches = [
                    rollouts.part(micro.first, train.per_device_train_batch_size, micro.on_policy)
                    for micro, rollouts in zip(micro_steps, rollouts_of_micro_steps, strict=True)
                ]
                # Signals are held from the update of the weights on.
                metrics = algorithm.train_step(
                    policy, micro_batches, learning_rate_at(train, step, schedule.total_steps)
                )
                policy.move_reference_if_due(step + 1)
                complete = completed(step + 1)
                (ahead or llm).update_weights(step + 1)
                # What was launched counts here.
                device.synchronize()
            last, found = step + 1 == schedule.total_steps, None
            with clock.phase("log"):
                # The run's own names take precedence over those that rewards log.
                metrics = metrics | mean_metrics(generation_metrics_of) | metrics
                metrics |= {"epoch": schedule.epochs_done(step + 1), "num_tokens": state.num_tokens}
                if prompts.dropped_prompts:
                    metrics["dropped_prompts"] = prompts.dropped_prompts
                callbacks.step_end(step + 1, metrics["epoch"], model)
            if eval_data and folder.decided(callbacks.evaluation_due(step + 1, last)):
                with writer.logged_on_interruption(step + 1, metrics), folder.interruptible(), clock.phase("eval"):
                    if ahead:
                        ahead.settle()
                    found = evaluate(generator, rewards, eval_data, run, trainer_state)
                metrics |= found
            with clock.phase("log"):
                if found is not None and folder.is_first_rank:
                    callbacks.evaluated(found, model)
                # What follows counts in the next step.
                metrics |= clock.read()
                metrics["perf/throughput"] = sum(len(part.token_ids) for part in micro_batches) / metrics["step_time"]
                if num_generated and not ahead:
                    metrics["perf/generation_tokens_per_s"] = num_generated / metrics["time/generate"]
                writer.log(step + 1, metrics | memory_metrics())
                callbacks.logged(metrics, model)
                folder.saver.check()
            last, saves = folder.decided((last or control.should_training_stop, control.should_save))
            if last or (step + 1) % train.save_steps == 0 or saves:
                with clock.phase("save"):
                    save()
                    callbacks.call("on_save", model)
            folder.release_signals()
            if last:
                break
        if ahead:
            ahead.close()
        callbacks.call("on_train_end", model)
        writer.flush()
        writer.draw()
        # While the last checkpoint is being written.
        if folder.is_first_rank and (folder.path / "completions.jsonl").exists():
            writer.print(sample_report(llm, prompts, run, folder.path))
        algorithm.save_final(folder, policy, tokenizer)
    log(f"{folder.path} has the curves (curves.png), the completions and the model (final)")


def load(run, folder):
    """(Policy, Tokenizer) of a run, with the reference that train.beta above 0 asks for."""
    return load_policy(run, folder, run.train.beta > 0, run.train.temperature)


def load_prompts(path, run, llm, for_eval=False):
    """The prompts of a file as token ids; logs how many were too long. for_eval: of data.eval."""
    vocab_size = llm.model.config.vocab_size
    prompts = data.load_prompts(path, run.data, llm.tokenizer, llm.max_model_len, vocab_size, for_eval)
    if prompts.dropped_prompts:
        log(f"{path}: {prompts.dropped_prompts} prompts are longer than data.max_prompt_length and are left out")
    return prompts


def generate(policy, llm, rewards, prompts, order, run, trainer_state, index, on_policy, clock, writer, ahead=None):
    """GRPO's generation: see Algorithm."""
    rollouts, generations = roll_out(llm, rewards, prompts, order, run, trainer_state, index, clock, writer, ahead)
    with clock.phase("logprob"):
        add_logprobs(policy, rollouts, on_policy)
    with clock.phase("advantage"):
        groups = [group for each in generations for group in each.groups]
        metrics = {"frac_reward_zero_std": rollout.frac_reward_zero_std(groups, run.train)} | order.shares()
        metrics |= ahead.metrics if ahead else {}
    if order.replay_buffer is not None:
        metrics |= order.replay_buffer.metrics
    if run.train.dynamic_sampling:
        metrics["perf/over_sampled_tokens"] = sum(each.num_unused for each in generations)
    if run.train.rollout_rs is not None:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = rollouts.rejected_fraction
    if run.train.rollout_is_batch_normalize:
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = rollouts.correction_mean
    return rollouts, generations, metrics


def prompt_order(prompts, run):
    """The PromptOrder of a run on PromptData, at its beginning. Raises UserError for a curriculum without numbers."""
    train, column = run.train, run.data.curriculum_column
    curriculum = None if column is None else curriculum_values(prompts, column)
    options = {"difficulty_weights": train.difficulty_weights, "solved_at": train.no_resampling_pass_rate}
    order = PromptOrder(len(prompts.prompts), train.shuffle_dataset, run.seed, curriculum=curriculum, **options)
    if train.replay_buffer_size:
        order.replay_buffer = ReplayBuffer(train.replay_buffer_size)
    return order


def roll_out(llm, rewards, prompts, order, run, trainer_state, index, clock, writer, ahead=None):
    """One generation: (Rollouts to train on, list of Generation with all completions).

    order: PromptOrder, advanced; index: the micro-step that trains on it first. ahead: the Ahead that draws the
    completions, if there is one. Raises RewardError.
    """
    train = run.train
    if ahead:
        chosen, generation = ahead.take(trainer_state, clock, writer.status)
        with clock.phase("advantage"):
            order.record(chosen, generation.groups)
            rollouts = rollouts_of(generation.groups, rewards, order, run, trainer_state, index)
            rollouts.is_stale = is_stale(generation, trainer_state.global_step)
        return rollouts, [generation]
    aggregation = train.multi_objective_aggregation
    llm.wake()
    # prompt -> ids -> completions, text -> reward
    params = sampling_params(
        train, rollout.derived_seed(run.seed, trainer_state.global_step, index, 0), train.num_generations
    )
    num_groups, common = train.prompts_per_rollout, (trainer_state, clock)
    if train.dynamic_sampling:
        window, most = train.over_sampling_batch_size or num_groups, train.max_gen_batches * num_groups

        def differs(group):
            return not rollout.is_uniform(group, aggregation)

        chosen = order.upcoming(num_groups, most)
        limits = num_groups, window, differs
        generation = dynamic_sampling.generate(llm, rewards, prompts, chosen, params, *common, *limits, writer.status)
        chosen = chosen[: len(generation.groups)]
        order.advance(len(chosen))
        groups, uniform = ([group for group in generation.groups if differs(group) == kind] for kind in (True, False))
        # Where too few groups differ in their rewards, the last uniform ones fill the batch; their advantages are 0.
        groups += uniform[len(uniform) - (num_groups - len(groups)) :]
    else:
        chosen = order.take(num_groups)
        generation = rollout.generate(llm, rewards, prompts, chosen, params, *common, writer.status)
        groups = list(generation.groups)
    llm.sleep()
    with clock.phase("advantage"):
        order.record(chosen, generation.groups)
        rollouts = rollouts_of(groups, rewards, order, run, trainer_state, index)
    return rollouts, [generation]


def is_stale(generation, step):
    """Whether some tokens of a Generation were sampled from older weights than those after `step` steps: bool."""
    return {v for sample in generation.samples for v in sample.completion.policy_versions} != {step}


def rollouts_of(groups, rewards, order, run, trainer_state, index):
    """Give the Samples of groups their advantages: Rollouts of all of them. The other arguments are roll_out's."""
    train = run.train
    # reward -> advantage
    if train.advantage_estimator != "grpo" or train.length_penalty:
        rollout.set_estimated_advantages(groups, train, order.memory)
    else:
        weights, aggregation = rewards.weights, train.multi_objective_aggregation
        rollout.set_advantages(groups, weights, train.scale_rewards, aggregation)
    # completions -> batch
    samples = [sample for group in groups for sample in group]
    seed = rollout.derived_seed(run.seed, trainer_state.global_step, index)
    shuffled = np.random.default_rng(seed).permutation(len(samples))
    if order.replay_buffer is None:
        return rollout.Rollouts.of([samples[i] for i in shuffled], train.mask_truncated_completions)
    draw = rollout.derived_seed(run.seed, trainer_state.global_step, index, 1)
    parts = order.replay_buffer.replay(groups, train, trainer_state.global_step, draw)
    return rollout.Rollouts.joined(parts).ordered(shuffled.tolist())


def sampler_is_exact(train):
    """Whether the sampler's log-probs are, bit for bit, those of a training forward with the same weights."""
    params = sampling_params(train, 0, 1)
    filtered = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    changed = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty or params.min_tokens
    return (not filtered or train.sampling_mask_replay) and not changed and gemm.backend() != "cublas"


def add_logprobs(policy, rollouts, on_policy):
    """Write the log-probs of the reference and, where they are needed, of the policy before its next update.

    on_policy: whether no part of the rollouts is trained on after an update, whose old log-probs are the forward's.
    With rollout_is_batch_normalize, divide the advantages, and with rollout_rs, mask the tokens that it rejects.
    """
    train = policy.train
    parts = forward_parts(rollouts, train)
    if policy.reference is not None:
        rollouts.ref_logprobs = host_logprobs(policy, policy.reference, parts)
    reads_old = train.rollout_rs is not None or train.rollout_is_batch_normalize or not on_policy
    if reads_old and (rollouts.is_stale or not sampler_is_exact(train)) and not train.bypass_mode:
        rollouts.old_logprobs = host_logprobs(policy, policy.model, parts)
    if train.rollout_is_batch_normalize:
        normalize_corrections(rollouts, train)
    if train.rollout_rs is not None:
        reject(rollouts, train.rollout_rs, train.rollout_rs_threshold)


def forward_parts(rollouts, train):
    """All sequences of Rollouts, as many at a time as one forward takes: list of Rollouts."""
    limit = train.max_tokens_per_micro_batch
    return rollouts.parts_of_tokens(limit) if limit else rollouts.parts(train.per_device_train_batch_size)


def host_logprobs(policy, model, parts):
    """(T,) float32 on the host: a model's log-probs of all completion tokens."""
    outputs = {"logprobs": (None, np.float32)}
    readings = [policy.run(score, part.micro_batch(), outputs, model) for part in policy.own(parts)]
    return np.concatenate(policy.of_all_micro_batches([read()["logprobs"] for read in readings]))


def score(policy, batch, results, model):
    """A model's log-probs of the targets of a DeviceBatch."""
    policy.logprobs(batch.targets, results["logprobs"], model=model)


def cut_by_tokens(train, micro_batches):
    """The micro-batches with max_tokens_per_micro_batch, and for each the one whose mean its loss is a part of.

    micro_batches: list of Rollouts. Only bnpo's loss depends on the micro-batches: these are cut, where the others are
    joined first as far as they are on-policy alike.
    """
    limit = train.max_tokens_per_micro_batch
    if limit is None:
        return micro_batches, micro_batches
    if train.loss_type == "bnpo":
        joined = micro_batches
    else:
        joined = [rollout.Rollouts.joined(list(parts)) for _, parts in groupby(micro_batches, lambda p: p.on_policy)]
    pieces = [(piece, whole) for whole in joined for piece in whole.parts_of_tokens(limit)]
    return [piece for piece, _ in pieces], [whole for _, whole in pieces]


def in_order_of_step(policy, micro_batches):
    """cut_by_tokens of a list of Rollouts, in the order in which a step adds their gradients."""
    pieces = zip(*cut_by_tokens(policy.train, micro_batches), strict=True)
    return zip(*costliest_first(pieces, policy.model.config, lambda pair: pair[0].lengths), strict=True)


# Of a micro-batch, on the device: see MicroBatchGraphs.run.
OUTPUTS = {"entropy": (None, np.float32), "loss": (1, np.float32), "stats": (METRICS, np.float32)}


def train_step(policy, micro_batches, learning_rate):
    """One optimizer step on a list of Rollouts: LateMetrics. Writes gradients, weights and optimizer state."""
    train = policy.train
    num_means = len(micro_batches)
    micro_batches, wholes = in_order_of_step(policy, micro_batches)
    num_tokens = sum(part.num_active for part in micro_batches)
    num_sequences = sum(len(part.advantages) for part in micro_batches)
    ends = np.cumsum([len(part.loss_mask) for part in micro_batches])
    selects, has_bonus = train.top_entropy_quantile < 1, entropies.has_bonus(train)
    _, coef = entropies.coefficient(train, policy.loss_state)
    choice = TokenChoice(train, np.concatenate([part.loss_mask for part in micro_batches]), coef)
    if selects and len(micro_batches) > 1:
        choice.choose(entropies.entropies_of(policy, micro_batches))
    gradient_is_known = sampler_is_exact(train) and not selects and coef == 0 and not policy.has_dropout
    readings = []
    policy.zero_grad(learning_rate)
    for i in policy.each_micro_batch(range(len(micro_batches))):
        part = micro_batches[i]
        scale = policy_loss_scale(train, num_sequences, num_tokens, wholes[i].num_active, num_means)
        batch = part.micro_batch().with_arrays(others={"scale": np.float32([scale])})
        tokens = slice(ends[i] - len(part.loss_mask), ends[i])
        if part.on_policy and gradient_is_known and not part.is_stale:
            readings.append(policy.run(known_gradient_step, batch, OUTPUTS))
        elif selects and not choice.is_made:
            # Of one micro-batch the forward's entropies choose them.
            readings.append(policy.run_unpadded(general_step, batch, OUTPUTS, part.on_policy, choice))
        else:
            batch = batch.with_arrays(targets=choice.arrays(tokens))
            readings.append(policy.run(general_step, batch, OUTPUTS, part.on_policy))
    if selects and len(micro_batches) == 1:
        # On all ranks, of which one has made it.
        made = [(choice.kept, choice.num_kept)] if choice.is_made else []
        ((choice.kept, choice.num_kept),) = policy.of_all_micro_batches(made)
    # grads -> step
    info = policy.step(learning_rate)

    def read():
        results = policy.of_all_micro_batches([reading() for reading in readings])
        loss, entropy = np.float32(0.0), np.concatenate([found["entropy"] for found in results])
        for found in results:
            loss += found["loss"][0]
        metrics = {"loss": float(loss), **info}
        metrics["entropy"] = float(np.dot(entropy, choice.loss_mask) / max(num_tokens, 1))
        if has_bonus:
            mean_entropy = metrics["entropy"]
            if choice.kept is not None:
                mean_entropy = float(np.dot(entropy, choice.kept) / max(choice.num_kept, 1))
            metrics["policy_loss"] = metrics["loss"]
            metrics["loss"] -= coef * mean_entropy
            metrics["entropy_coef"] = entropies.update(train, policy.loss_state, mean_entropy)
        return metrics | policy_metrics(np.stack([found["stats"] for found in results]), train, rollout=True)

    # The next step's coefficient follows from this one's entropy.
    return LateMetrics(read) if not has_bonus else read()


class TokenChoice:
    """The tokens of an optimizer step that the surrogate and the entropy bonus have.

    loss_mask (T,) f32; coef: of the bonus. kept (T,) f32, 0 or 1, once it is made, else None; num_kept: their number.
    """

    def __init__(self, train, loss_mask, coef):
        self.quantile, self.loss_mask, self.coef = train.top_entropy_quantile, loss_mask, coef
        self.kept, self.num_kept = None, int(loss_mask.sum(dtype=np.float64))

    @property
    def is_made(self):
        return self.kept is not None

    def choose(self, entropy):
        """Keep the tokens of the highest entropy (T,)."""
        self.kept = entropies.high_entropy_mask(entropy, self.loss_mask, self.quantile)
        self.num_kept = int(self.kept.sum())

    def arrays(self, tokens):
        """What the loss reads of these tokens, a slice: entropy_mask and dentropy, as far as the loss has them."""
        found = {} if self.kept is None else {"entropy_mask": self.kept[tokens]}
        if self.coef:
            counted = (self.loss_mask if self.kept is None else self.kept)[tokens]
            found["dentropy"] = counted * np.float32(-self.coef / max(self.num_kept, 1))
        return found


def known_gradient_step(policy, batch, results):
    """Forward, loss and backward where the forward will compute the sampler's log-probs, bit for bit.

    So the gradient is known before it. The loss is computed again after it, for metrics that show a difference if there
    is one.
    """
    sampled = batch.arrays["rollout_logprobs"]
    logprobs, dlogprobs = (policy.arena.empty(sampled.shape, np.float32) for _ in range(2))
    ignored = {"loss": policy.arena.empty((1,), np.float32), "stats": policy.arena.empty((METRICS,), np.float32)}
    loss_backward(policy, batch, sampled, sampled, dlogprobs, ignored)
    policy.forward_backward(batch.targets, dlogprobs, logprobs, results["entropy"])
    loss_backward(policy, batch, logprobs, logprobs, dlogprobs, results)


def general_step(policy, batch, results, on_policy, choice=None):
    """Forward, loss and backward. choice: a TokenChoice that the forward's entropies are to make, on the host."""
    # ids -> logprobs
    logprobs, dlogprobs = (policy.arena.empty(batch.targets.rows.shape, np.float32) for _ in range(2))
    forward, chosen = policy.forward(batch.targets, logprobs, results["entropy"]), batch.arrays
    if choice is not None:
        choice.choose(device.to_host(results["entropy"]))
        chosen = {name: device.asarray(array) for name, array in choice.arrays(slice(None)).items()}
    # logprobs -> loss
    old_logprobs = logprobs
    if not on_policy:
        old_logprobs = batch.arrays.get("old_logprobs", batch.arrays["rollout_logprobs"])
    loss_backward(policy, batch, logprobs, old_logprobs, dlogprobs, results, chosen.get("entropy_mask"))
    # loss -> grads
    policy.backward(forward, dlogprobs, chosen.get("dentropy"))


def loss_backward(policy, batch, logprobs, old_logprobs, dlogprobs, results, entropy_mask=None):
    """policy_loss of a DeviceBatch of Rollouts: dlogprobs, and loss and stats (METRICS,) of `results`, are written."""
    arrays, empty = batch.arrays, policy.arena.empty
    of_tokens = arrays.get("ref_logprobs"), arrays["rollout_logprobs"]
    of_batch = arrays["advantages"], arrays["loss_mask"], arrays["completion_bounds"]
    of_sequences = empty((arrays["advantages"].shape[0], METRICS), np.float32)
    outputs = results["loss"], dlogprobs, of_sequences, results["stats"]
    fill(0.0, results["loss"])
    policy_loss(logprobs, old_logprobs, *of_tokens, *of_batch, policy.train, arrays["scale"], *outputs, entropy_mask)


def evaluate(llm, rewards, prompts, run, trainer_state):
    """Metrics of completions of every held-out prompt, the same noise each time: {"eval_reward": ..., ...}."""
    generation = evaluation.generate(llm, rewards, prompts, eval_params(run), trainer_state)
    return evaluation.metrics_of(generation, rewards.names, run)


def eval_params(run):
    """The SamplingParams of a run's evaluation."""
    return evaluation.eval_params(run, sampling_params(run.train, rollout.derived_seed(run.seed), 1))


def sampling_params(train, seed, n):
    """The SamplingParams of a [train] section."""
    settings = {name: getattr(train, name) for name in SAMPLING_KEYS} | train.generation_kwargs
    replay = train.sampling_mask_replay
    params = SamplingParams(**settings, max_tokens=train.max_completion_length, seed=seed, n=n, logit_thresholds=replay)
    if replay and (params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty):
        raise ConfigError(
            "train.sampling_mask_replay replays top_p, top_k and min_p, but no penalties: set one of the two"
        )
    return params


def sample_report(llm, prompts, run, path, count=4, width=200):
    """The first `count` prompts' completions of the first step and of the same noise now, `width` characters each: str.

    path: of the run, for its completions.jsonl.
    """
    train = run.train
    with open(path / "completions.jsonl", encoding="utf-8") as file:
        # In the order of the steps: the first are not followed by others.
        rows = list(takewhile(lambda row: row["step"] == 1, map(json.loads, file)))
    first = rows[: train.rollout_batch_size : train.num_generations][:count]
    chosen = prompt_order(prompts, run).take(train.prompts_per_rollout)
    params = sampling_params(train, rollout.derived_seed(run.seed, 0, 0, 0), 1)
    llm.wake()
    outputs = llm.generate([prompts.prompts[i].prompt_token_ids for i in chosen[: len(first)]], params)
    llm.sleep()

    def shown(text):
        text = text if isinstance(text, str) else str(text[-1].get("content"))
        return repr(text if len(text) <= width else text[:width] + " ...")

    lines = [f"The first {len(first)} prompts before training and after it, drawn with the same noise:"]
    for row, output in zip(first, outputs, strict=True):
        lines += [
            f"  {shown(row['prompt'])}",
            f"    before  {shown(row['completion'])}",
            f"    after   {shown(output.completions[0].text)}",
        ]
    return "\n".join(lines)


class MicroStep(NamedTuple):
    """One forward and backward pass: its index in the epoch and the first sequence of the generation that it takes.

    on_policy: whether the weights are still those that generated: the generation began in this optimizer step. Never
    with bypass_mode or replayed groups, whose ratio is to the log-probs of the sampler.
    """

    index: int
    first: int
    begins_generation: bool
    on_policy: bool


class MicroBatchSchedule(Schedule):
    """Which micro-batches make up which optimizer step; an epoch ends without prompts that do not fill a generation."""

    def __init__(self, train, path, num_prompts):
        if num_prompts < train.prompts_per_rollout:
            raise ConfigError(
                f"{path}: {num_prompts} prompts are fewer than the {train.prompts_per_rollout} of one generation "
                f"({train.prompts_key})"
            )
        self.train = train
        self.micro_steps_per_generation = train.rollout_steps * train.num_iterations
        super().__init__(train, num_prompts // train.prompts_per_rollout * self.micro_steps_per_generation)

    def micro_steps(self, step):
        """The MicroSteps of an optimizer step: list."""
        start = step % self.steps_per_epoch * self.accumulation
        found = []
        for index in range(start, min(start + self.accumulation, self.micro_steps_per_epoch)):
            within = index % self.micro_steps_per_generation
            first = index % self.train.rollout_steps * self.train.per_device_train_batch_size
            found.append(
                MicroStep(index, first, within == 0, index - within >= start and not self.train.ratio_to_sampler)
            )
        return found

    def within_generation(self, step):
        """Whether optimizer step `step` begins with completions that an earlier one has generated."""
        return not self.micro_steps(step)[0].begins_generation

    @property
    def on_policy(self):
        """Whether all completions are trained on before the weights that generated them change."""
        return self.accumulation % self.micro_steps_per_generation == 0 and not self.train.ratio_to_sampler


class DataState:
    """What the data pipeline carries from one optimizer step to the next: order, tokens seen, generation in use."""

    def __init__(self, order):
        self.order = order
        self.num_tokens, self.rollouts, self.metrics = 0, None, {}

    def begin(self, rollouts, generations, names, metrics):
        """Use a new generation. generations: list of Generation; names: of the reward functions; metrics: further."""
        self.rollouts, self.metrics = rollouts, rollout.generation_metrics(generations, names) | metrics
        self.num_tokens += sum(each.num_tokens for each in generations)
        num_samples = sum(len(each.samples) for each in generations)
        if num_samples > len(rollouts.advantages):
            self.metrics["dynamic_sampling/dropped"] = 1 - len(rollouts.advantages) / num_samples

    def state_dict(self, within_generation):
        """The state for a checkpoint; the generation only if the next step still trains on it."""
        kept = within_generation and self.rollouts is not None
        state = {
            "prompts": [self.order.epoch, self.order.position],
            "num_tokens": self.num_tokens,
            "rollouts": self.rollouts.state() if kept else None,
            "metrics": self.metrics if kept else {},
        }
        if self.order.replay_buffer is not None:
            state["replay_buffer"] = self.order.replay_buffer.state()
        # Lists and dicts of numbers, as long as there are prompts.
        memory = {name: copy.copy(value) for name, value in self.order.memory.items()}
        return state | ({"memory": memory} if memory else {})

    def load_state_dict(self, state, train):
        """Restore a checkpoint's state, but for a generation that does not fit a `train` changed since."""
        self.order.epoch, self.order.position = state["prompts"]
        self.order.memory = copy.deepcopy(state.get("memory", {}))
        self.num_tokens = state["num_tokens"]
        if self.order.replay_buffer is not None:
            self.order.replay_buffer.load_state(state.get("replay_buffer", []), train.num_generations)
        if state["rollouts"] is None:
            return
        rollouts = rollout.Rollouts(**state["rollouts"])
        has_reference = len(rollouts.ref_logprobs) > 0
        if len(rollouts.advantages) == train.rollout_batch_size and (has_reference or not train.beta):
            self.rollouts, self.metrics = rollouts, state["metrics"]
        else:
            log("the completions in the checkpoint do not fit the changed configuration: drawing others")


def mean_metrics(of_parts):
    """The mean of each metric over the micro-batches that have it, NaN left out: dict."""
    found = {}
    for name in dict.fromkeys(name for metrics in of_parts for name in metrics):
        values = [metrics[name] for metrics in of_parts if name in metrics and not math.isnan(metrics[name])]
        found[name] = sum(values) / len(values) if values else math.nan
    return found
