"""Group Relative Policy Optimization: prompts in, better weights out.

    generation       prompts_per_rollout prompts x num_generations completions from the engine, with their rewards;
                     shuffled once, cut into rollout_steps micro-batches, each trained on num_iterations times
    optimizer step   gradient_accumulation_steps micro-batches, or those of global_batch_size completions

Engine and policy read the same weights, so nothing is copied between them. If their arithmetic agrees bit for bit,
the sampler's log-probs are the old policy's and need no forward, and on-policy they give the loss's gradient before the
forward has ended.

Sources: DeepSeekMath (arXiv 2402.03300); TRL 1.16's GRPOTrainer, whose names, defaults and semantics these are.
Dynamic sampling: DAPO (arXiv 2503.14476).
"""

from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

from rlnumba.config.grpo import GRPORun
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.nn.elementwise import accumulate, fill
from rlnumba.kernels.rl.policy_loss import (
    METRICS,
    policy_loss,
    policy_loss_scale,
    policy_metrics,
)
from rlnumba.kernels.rl.policy_loss_config import Logprobs, LossBatch, LossOutputs
from rlnumba.runs.loading import load_policy
from rlnumba.runs.micro_batch import costliest_first
from rlnumba.runs.planning.planned import Models
from rlnumba.runs.policy import LateMetrics
from rlnumba.runs.prompt_loop import TrainerOnPrompts
from rlnumba.runs.prompt_run import sampling_params
from rlnumba.runtime import device
from rlnumba.sampling.samples import Sample, derived_seed, is_uniform
from rlnumba.trainers import entropy as entropies
from rlnumba.trainers import rollout
from rlnumba.trainers.rejection import normalize_corrections, reject, rollout_kl
from rlnumba.trainers.scoring import forward_parts, host_logprobs
from rlnumba.trainers.teacher import add_teacher_advantages, assign_teachers, load_teachers, teacher_configs


def run_grpo(run, resume=False, reward_funcs=(), communicator=None):
    """Train a GRPORun, and return its TrainerState; the arguments are TrainerOnPrompts.train's."""
    return TRAINER.train(run, resume, reward_funcs, communicator)


def load(run, folder):
    """(Policy, Tokenizer) of a run, with the reference that train.beta above 0 asks for, and the teachers."""
    policy, tokenizer = load_policy(run, folder, run.train.beta > 0, run.train.temperature)
    load_teachers(run, policy, folder.communicator)
    return policy, tokenizer


def generate(policy, generations, trainer_state, index, on_policy, clock):
    """GRPO's generation: see TrainerOnPrompts."""
    train, order = generations.run.train, generations.order
    # prompt -> ids -> completions, text -> reward
    chosen, generation = generations.take(trainer_state, clock)
    groups = groups_that_differ(generation, train) if train.generation.dynamic else generation.groups
    with clock.phase("advantage"):
        order.record(chosen, generation.groups)
        assign_teachers(generations.run.teacher, generation.samples)
        rollouts = rollouts_of(policy, groups, generations, trainer_state, index)
        rollouts.is_stale = is_stale(generation, trainer_state.global_step) or replays_stale(generations)
    with clock.phase("logprob"):
        add_logprobs(policy, rollouts, on_policy)
    with clock.phase("advantage"):
        metrics = {"frac_reward_zero_std": rollout.frac_reward_zero_std(generation.groups, train)}
        metrics |= order.shares() | generations.metrics
    if order.replay_buffer is not None:
        metrics |= order.replay_buffer.metrics
    if train.generation.dynamic:
        metrics["perf/over_sampled_tokens"] = generation.num_unused
    if groups[0][0].steps is not None:
        metrics |= rollout.step_group_metrics(groups)
    if policy.teachers is not None:
        metrics["teacher_kl"] = rollouts.teacher_kl
    if train.rollout_rs is not None:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = rollouts.rejected_fraction
    if train.rollout_is_batch_normalize:
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = rollouts.correction_mean
    return rollouts, generation, metrics


def groups_that_differ(generation, train):
    """The groups of a Generation that a batch of dynamic sampling has: list.

    The last uniform ones fill the batch if too few groups differ in their rewards.
    """
    groups, uniform = (
        [each for each in generation.groups if is_uniform(each, train) == kind] for kind in (False, True)
    )
    return groups + uniform[len(uniform) - (train.generation.num_prompts - len(groups)) :]


