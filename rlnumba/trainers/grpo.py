"""Group Relative Policy Optimization: prompts in, better weights out.

    generation       prompts_per_rollout prompts x num_generations completions, drawn by the engine and scored by the
                     rewards; shuffled once, cut into rollout_steps micro-batches, each trained on num_iterations times
    optimizer step   gradient_accumulation_steps micro-batches

The way of a token: `roll_out` takes prompts to completions, rewards, advantages and a batch; `Learner.step` takes the
batch to log-probs, loss, gradients and new weights. Engine and learner read the same weights, so nothing is copied
between them; where their arithmetic agrees bit for bit, the sampler's log-probs are the old policy's and cost no
forward, and in the step after the draw they give the loss's gradient before the forward has ended.

Sources: DeepSeekMath (arXiv 2402.03300); TRL 1.16's GRPOTrainer, whose names, defaults and semantics these are.
Dynamic sampling: DAPO (arXiv 2503.14476).
"""

import json
import math
from dataclasses import dataclass

import numpy as np

from rlnumba.data import load_prompts
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.nn.elementwise import add, scale
from rlnumba.kernels.rl.policy_loss import METRICS, PolicyLossConfig, policy_loss, policy_loss_scale, policy_metrics
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Tape, find_model, load_model
from rlnumba.rewards import load_rewards
from rlnumba.runtime import device
from rlnumba.runtime.memory import Arena
from rlnumba.trainers.common import (
    Clock,
    RunFolder,
    attention_of,
    epochs_done,
    head_backward,
    head_forward,
    head_with_gradient,
    make_optimizer,
    memory_metrics,
    rate_of,
    say,
    say_kernels,
    target_logprobs,
)
from rlnumba.trainers.rollout import (
    PromptOrder,
    Rollouts,
    derived_seed,
    device_batch,
    draw,
    draw_metrics,
    frac_reward_zero_std,
    is_uniform,
    set_advantages,
)


def run_grpo(run, resume=False, reward_funcs=()):
    """Train as a GRPORun says; writes its output_dir. resume: go on from the newest readable checkpoint there, or,
    if an int, from that of this step.

    reward_funcs: the functions themselves, where run.rewards.funcs only tells of them.
    Raises ConfigError and UserError, of one line each, for what a user can cause. A reward that fails in the middle of
    the run leaves a checkpoint of the last complete step.
    """
    train = run.train
    gemm.set_backend(run.gemm)
    folder = RunFolder("grpo", run, resume)
    rewards = load_rewards(run.rewards, reward_funcs)
    source = find_model(run.model)
    model = load_model(folder.model_folder or source, train.dtype)
    say_kernels(model.dtype)
    tokenizer = Tokenizer.from_folder(source)
    llm = LLM(model, tokenizer, run.engine)
    prompts = prompts_of(run.data.train, run, llm)
    held_out = prompts_of(run.data.eval, run, llm) if run.data.eval else None
    plan = Plan(train, run.data.train, len(prompts.prompts))
    reference = load_model(source, model.dtype.name) if train.beta else None
    learner = Learner(model, reference, train)
    data = DataState(PromptOrder(len(prompts.prompts), train.shuffle_dataset, run.seed))
    if folder.state is not None:
        learner.restore(folder.state["learner"])
        data.restore(folder.state["data"], train)

    def save(step, data_state):
        folder.save(step, model, tokenizer, {"learner": learner.state(), "data": data_state})

    clock = Clock()
    with folder.writer(plan.total_steps) as writer:
        for step in range(folder.step, plan.total_steps):
            # What a checkpoint needs if this step does not come to its end.
            before = data.state(plan.within_rollout(step))
            now = TrainerState(step, plan.total_steps, plan.epochs_done(step))
            micro_batches, parts_metrics, tokens_drawn = [], [], 0
            for index in plan.micro_steps(step):
                if index % plan.micro_steps_per_rollout == 0 or data.rollouts is None:
                    try:
                        rollouts, drawn = roll_out(llm, rewards, prompts, data.order, run, now, index, clock, writer)
                    except UserError:
                        save(step, before)
                        raise
                    with clock.phase("logprob"):
                        learner.add_logprobs(rollouts, plan.on_policy)
                    data.begin(rollouts, drawn, rewards.names, train)
                    tokens_drawn += int(sum(each.num_drawn for each in drawn))
                    writer.completions(step + 1, [row for each in drawn for row in each.rows(rewards.names)])
                first = index % train.rollout_steps * train.per_device_train_batch_size
                micro_batches.append(data.rollouts.part(first, train.per_device_train_batch_size))
                parts_metrics.append(data.metrics)
            with clock.phase("train"):
                metrics = learner.step(micro_batches, step, rate_of(train, step, plan.total_steps))
            llm.update_weights(step + 1)
            # The run's own names win over those that rewards log.
            metrics = metrics | mean_metrics(parts_metrics) | metrics
            metrics |= {"epoch": plan.epochs_done(step + 1), "num_tokens": data.num_tokens}
            if prompts.dropped_prompts:
                metrics["dropped_prompts"] = prompts.dropped_prompts
            last = step + 1 == plan.total_steps
            if held_out and (last or (train.eval_steps and (step + 1) % train.eval_steps == 0)):
                try:
                    with clock.phase("eval"):
                        metrics |= evaluate(llm, rewards, held_out, run, now)
                except UserError:
                    writer.log(step + 1, metrics)
                    save(step + 1, data.state(plan.within_rollout(step + 1)))
                    raise
            metrics |= clock.read()
            metrics["perf/throughput"] = sum(len(part.token_ids) for part in micro_batches) / metrics["step_time"]
            if tokens_drawn:
                metrics["perf/generation_tokens_per_s"] = tokens_drawn / metrics["time/generate"]
            writer.log(step + 1, metrics | memory_metrics())
            if last or (step + 1) % train.save_steps == 0:
                with clock.phase("save"):
                    save(step + 1, data.state(plan.within_rollout(step + 1)))
        folder.finish(model, tokenizer)
        if (folder.path / "completions.jsonl").exists():
            writer.print(before_and_after(llm, prompts, run, folder.path))
    say(f"{folder.path} has the curves (curves.png), the completions and the model (final)")