def is_stale(generation, step):
    """Whether some tokens of a Generation were sampled from other weights than those after `step` steps, or a rollout
    function has returned their log-probs: bool."""
    versions = (sample.completion.array("policy_versions") for sample in generation.samples)
    return any((of_tokens != step).any() for of_tokens in versions)


def replays_stale(generations):
    """Whether the last batch of Generations has replayed groups, in a run that corrects for older weights: bool.

    Without staleness the ratio of a replayed group is to its sampler, as in a synchronous run.
    """
    buffer = generations.order.replay_buffer
    return generations.run.is_stale and buffer is not None and buffer.metrics["replay/groups"] > 0


def rollouts_of(policy, groups, generations, trainer_state, index):
    """Give the Samples of groups their advantages: Rollouts of all of them. The other arguments are generate's."""
    run, order = generations.run, generations.order
    train = run.train
    # reward -> advantage
    if run.teacher.is_alone:
        # The samples' advantages are 0, those of the tokens the teacher's.
        pass
    elif train.advantage_estimator != "grpo" or train.length_penalty:
        rollout.set_estimated_advantages(groups, train, order.memory)
    else:
        weights, aggregation = generations.weights, train.multi_objective_aggregation
        rollout.set_advantages(groups, weights, train.scale_rewards, aggregation)
    # completions -> batch
    samples = [sample for group in groups for sample in group]
    seed = derived_seed(run.seed, trainer_state.global_step, index)
    shuffled = rollout.order_of_training(groups, seed, policy)
    if order.replay_buffer is None:
        ordered, observes = [samples[i] for i in shuffled], train.observation_coef > 0
        return rollout.Rollouts.of(ordered, train.mask_truncated_completions, observes)
    draw = derived_seed(run.seed, trainer_state.global_step, index, 1)
    parts = order.replay_buffer.replay(groups, train, trainer_state.global_step, draw)
    return rollout.Rollouts.joined(parts).ordered(shuffled.tolist())


def sampler_is_exact(policy):
    """Whether the sampler's log-probs are, bit for bit, those of a training forward with the same weights."""
    return not policy.rollout_is_quantized and sampling_is_exact(policy.train)


def sampling_is_exact(train):
    """Whether they are for an engine that reads the weights themselves, by the keys of [train] and the GEMM backend."""
    params = sampling_params(train, 0, 1)
    filtered = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    changed = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty or params.min_tokens
    return (not filtered or train.generation.replays_mask) and not changed and gemm.backend() != "cublas"


def add_logprobs(policy, rollouts, on_policy):
    """Write the log-probs of the reference and, where they are needed, of the policy before its next update.

    on_policy: whether no part of the rollouts is trained on after an update, whose old log-probs are the forward's.
    With teachers, write their advantages; with rollout_is_batch_normalize, divide the advantages, and with rollout_rs,
    mask the tokens that it rejects.
    """
    train = policy.train
    parts = forward_parts(rollouts, train)
    if policy.reference is not None:
        rollouts.ref_logprobs = host_logprobs(policy, policy.reference, parts)
    compares = train.rollout_rs is not None or train.rollout_is_batch_normalize or policy.teachers is not None
    if (compares or not on_policy) and (rollouts.is_stale or not sampler_is_exact(policy)) and not train.bypass_mode:
        rollouts.old_logprobs = host_logprobs(policy, policy.model, parts)
    if policy.teachers is not None:
        add_teacher_advantages(policy, rollouts)
    if train.rollout_is_batch_normalize:
        normalize_corrections(rollouts, train)
    if train.rollout_rs is not None:
        reject(rollouts, train.rollout_rs, train.rollout_rs_threshold)


def cut_by_tokens(train, micro_batches, sharing=None):
    """The micro-batches with max_tokens_per_micro_batch, and for each the one whose mean its loss is a part of.

    micro_batches: list of Rollouts; sharing: the PrefixRule that they have, or None. Only bnpo's loss depends on the
    micro-batches: these are cut, where the others are joined first as far as they are on-policy alike.
    """
    limit = train.max_tokens_per_micro_batch
    if limit is None:
        return micro_batches, micro_batches
    if train.loss_type == "bnpo":
        joined = micro_batches
    else:
        joined = [rollout.Rollouts.joined(list(parts)) for _, parts in groupby(micro_batches, lambda p: p.on_policy)]
    pieces = [(piece, whole) for whole in joined for piece in whole.parts_of_tokens(limit, sharing)]
    return [piece for piece, _ in pieces], [whole for _, whole in pieces]


def in_order_of_step(policy, micro_batches):
    """cut_by_tokens of a list of Rollouts, in the order in which a step adds their gradients."""
    sharing = policy.prefix_sharing(policy.model)
    pieces = zip(*cut_by_tokens(policy.train, micro_batches, sharing), strict=True)
    shared_of = (lambda pair: pair[0].shared_lengths(sharing)) if sharing else None
    in_order = costliest_first(list(pieces), policy.model.config, lambda pair: pair[0].lengths, shared_of)
    return zip(*in_order, strict=True)


# Results of a micro-batch, on the device: see MicroBatchGraphs.run.
OUTPUTS = {"entropy": (None, np.float32), "loss": (1, np.float32), "stats": (METRICS, np.float32)}
# A further one with train.log_token_values, and with engine.quantization.
LOGPROBS = {"logprobs": (None, np.float32)}


def train_step(policy, micro_batches, learning_rate):
    """One optimizer step on a list of Rollouts: LateMetrics. Writes gradients, weights and optimizer state."""
    return optimizer_step(policy, micro_batches, learning_rate, policy.train)


def optimizer_step(policy, micro_batches, learning_rate, bonus):
    """One optimizer step by the policy loss of [train], GRPO's or RLOO's. bonus: the keys of its entropy bonus."""
    train, config = policy.train, policy.train.policy_loss
    num_means = len(micro_batches)
    micro_batches, wholes = in_order_of_step(policy, micro_batches)
    num_tokens = sum(part.num_active for part in micro_batches)
    num_sequences = sum(part.num_sequences for part in micro_batches)
    ends = np.cumsum([len(part.loss_mask) for part in micro_batches])
    selects, has_bonus = bonus.top_entropy_quantile < 1, entropies.has_bonus(bonus)
    _, coef = entropies.coefficient(bonus, policy.loss_state)
    choice = TokenChoice(bonus, np.concatenate([part.loss_mask for part in micro_batches]), coef)
    if selects and len(micro_batches) > 1:
        choice.choose(entropies.entropies_of(policy, micro_batches))
    reads_logprobs = train.log_token_values or bonus.observation_coef or policy.rollout_is_quantized
    outputs = OUTPUTS | LOGPROBS if reads_logprobs else OUTPUTS
    observed_scale = np.float32(-bonus.observation_coef / max(num_observed(micro_batches), 1))
    gradient_is_known = sampler_is_exact(policy) and not selects and coef == 0 and not policy.has_dropout
    readings, sharing = [], policy.prefix_sharing(policy.model)
    policy.zero_grad(learning_rate)
    for i in policy.each_micro_batch(range(len(micro_batches))):
        part = micro_batches[i]
        scale = policy_loss_scale(config, num_sequences, num_tokens, wholes[i].num_active, num_means)
        batch = part.micro_batch(policy.grammar, sharing).with_arrays(others={"scale": np.float32([scale])})
        if bonus.observation_coef:
            batch = batch.with_arrays(targets={"dobserved": part.observed * observed_scale})
        tokens = slice(ends[i] - len(part.loss_mask), ends[i])
        if part.on_policy and gradient_is_known and not part.is_stale:
            readings.append(policy.run_training(known_gradient_step, batch, outputs))
        elif selects and not choice.is_made:
            # With one micro-batch, the entropies of its own forward choose the tokens.
            readings.append(policy.run_training(general_step, batch, outputs, part.on_policy, choice, pads=False))
        else:
            batch = batch.with_arrays(targets=choice.arrays(tokens))
            readings.append(policy.run_training(general_step, batch, outputs, part.on_policy))
    if selects and len(micro_batches) == 1:
        # On all ranks, of which one has made it.
        made = [(choice.kept, choice.num_kept)] if choice.is_made else []
        ((choice.kept, choice.num_kept),) = policy.of_all_micro_batches(made)
    # grads -> step
    info = policy.step(learning_rate)

    def read():
        results = policy.of_all_micro_batches([reading() for reading in readings])
        for function in policy.after_step:
            function(micro_batches, results)
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
            metrics["entropy_coef"] = entropies.update(bonus, policy.loss_state, mean_entropy)
        if bonus.observation_coef:
            metrics["observation_loss"] = observation_loss(micro_batches, results)
            metrics["loss"] += bonus.observation_coef * metrics["observation_loss"]
        if policy.rollout_is_quantized:
            metrics |= rollout_kl(micro_batches, [found["logprobs"] for found in results])
        policy.router.added(metrics)
        return metrics | policy_metrics(np.stack([found["stats"] for found in results]), config, rollout=True)

    # The next step's coefficient follows from this one's entropy.
    return LateMetrics(read) if not has_bonus else read()