class Plan:
    """Which micro-batches make up which optimizer step.

    A micro-step is one forward and backward pass; they are counted from 0 in each epoch. micro_steps_per_rollout of
    them are fed by one generation. An epoch ends with a shorter optimizer step if gradient_accumulation_steps does not
    divide its micro-steps, and without the prompts that do not fill a generation.
    """

    def __init__(self, train, path, num_prompts):
        if num_prompts < train.prompts_per_rollout:
            raise ConfigError(
                f"{path}: {num_prompts} prompts are fewer than the {train.prompts_per_rollout} of one generation "
                f"(train.per_device_train_batch_size x steps_per_generation / num_generations)"
            )
        self.accumulation = train.gradient_accumulation_steps
        self.micro_steps_per_rollout = train.rollout_steps * train.num_iterations
        self.micro_steps_per_epoch = num_prompts // train.prompts_per_rollout * self.micro_steps_per_rollout
        self.steps_per_epoch = -(-self.micro_steps_per_epoch // self.accumulation)
        epochs = math.ceil(train.num_train_epochs * self.steps_per_epoch)
        self.total_steps = train.max_steps if train.max_steps > 0 else epochs

    def micro_steps(self, step):
        """The micro-steps of an optimizer step: range within its epoch."""
        first = step % self.steps_per_epoch * self.accumulation
        return range(first, min(first + self.accumulation, self.micro_steps_per_epoch))

    def within_rollout(self, step):
        """Whether optimizer step `step` begins with completions that an earlier one has generated."""
        return self.micro_steps(step).start % self.micro_steps_per_rollout != 0

    def epochs_done(self, step):
        """The epochs that `step` optimizer steps make: float."""
        return epochs_done(step, self.accumulation, self.micro_steps_per_epoch)

    @property
    def on_policy(self):
        """Whether all completions are trained on before the weights that drew them change."""
        return self.accumulation % self.micro_steps_per_rollout == 0


class DataState:
    """Where the data stands between two optimizer steps: prompts taken, tokens seen, the generation in use."""

    def __init__(self, order):
        self.order = order
        self.num_tokens, self.rollouts, self.metrics = 0, None, {}

    def state(self, within_rollout):
        """What a checkpoint keeps; of the generation only if the next step goes on with it."""
        kept = within_rollout and self.rollouts is not None
        return {
            "prompts": [self.order.epoch, self.order.position],
            "num_tokens": self.num_tokens,
            "rollouts": self.rollouts.state() if kept else None,
            "metrics": self.metrics if kept else {},
        }

    def begin(self, rollouts, drawn, names, train):
        """Go on with a new generation. drawn: list of Draw; names: of the reward functions."""
        groups = [group for each in drawn for group in each.groups]
        self.rollouts, self.metrics = rollouts, draw_metrics(drawn, names)
        self.metrics["frac_reward_zero_std"] = frac_reward_zero_std(groups, train)
        self.num_tokens += sum(each.num_tokens for each in drawn)
        num_samples = sum(len(each.samples) for each in drawn)
        if num_samples > len(rollouts.advantages):
            self.metrics["dynamic_sampling/dropped"] = 1 - len(rollouts.advantages) / num_samples

    def restore(self, state, train):
        """Go on from a checkpoint's state; a generation that `train`, changed since, has no use for is left out."""
        self.order.epoch, self.order.position = state["prompts"]
        self.num_tokens = state["num_tokens"]
        if state["rollouts"] is None:
            return
        rollouts = Rollouts(**state["rollouts"])
        if len(rollouts.advantages) == train.rollout_batch_size and bool(train.beta) <= (
            len(rollouts.ref_logprobs) > 0
        ):
            self.rollouts, self.metrics = rollouts, state["metrics"]
        else:
            say("the completions in the checkpoint do not fit the changed configuration: drawing others")


def prompts_of(path, run, llm):
    """The prompts of a file; says how many were too long."""
    data = load_prompts(path, run.data, llm.tokenizer, llm.max_model_len, llm.model.config.vocab_size)
    if data.dropped_prompts:
        say(f"{path}: {data.dropped_prompts} prompts are longer than data.max_prompt_length and are left out")
    return data


def sampling_params(train, seed, n):
    """The SamplingParams of a [train] section."""
    return SamplingParams(
        temperature=train.temperature,
        top_p=train.top_p,
        top_k=train.top_k,
        min_p=train.min_p,
        repetition_penalty=train.repetition_penalty,
        max_tokens=train.max_completion_length,
        seed=seed,
        n=n,
    )


def roll_out(llm, rewards, prompts, order, run, now, index, clock, writer):
    """One generation: (Rollouts to train on, list of Draw with all that was drawn).

    order: PromptOrder, moved on; now: TrainerState; index: the micro-step that it begins. Raises RewardError.
    """
    train = run.train
    aggregation = train.multi_objective_aggregation
    llm.wake()
    drawn, groups, uniform = [], [], []
    for attempt in range(train.max_gen_batches if train.dynamic_sampling else 1):
        # prompt -> ids -> completions -> reward
        chosen = order.take(train.prompts_per_rollout - len(groups))
        seed = derived_seed(run.seed, now.global_step, index, attempt)
        params = sampling_params(train, seed, train.num_generations)
        drawn.append(draw(llm, rewards, prompts, chosen, params, now, clock, writer.status))
        for group in drawn[-1].groups:
            (uniform if train.dynamic_sampling and is_uniform(group, aggregation) else groups).append(group)
        if len(groups) == train.prompts_per_rollout:
            break
    # Where groups with something to teach ran short, the last uniform ones keep the batch's size; they weigh nothing.
    groups += uniform[len(uniform) - (train.prompts_per_rollout - len(groups)) :]
    # reward -> advantage
    set_advantages(groups, rewards.weights, train.scale_rewards, aggregation)
    # completions -> batch
    samples = [sample for group in groups for sample in group]
    shuffled = np.random.default_rng(derived_seed(run.seed, now.global_step, index)).permutation(len(samples))
    rollouts = Rollouts.of([samples[i] for i in shuffled], train.mask_truncated_completions, now.global_step)
    llm.sleep()
    return rollouts, drawn


def evaluate(llm, rewards, prompts, run, now):
    """Metrics of one completion for every held-out prompt, the same noise each time: {"eval_reward": ..., ...}."""
    llm.wake()
    params = sampling_params(run.train, derived_seed(run.seed), 1)
    drawn = draw(llm, rewards, prompts, range(len(prompts.prompts)), params, now, Clock())
    llm.sleep()
    found = draw_metrics([drawn], rewards.names)
    return {f"eval_{name}": value for name, value in found.items()}


def before_and_after(llm, prompts, run, path, count=4, width=200):
    """What the first prompts got at the first step, and what the same noise makes of them now: str of several lines.

    path: of the run, for its completions.jsonl; count: prompts shown; width: characters of a text.
    """
    train = run.train
    with open(path / "completions.jsonl", encoding="utf-8") as file:
        rows = [row for line in file if (row := json.loads(line))["step"] == 1]
    first = rows[: train.rollout_batch_size : train.num_generations][:count]
    chosen = PromptOrder(len(prompts.prompts), train.shuffle_dataset, run.seed).take(train.prompts_per_rollout)
    params = sampling_params(train, derived_seed(run.seed, 0, 0, 0), 1)
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


def loss_config(train):
    """The PolicyLossConfig of a [train] section."""
    return PolicyLossConfig(
        loss_type=train.loss_type,
        importance_sampling_level=train.importance_sampling_level,
        epsilon=train.epsilon,
        epsilon_high=train.epsilon_high,
        delta=train.delta,
        beta=train.beta,
        use_bias_correction_kl=train.use_bias_correction_kl,
        max_completion_length=train.max_completion_length,
        importance_sampling_correction=(
            train.vllm_importance_sampling_mode if train.vllm_importance_sampling_correction else None
        ),
        importance_sampling_clip_max=train.vllm_importance_sampling_clip_max,
        importance_sampling_clip_min=train.vllm_importance_sampling_clip_min,
        off_policy_mask_threshold=train.off_policy_mask_threshold,
        sapo_temperature_pos=train.sapo_temperature_pos,
        sapo_temperature_neg=train.sapo_temperature_neg,
        vespo_k_pos=train.vespo_k_pos,
        vespo_lambda_pos=train.vespo_lambda_pos,
        vespo_k_neg=train.vespo_k_neg,
        vespo_lambda_neg=train.vespo_lambda_neg,
    )


class Learner:
    """The policy and what changes it: gradients, optimizer, and the reference model where beta asks for one.

    model, reference: Transformers, the latter None without beta; train: GRPOConfig.
    """

    def __init__(self, model, reference, train):
        self.model, self.reference, self.train = model, reference, train
        self.grads = model.weights.grads()
        self.optimizer = make_optimizer(model, self.grads, train)
        self.config = loss_config(train)
        self.arena = Arena("activations")

    def state(self):
        """What a checkpoint keeps beside the weights. The reference is `model` itself unless it moves."""
        moves = self.train.sync_ref_model
        return {
            "optimizer": self.optimizer.state_dict(),
            "reference": np.array(device.to_host(self.reference.weights.flat)) if moves else None,
        }

    def restore(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        if self.reference is not None and state["reference"] is not None:
            self.reference.weights.flat[...] = device.asarray(state["reference"])

    @property
    def rollout_is_exact(self):
        """Whether the sampler's log-probs are, bit for bit, those of a training forward with the same weights."""
        train = self.train
        filtered = train.top_p < 1 or train.top_k > 0 or bool(train.min_p) or train.repetition_penalty != 1
        return not filtered and gemm.backend() != "cublas"

    def add_logprobs(self, rollouts, on_policy):
        """Write the log-probs of the reference and, if they are needed, of the policy that is now becoming old.

        On-policy they are those of the training forward itself, and an exact sampler's are the same bits.
        """
        parts = rollouts.parts(self.train.per_device_train_batch_size)
        if self.reference is not None:
            rollouts.ref_logprobs = self._logprobs(self.reference, parts)
        if not on_policy and not self.rollout_is_exact:
            rollouts.old_logprobs = self._logprobs(self.model, parts)

    def _logprobs(self, model, parts):
        """(T,) float32 on the host: log-probs of all completion tokens, from forwards without a tape."""
        found = []
        for part in parts:
            batch = device_batch(part)
            where = batch.packed, batch.rows, batch.target_ids
            logprobs = target_logprobs(model, *where, self.train.temperature, self.arena)
            found.append(np.array(device.to_host(logprobs)))
        return np.concatenate(found)

    def step(self, micro_batches, step, learning_rate):
        """One optimizer step: metrics by name.

        micro_batches: list of Rollouts; step: optimizer steps behind the weights. Writes gradients, weights and the
        optimizer's state.
        """
        model, config, arena, xp = self.model, self.config, self.arena, device.xp()
        temperature = self.train.temperature
        num_tokens = sum(part.num_active for part in micro_batches)
        num_sequences = sum(len(part.advantages) for part in micro_batches)
        ends = np.cumsum([len(part.loss_mask) for part in micro_batches])
        # Kept on the device until the step is done, so that no micro-batch waits for the host.
        loss, unread = xp.zeros(1, np.float32), xp.zeros(1, np.float32)
        entropy = xp.empty(int(ends[-1]), np.float32)
        stats = xp.empty((len(micro_batches), METRICS), np.float32)
        self.optimizer.zero_grad()
        for i, part in enumerate(micro_batches):
            with arena.scope():
                batch = device_batch(part)
                tape = Tape(self.train.gradient_checkpointing)
                logprobs, dlogprobs = (arena.empty(batch.target_ids.shape, np.float32) for _ in range(2))
                micro_scale = policy_loss_scale(config, num_sequences, num_tokens, part.num_active, len(micro_batches))
                # ids -> hidden
                packed = batch.packed
                attend = attention_of(model, packed, arena)
                hidden = model.forward(packed.input_ids, packed.position_ids, attend, tape, arena)
                # hidden -> logprobs -> loss -> dhidden
                targets = hidden, batch.rows, batch.target_ids, temperature
                part_entropy = entropy[ends[i] - len(logprobs) : ends[i]]
                if part.step == step and self.rollout_is_exact:
                    # The forward will find the sampler's log-probs, so the gradient is known before it. The loss is
                    # taken once more after it, for metrics that would tell if it found others.
                    drawn = batch.rollout_logprobs
                    self._loss(batch, drawn, drawn, micro_scale, unread, dlogprobs, arena.empty((METRICS,), np.float32))
                    dhidden = head_with_gradient(
                        model, *targets, dlogprobs, self.grads, arena, logprobs, part_entropy, accumulate=i > 0
                    )
                    self._loss(batch, logprobs, logprobs, micro_scale, loss, dlogprobs, stats[i])
                else:
                    head = head_forward(model, *targets, arena, logprobs, part_entropy)
                    if part.step == step:
                        old_logprobs = logprobs
                    else:
                        old_logprobs = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
                    self._loss(batch, logprobs, old_logprobs, micro_scale, loss, dlogprobs, stats[i])
                    dhidden = head_backward(model, head, dlogprobs, hidden.shape[0], self.grads, arena)
                model.backward(dhidden, tape, self.grads)
        # grads -> step
        info = self.optimizer.step(learning_rate)
        if self.train.sync_ref_model and (step + 1) % self.train.ref_model_sync_steps == 0:
            self._move_reference()
        metrics = {"loss": float(device.to_host(loss)[0]), "grad_norm": info.grad_norm, "learning_rate": learning_rate}
        mask = np.concatenate([part.loss_mask for part in micro_batches])
        metrics["entropy"] = float(np.dot(device.to_host(entropy), mask) / max(num_tokens, 1))
        metrics |= policy_metrics(device.to_host(stats), config, rollout=True)
        if self.optimizer.skipped_steps:
            metrics["skipped_steps"] = self.optimizer.skipped_steps
        return metrics

    def _loss(self, batch, logprobs, old_logprobs, scale, loss, dlogprobs, stats):
        """policy_loss of a DeviceBatch: loss is added to, dlogprobs and stats (METRICS,) are written."""
        policy_loss(
            logprobs,
            old_logprobs,
            batch.ref_logprobs,
            batch.rollout_logprobs,
            batch.advantages,
            batch.loss_mask,
            batch.cu_seqlens,
            self.config,
            scale,
            loss,
            dlogprobs,
            self.arena.empty((batch.advantages.shape[0], METRICS), np.float32),
            stats,
        )

    def _move_reference(self):
        """reference = alpha policy + (1 - alpha) reference (arXiv 2404.09656)."""
        alpha, moved = self.train.ref_model_mixup_alpha, self.reference.weights.flat
        with self.arena.scope():
            part = self.arena.empty(moved.shape, moved.dtype)
            scale(self.model.weights.flat, alpha, part)
            scale(moved, 1.0 - alpha, moved)
            add(part, moved, moved)


@dataclass(frozen=True)
class TrainerState:
    """What reward functions see of the run as `trainer_state`; the names are transformers'."""

    global_step: int
    max_steps: int
    epoch: float


def mean_metrics(of_parts):
    """The mean of each metric over the micro-batches that have it, NaN left out: dict."""
    names = dict.fromkeys(name for metrics in of_parts for name in metrics)
    found = {}
    for name in names:
        values = [metrics[name] for metrics in of_parts if name in metrics and not math.isnan(metrics[name])]
        found[name] = sum(values) / len(values) if values else math.nan
    return found