def num_observed(micro_batches):
    """Tokens of the environment in a list of Rollouts: int."""
    return int(sum(part.observed.sum(dtype=np.float64) for part in micro_batches))


def observation_loss(micro_batches, results):
    """The mean cross-entropy of the environment's tokens in a list of Rollouts, in nats, from their results: float."""
    pairs = zip(micro_batches, results, strict=True)
    total = sum(np.dot(part.observed.astype(np.float64), found["logprobs"]) for part, found in pairs)
    return -float(total) / max(num_observed(micro_batches), 1)


class TokenChoice:
    """The tokens of an optimizer step that the surrogate and the entropy bonus have.

    loss_mask (T,) f32; coef: the bonus's. kept (T,) f32, 0 or 1, once it is made, else None; num_kept: their number.
    """

    def __init__(self, bonus, loss_mask, coef):
        self.quantile, self.loss_mask, self.coef = bonus.top_entropy_quantile, loss_mask, coef
        self.kept, self.num_kept = None, int(loss_mask.sum(dtype=np.float64))

    @property
    def is_made(self):
        return self.kept is not None

    def choose(self, entropy):
        """Keep the tokens of the highest entropy (T,)."""
        self.kept = entropies.high_entropy_mask(entropy, self.loss_mask, self.quantile)
        self.num_kept = int(self.kept.sum())

    def arrays(self, tokens):
        """The arrays of these tokens, a slice, for the loss: entropy_mask and dentropy, as far as it has them."""
        found = {} if self.kept is None else {"entropy_mask": self.kept[tokens]}
        if self.coef:
            counted = (self.loss_mask if self.kept is None else self.kept)[tokens]
            found["dentropy"] = counted * np.float32(-self.coef / max(self.num_kept, 1))
        return found


def logprobs_of(policy, batch, results):
    """The array for the log-probs of a batch: the result that is read, else one of the arena."""
    if "logprobs" in results:
        return results["logprobs"]
    return policy.arena.empty(batch.targets.rows.shape, np.float32)


def known_gradient_step(policy, batch, results):
    """Forward, loss and backward where the forward will compute the sampler's log-probs, bit for bit.

    So the gradient is known before it. The loss is computed again after it, for metrics that show a difference if there
    is one.
    """
    sampled = batch.arrays["rollout_logprobs"]
    logprobs, dlogprobs = logprobs_of(policy, batch, results), policy.arena.empty(sampled.shape, np.float32)
    ignored = {"loss": policy.arena.empty((1,), np.float32), "stats": policy.arena.empty((METRICS,), np.float32)}
    loss_backward(policy, batch, sampled, sampled, dlogprobs, ignored)
    policy.forward_backward(batch.targets, dlogprobs, logprobs, results["entropy"])
    loss_backward(policy, batch, logprobs, logprobs, dlogprobs, results)


def general_step(policy, batch, results, on_policy, choice=None):
    """Forward, loss and backward. choice: a TokenChoice that the forward's entropies are to make, on the host."""
    # ids -> logprobs
    logprobs = logprobs_of(policy, batch, results)
    dlogprobs = policy.arena.empty(logprobs.shape, np.float32)
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
    arrays, empty, config = batch.arrays, policy.arena.empty, policy.train.policy_loss
    # A loss whose beta is 0 has no KL, though the rewards may have.
    ref_logprobs = arrays.get("ref_logprobs") if config.beta else None
    bounds = arrays["completion_bounds"]
    sequence_stats = empty((bounds.shape[0] - 1, METRICS), np.float32)
    fill(0.0, results["loss"])
    policy_loss(
        Logprobs(logprobs, old_logprobs, ref_logprobs, arrays["rollout_logprobs"]),
        LossBatch(arrays["advantages"], arrays["loss_mask"], bounds, entropy_mask),
        config, arrays["scale"],
        LossOutputs(results["loss"], dlogprobs, sequence_stats, results["stats"]),
    )  # fmt: skip
    if "dobserved" in arrays:
        # The cross-entropy of the environment's tokens, whose loss mask is 0.
        accumulate(arrays["dobserved"], dlogprobs)


def completions_at_once(train, length):
    """The most completions that one forward and backward pass has, with prompts of `length` tokens each: int."""
    limit, size = train.max_tokens_per_micro_batch, train.per_device_train_batch_size
    if limit is None:
        return size
    # Only bnpo's micro-batches are not joined before they are cut.
    most = size if train.loss_type == "bnpo" else size * train.micro_batches_per_step
    return min(max(limit // length, 1), most)


def models_of(run):
    """The Models of a run."""
    return Models(has_reference=run.train.beta > 0, teachers=teacher_configs(run))


def rehearse(run, policy, critic, rollouts, every_form):
    """See TrainerOnPrompts: with stale completions and without, on-policy and not."""
    train, count = run.train, len(run.rewards.funcs)
    if train.observation_coef:
        rollouts.observed = np.zeros_like(rollouts.loss_mask)

    def advantages():
        samples = [Sample(None, None, np.zeros(count), float(i), {}) for i in range(train.num_generations)]
        rollout.set_advantages([samples], np.ones(count), train.scale_rewards, train.multi_objective_aggregation)
        for index in range(max(len(run.teacher.folders), 1)):
            rollouts.teachers = np.full(rollouts.num_sequences, index, np.int32)
            add_logprobs(policy, rollouts, on_policy=False)

    yield from rehearse_steps(run, policy, rollouts, every_form, advantages, partial(train_step, policy))


def rehearse_steps(run, policy, rollouts, every_form, advantages, step):
    """The functions of GRPO's and RLOO's rehearse: advantages() of a group with the log-probs that the step
    step(micro_batches, learning_rate) reads, and the step."""
    train = run.train
    sharing = policy.prefix_sharing(policy.model)
    shares = sharing is not None and (rollouts.prompt_lengths > sharing.multiple).any()
    if shares:
        # Two prompts differ in their first tokens, so that a micro-batch has as many tokens as it may have.
        starts = np.cumsum(rollouts.lengths) - rollouts.lengths
        numbers = np.divmod(prompts_in_micro_batch(train, len(starts)), policy.model.config.vocab_size)
        rollouts.token_ids[starts], rollouts.token_ids[starts + 1] = numbers
    # Also the first generations of a run with older ones are not old.
    for is_stale in {False, run.has_other_logprobs} if every_form else {run.has_other_logprobs}:
        rollouts.is_stale = is_stale
        yield advantages
        for on_policy in (True, False) if every_form else (True,):
            yield partial(step, rollouts.parts(rollouts.num_sequences, on_policy), 0.0)
            if shares:
                yield partial(step_with_one_prompt, step, rollouts, train, on_policy, sharing)


def prompts_in_micro_batch(train, count):
    """The prompt of each completion of the micro-batch that shares least, (count,) int.

    Where an optimizer step has whole groups, and whole groups or a part of one make a micro-batch, it has no other
    prompts than theirs (order_of_training). Elsewhere no two completions may have the same.
    """
    plan, size = train.generation, train.per_device_train_batch_size
    has_whole_groups = plan.num_passes <= train.micro_batches_per_step and not plan.replay_buffer_size
    is_aligned = size % plan.num_completions_each == 0 or plan.num_completions_each % size == 0
    is_ordered = train.loss_type != "bnpo" and train.max_tokens_per_micro_batch is None
    prompts = np.arange(count)
    return prompts // plan.num_completions_each if has_whole_groups and is_aligned and is_ordered else prompts


def step_with_one_prompt(step, rollouts, train, on_policy, sharing):
    """The step on completions as those of Rollouts, of one prompt: as many as a micro-batch has that counts it once."""
    same = replace(rollouts, token_ids=np.zeros_like(rollouts.token_ids))
    count, limit = same.num_sequences, train.max_tokens_per_micro_batch
    if limit is not None:
        own = int((same.lengths - same.shared_lengths(sharing)).min())
        count = max(count, min(limit // own, train.per_device_train_batch_size * train.micro_batches_per_step))
    joined = rollout.Rollouts.joined([same] * -(-count // same.num_sequences))
    step([joined.part(0, count, on_policy)], 0.0)


TRAINER = TrainerOnPrompts(
    GRPORun, load, generate, train_step, models_of, completions_at_once, rehearse, has_graphs=True
)
