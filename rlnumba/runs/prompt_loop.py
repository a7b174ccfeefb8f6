"""The loop of trainers that draw completions: GRPO, RLOO, PPO and distillation, each a TrainerOnPrompts.

    generation       completions from the engine with their rewards: TrainerOnPrompts.generate
    optimizer step   on micro-batches of it: TrainerOnPrompts.train_step
    then             evaluation, log, checkpoint, where they are due

Engine and policy read the same weights, so nothing is copied between them. With [async] the completions are drawn
ahead of training, and with deploy.zero_stage = 3, where ranks have the weights in parts, those of evaluations by the
inference processes, too: sampling/generations.py knows where. Without such processes the engine of each rank gathers
the weights for the time in which it draws (parallel/gathered_weights.py). With deploy.tensor_parallel_size some
ranks are one engine for that time (parallel/cut_weights.py).
"""

import copy
import math
from collections.abc import Callable
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np

from rlnumba import data
from rlnumba.config.rollout import GroupConfig
from rlnumba.engine.core import longest_sequence
from rlnumba.engine.llm import LLM
from rlnumba.environments.agents import AgentsSetup, load_agents
from rlnumba.errors import ConfigError, UserError, shown
from rlnumba.model.config import LM_HEAD
from rlnumba.model.hub import find_base, find_model, read_config
from rlnumba.model.quantized.weights import weights_in
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.optim import learning_rate_at
from rlnumba.parallel.ray_cluster import connected
from rlnumba.parallel.tensor_parallel import TensorParallel, follow, load_shard
from rlnumba.reporting.stderr import log
from rlnumba.rewards import TrainingProgress
from rlnumba.runs import evaluation, kept_data
from rlnumba.runs.planning.planned import Step, invented_rollouts, lengths_with_most_rows, longest_completions
from rlnumba.runs.prompt_run import (
    check_stops_of,
    eval_params,
    evaluate,
    load_prompts,
    prompt_order,
    sample_report,
)
from rlnumba.runs.prompt_schedule import BEGINNING, DataState, MicroBatchSchedule, Start, course_of
from rlnumba.runs.resolve import resolve_here
from rlnumba.runs.run_digest import row_hashes
from rlnumba.runs.run_folder import KERNEL_LIST, Clock, begin_run, kernel_request, memory_metrics, owner_of
from rlnumba.runs.token_log import TokenLog
from rlnumba.runtime import device, garbage
from rlnumba.sampling.generations import Connected, Generations
from rlnumba.sampling.inference import WaitingProcesses
from rlnumba.sampling.pipeline import PromptSource
from rlnumba.sampling.pipeline_state import encoded
from rlnumba.sampling.processes import LLMOnProcesses
from rlnumba.sampling.ranks import LedLLM
from rlnumba.sampling.samples import differing_prompts
from rlnumba.sampling.weights.shards import is_in_parts
from rlnumba.trainers.reward_model import load_rewards


def save_final(folder, policy, tokenizer):
    """Write final/ of a RunFolder, the policy as a causal language model."""
    policy.gather_adapter()
    folder.finish(policy.model, tokenizer, LM_HEAD)


class TrainerOnPrompts(NamedTuple):
    """A trainer on the model's own completions of prompts, with rewards; the loop, PromptLoop, is the same for all.

    run_class: its Run. load(run, folder): (Policy, Tokenizer), folder being the RunFolder. generate(policy,
    generations, trainer_state, index, on_policy, clock): (Rollouts, Generation, metrics) of the next of Generations;
    index: the micro-step that trains on it first; on_policy: see grpo.add_logprobs; raises RewardError.
    train_step(policy, micro_batches, learning_rate): LateMetrics, or a dict. save_final(folder, policy, tokenizer):
    writes what a run ends with.

    Needed by a plan and a kernel list: models_of(run): the Models. completions_at_once(train, length): the most
    completions that one forward and backward pass has, with prompts of `length` tokens each. rehearse(run, policy,
    critic, rollouts, every_form): functions that compute what goes before an optimizer step on one micro-batch of
    Rollouts, and that take the step, in each form that it may have or in the commonest. has_graphs: whether
    micro-batches become CUDA graphs.
    """

    run_class: type
    load: Callable
    generate: Callable
    train_step: Callable
    models_of: Callable
    completions_at_once: Callable
    rehearse: Callable
    save_final: Callable = save_final
    has_graphs: bool = False

    @property
    def trains_lm_head(self):
        """Whether the policy is a language model: bool."""
        return True

    def train(self, run, resume=False, reward_funcs=(), communicator=None):
        """Train a Run, and return its TrainerState; writes its output_dir.

        resume: True to continue from the newest readable checkpoint there, an int from that of this step. reward_funcs:
        the functions themselves, where run.rewards.funcs only names them. communicator: that of the ranks that train
        together and call this with the same arguments, or None. A signal in the middle of the run and a reward that
        fails leave a checkpoint of the last complete step.
        """
        run = resolve_here(run, communicator)
        with (
            owner_of(run, communicator),
            nodes_of(run, communicator),
            WaitingProcesses(processes_of(run, communicator)) as waiting,
            agents_of(run, find_model(run.model, weights=False)) as agents,
            begin_run(run, resume, communicator) as folder,
        ):
            return PromptLoop(self, folder, reward_funcs, communicator, waiting, agents).train()

    def check_eval_data(self, run):
        """Every rank reads the prompts itself."""

    def evaluate(self, run, model, status, communicator, reward_funcs=(), is_cut=False):
        """(metrics of a run's data.eval by name, lines of completions.jsonl) for a folder of a model or an adapter,
        None: the run's, on each rank. status: called with a line on the progress, or None. is_cut: whether each rank
        has a part of the model, and rank 0 alone the result."""
        params = eval_params(run)
        base, _ = find_base(model or run.model)
        load = partial(load_model, model or run.model, run.train.dtype, make_weights=weights_in(run.quantization))
        if is_cut and communicator.rank:
            return follow(load_shard(communicator, load), run.engine)
        with agents_of(run, base) as agents:
            rewards = rewards_of(run, reward_funcs, agents) if communicator.rank == 0 else None
            check_stops_of(params, base)
            llm = LLM(load_shard(communicator, load) if is_cut else load(), Tokenizer.from_folder(base), run.engine)
            ranks = LedLLM(llm, None if is_cut else communicator, agents)
            prompts = load_prompts(run.data.eval, run, llm, True, agents)

            def draw():
                drawn = ranks.llm, rewards, prompts, params, TrainingProgress(0, 0, 0.0), status
                generation = evaluation.generate(*drawn)
                rows = generation.rows(rewards.names, run.train.log_completions_tokens)
                for row in rows:
                    del row["advantage"]
                return evaluation.metrics_of(generation, rewards.names, run), rows

            found = ranks.led(draw, shared=lambda found: (found[0], []))
            if is_cut:
                llm.model.ranks.end()
            return found

    def planned_step(self, planner, run):
        """The Step of a Planner's run, or of a variant of it: completions of the longest prompt, as long as they may
        be."""
        prompts, prompt, length = longest_completions(planner, run)
        rows = self.completions_at_once(run.train, length)

        def invented(prompts):
            completion = min(run.train.max_completion_length, length - min(prompts))
            found = invented_rollouts(run.train, prompts, completion, rows)
            if run.train.generation.replays_experts:
                sizes = len(planner.config.mixture_layers), planner.config.num_experts_per_tok
                found.routed_experts = np.full((len(found.token_ids), *sizes), -1, np.int16)
            return found

        def rehearse(policy, critic, rollouts, every_form):
            return self.rehearse(run, policy, critic, rollouts, every_form)

        def calls(policy, critic):
            yield from rehearse(policy, critic, invented([prompt]), True)
            sharing = policy.prefix_sharing(policy.model, critic and critic.model)
            if sharing is not None:
                lengths, _ = planner.prompts(run.data.max_prompt_length)
                others = lengths_with_most_rows(lengths, run.train, length, rows, sharing)
                if (others != prompt).any():
                    yield from rehearse(policy, critic, invented(others), False)

        sequences = rows
        if run.train.max_tokens_per_micro_batch is not None:
            # However short the completions of a step are.
            sequences = max(rows, run.train.per_device_train_batch_size * run.train.micro_batches_per_step)
        return Step(calls, rows * length, sequences, self.models_of(run), prompts, rehearse=rehearse)


@contextmanager
def agents_of(run, folder):
    """A context manager of the Agents of a run and the model of a folder, whose environments are closed at its end, or
    of None.

    Raises UserError, before any weights are read, for tools, environments, a chat template and training rows that do
    not go together.
    """
    if not run.has_episodes:
        yield None
        return
    tokenizer = Tokenizer.from_folder(folder)
    with closing(load_agents(run, tokenizer)) as agents:
        config = read_config(folder)
        limit = longest_sequence(config, run.engine)
        arguments = run.data.train, run.data, tokenizer, limit, config.vocab_size, None, agents.prompt_tools
        kept_data.keep(kept_data.prompts_key(run, limit), data.load_prompts(*arguments))
        yield agents


def rewards_of(run, reward_funcs, agents):
    """The Rewards of a run with get_reward of the environments of its Agents."""
    rewards = load_rewards(run, reward_funcs, () if agents is None else agents.reward_classes)
    if rewards.read_environments and run.draws_on_ranks:
        raise ConfigError(
            f"[async] with deploy.num_train_gpus ({run.num_ranks}) above 1: a reward function takes `environments`, "
            "which are on the ranks that play the episodes: deploy.num_infer_gpus must be at least 1"
        )
    if agents is not None:
        agents.rewards_read_environments = rewards.read_environments
    return rewards


def nodes_of(run, communicator):
    """A context manager in which the first rank is connected to the Ray cluster of its inference engines, if any."""
    deploy, is_first = run.deploy, communicator is None or communicator.rank == 0
    if not deploy.num_infer_nodes or not is_first:
        return nullcontext()
    processes = deploy.num_infer_gpus // deploy.num_infer_nodes
    return connected("deploy.num_infer_nodes", deploy.num_infer_nodes, processes, device.name() == "cuda")


def processes_of(run, communicator):
    """The number of inference processes that this rank starts on its host: int."""
    deploy, is_first = run.deploy, communicator is None or communicator.rank == 0
    return deploy.num_engines if is_first and deploy.num_infer_gpus and deploy.launcher != "ray" else 0


def with_ranks(model, communicator, size):
    """A model of which this rank's engine computes its part, with those of a group of `size` ranks, or of all.

    communicator: that of all ranks. A group of one has the model itself.
    """
    if size == 1:
        return model
    group, first, result = communicator, None, copy.copy(model)
    if size < communicator.world_size:
        group, first = communicator.group, communicator.rank - communicator.group.rank
    result.ranks = TensorParallel(group, model.config.vocab_size, first)
    return result


class PromptLoop:
    """The loaded parts of the run of a RunFolder, and its steps. The other arguments are those of
    TrainerOnPrompts.train.

    llm: this rank's, or the LLMOnProcesses of ranks that have the weights in parts and inference processes beside them.
    waiting: the WaitingProcesses that become the run's inference processes. agents: the run's Agents, or None. state:
    the DataState; complete: what a checkpoint keeps of the data after the last complete step.
    """

    def __init__(self, algorithm, folder, reward_funcs, communicator, waiting, agents=None):
        self.algorithm, self.folder, self.waiting = algorithm, folder, waiting
        self.run = run = folder.run
        self.rewards = rewards_of(run, folder.moved_models(reward_funcs), agents) if folder.is_first_rank else None
        if self.rewards is not None:
            if run.has_episodes and run.deploy.num_infer_gpus:
                # For functions that other processes cannot have.
                AgentsSetup.of(run, self.rewards)
            # While the model is loaded.
            self.rewards.start()
            folder.compare_sources(self.rewards, agents)
        self.policy, self.tokenizer = algorithm.load(run, folder)
        # Whether rank 0 cannot draw alone: where ranks draw ahead of training, each has all weights for it.
        has_part = is_in_parts(self.policy.model.weights) or run.deploy.cuts_rollout
        self.draws_together = has_part and not run.draws_on_ranks
        if is_in_parts(self.policy.model.weights) and run.deploy.num_infer_gpus:
            self.llm = LLMOnProcesses(self.policy.model, self.tokenizer, run.engine, run.asynchronous)
        else:
            model = with_ranks(self.policy.model, communicator, run.deploy.ranks_of_engine)
            self.llm = LLM(model, self.tokenizer, run.engine)
        if run.rollout_is_quantized:
            log(
                f"engine.quantization {run.engine.quantization}: completions are drawn by copies of the weights in 8 "
                "bits, and their log-probs are not exactly those of training"
            )
        self.prompts = load_prompts(run.data.train, run, self.llm, agents=agents)
        self.eval_data = load_prompts(run.data.eval, run, self.llm, True, agents) if run.data.eval else None
        # Rows of no file are all alike, as many as a generation takes: one stands for them.
        own = self.prompts.prompts if run.data.train else self.prompts.prompts[:1]
        hashes = [
            None if data is None else row_hashes([content_of(each) for each in data])
            for data in (own, self.eval_data and self.eval_data.prompts)
        ]
        # {index of a prompt there: its index here} if the prompts are not the checkpoint's, else None.
        self.moved = folder.compare_rows(*hashes)
        self.schedule = self._new_schedule()
        self.state = DataState(prompt_order(self.prompts, run))
        source = PromptSource(self.prompts, self.state.order, self.rewards)
        self.generations = Generations(run, self.policy, self.llm, source, communicator)
        self._begin_generations(self._restore(), waiting)
        self.complete = self._completed(folder.step)
        # Generations that are not in completions.jsonl yet.
        self.unwritten, self.is_first_step, self.token_log = [], True, None
        self.agents, self.has_warned = agents, False

    def _restore(self):
        """Take up the state of the checkpoint that the run goes on from: its groups that are not trained on, a list."""
        folder = self.folder
        if folder.state is None:
            return []
        self.policy.load_state_dict(folder.state["policy"])
        saved = folder.state["data"]
        self.state.load_state_dict(saved, self.run.train, self.moved)
        self._continue_schedule(saved)
        self.llm.update_weights(folder.step)
        groups = saved.get("groups", [])
        if groups and self.moved is not None:
            log(f"{len(groups)} groups of the prompts before are not trained on")
            groups = []
        return groups

    def _new_schedule(self, start=BEGINNING):
        return MicroBatchSchedule(self.run.train, self.run.data.train, len(self.prompts.prompts), start)

    def _continue_schedule(self, saved):
        """Let the schedule be that of the checkpoint, or with other sizes or prompts begin at its step."""
        step = self.folder.step
        if "sizes" not in saved:  # a checkpoint of before these were kept
            return
        self.schedule = self._new_schedule(Start(*saved["start"]))
        if saved["sizes"] != self.schedule.sizes or self.moved is not None:
            within = saved["within"] if self.state.rollouts is not None else 0
            within %= self.schedule.micro_steps_per_generation
            self.schedule = self._new_schedule(Start(step, saved["epochs"], within))

    def _begin_generations(self, groups, waiting):
        """Let the generations go on after those of the checkpoint, with its groups."""
        run, step = self.run, self.folder.step
        if groups and not run.generates_beside:
            raise ConfigError(
                f"{self.folder.model_folder} has {len(groups)} prompts of an asynchronous run that are not trained on "
                "yet: resume it with its section [async]"
            )
        course = course_of(run, self.schedule, step, self.state.rollouts is not None)
        self.generations.begin(course, step, groups, Connected(waiting, (KERNEL_LIST, kernel_request(run))))

    def _completed(self, step):
        """The state of the data after so many steps, for a checkpoint."""
        schedule = self.schedule
        kept = self.state.state_dict(schedule.within_generation(step))
        within = schedule.micro_steps(step)[0].index % schedule.micro_steps_per_generation
        kept |= {"sizes": schedule.sizes, "start": schedule.start, "within": within}
        kept["epochs"] = schedule.epochs_done(step)
        return step, kept, self.generations.state()

    def train(self):
        """All steps that are left, and the end of the run: its TrainerState."""
        folder = self.folder
        with (
            self.policy.context.use(),
            folder.writer(self.schedule.total_steps) as self.writer,
            folder.kept_after_error(self.policy, self._save, lambda: self.complete[0]),
            garbage.unfrozen_at_end(),
            closing(self.generations),
        ):
            folder.hold_signals()
            self.generations.status = self.writer.status
            self._begin_token_log()
            self._begin()
            self.clock = Clock()
            for step in range(folder.step, self.schedule.total_steps):
                is_last = self._step(step)
                folder.release_signals()
                if is_last:
                    break
            self._finish()
        log(f"{folder.path} has the curves (curves.png), the completions and the model (final)")
        return folder.callbacks.state

    def _begin_token_log(self):
        """With train.log_token_values, have the tokens of each optimizer step written: one of grpo and rloo."""
        train = self.run.train
        if isinstance(train, GroupConfig) and train.log_token_values and self.folder.is_first_rank:
            self.token_log = TokenLog(self.writer, self.tokenizer, train.log_token_values)
            self.policy.after_step.append(self.token_log.write)

    def _begin(self):
        """Do what comes before the first step."""
        step, total_steps = self.folder.step, self.schedule.total_steps
        if self.generations.is_apart:
            self.generations.start()
        if self.eval_data and self.run.train.eval_on_start and step == 0:
            self.writer.log(0, self._evaluate(TrainingProgress(0, total_steps, 0.0)))
        self.folder.callbacks.begin(step, total_steps, self.schedule.epochs_done(step), self.policy.model)
        if not self.generations.is_apart:
            self.generations.start()

    def _step(self, step):
        """Generate as needed, one optimizer step, and what is due after it: whether the run ends with it."""
        schedule, callbacks, clock = self.schedule, self.folder.callbacks, self.clock
        trainer_state = TrainingProgress(step, schedule.total_steps, schedule.epochs_done(step))
        parts, generation_metrics, num_generated = self._generate(trainer_state)
        with clock.phase("train"):
            size = self.run.train.per_device_train_batch_size
            micro_batches = [rollouts.part(micro.first, size, micro.on_policy) for micro, rollouts in parts]
            metrics = self._update(step, micro_batches)
        is_last = step + 1 == schedule.total_steps
        with clock.phase("log"):
            # The run's own names take precedence over those that rewards log.
            metrics = metrics | generation_metrics | metrics
            metrics |= {"epoch": schedule.epochs_done(step + 1), "num_tokens": self.state.num_tokens}
            if self.prompts.dropped_prompts:
                metrics["dropped_prompts"] = self.prompts.dropped_prompts
            with self.folder.sharing():
                callbacks.step_end(step + 1, metrics["epoch"], self.policy.model)
        self._evaluate_if_due(trainer_state, is_last, metrics)
        with clock.phase("log"):
            if self.is_first_step and device.name() == "cuda":
                garbage.freeze()
            self.is_first_step = False
            num_tokens = sum(len(part.token_ids) for part in micro_batches)
            self._log(step, metrics, num_tokens, num_generated)
        is_last = is_last or callbacks.control.should_training_stop
        is_last, saves = self.folder.decided((is_last, callbacks.save_due(step + 1, is_last)))
        if saves:
            with clock.phase("save"):
                self._save()
                callbacks.call("on_save", self.policy.model)
        return is_last

    def _generate(self, trainer_state):
        """The data of a step: (list of MicroSteps and their Rollouts, mean metrics of these, tokens generated)."""
        schedule, state, clock = self.schedule, self.state, self.clock
        parts, metrics, num_generated = [], [], 0
        for micro in schedule.micro_steps(trainer_state.global_step):
            if micro.begins_generation or state.rollouts is None:
                with clock.phase("generate"):
                    rollouts, generation, own_metrics = self.algorithm.generate(
                        self.policy, self.generations, trainer_state, micro.index, schedule.on_policy, clock
                    )
                with clock.phase("log"):
                    state.begin(rollouts, generation, self.generations.names, own_metrics)
                    num_generated += generation.num_generated + generation.num_unused
                    self.unwritten.append(generation)
                    self._warn_of_other_prompts(generation)
                    if self.token_log is not None:
                        self.token_log.begin(trainer_state.global_step + 1, generation)
            parts.append((micro, state.rollouts))
            metrics.append(state.metrics)
        return parts, mean_metrics(metrics), num_generated

    def _warn_of_other_prompts(self, generation):
        """Log, once, that an environment has given members of a group other prompts."""
        if self.agents is None or self.has_warned or not self.folder.is_first_rank:
            return
        pair = differing_prompts(generation.groups)
        if pair is not None:
            self.has_warned = True
            other, first = (shown(each.prompt.prompt[-1].get("content")) for each in pair)
            log(
                f"warning: {pair[0].prompt.where}: rewards are compared within a group, and its members begin with "
                f"other prompts, {first} and {other} (env/group_prompts_differ_frac): let reset take its task from the "
                "row or from `seed`"
            )

    def _update(self, step, micro_batches):
        """The optimizer step, and its weights to the engine: metrics. Signals are held from here on."""
        if self.token_log is not None:
            self.token_log.step = step + 1
        learning_rate = learning_rate_at(self.run.train, step, self.schedule.total_steps)
        metrics = self.algorithm.train_step(self.policy, micro_batches, learning_rate)
        self._write_completions(step)
        self.policy.say_who_waits()
        self.policy.move_reference_if_due(step + 1)
        self.complete, self.policy.is_updating = self._completed(step + 1), False
        self.generations.update_weights(step + 1)
        # Kernels that were launched count here.
        device.synchronize()
        return metrics

    def _write_completions(self, step):
        """Let a thread write the completions of a step: while the device computes, it takes no time from this one."""
        generations, self.unwritten = self.unwritten, []
        if generations:
            names, has_tokens = self.generations.names, self.run.train.log_completions_tokens
            rows = (row for each in generations for row in each.rows(names, has_tokens))
            self.writer.completions(step + 1, rows)

    def _evaluate_if_due(self, trainer_state, is_last, metrics):
        """Add an evaluation to the metrics of a step where one is due."""
        folder, done = self.folder, trainer_state.global_step + 1
        if not self.eval_data or not folder.decided(folder.callbacks.evaluation_due(done, is_last)):
            return
        with self.writer.logged_on_interruption(done, metrics), folder.interruptible(), self.clock.phase("eval"):
            self.generations.settle()
            found = self._evaluate(trainer_state)
        metrics |= found
        with self.clock.phase("log"):
            if folder.is_first_rank:
                with folder.sharing():
                    folder.callbacks.evaluated(found, self.policy.model)

    def _evaluate(self, trainer_state):
        """The metrics of an evaluation, on all ranks: dict."""
        arguments = self.generations.leader, self.rewards, self.eval_data, self.run, trainer_state
        return self.generations.led(lambda: evaluate(*arguments))

    def _log(self, step, metrics, num_tokens, num_generated):
        """Write the metrics of a step. num_tokens, num_generated: trained on, and generated."""
        # Time from here on counts in the next step.
        metrics |= self.clock.read()
        metrics["perf/throughput"] = num_tokens / metrics["step_time"]
        if num_generated and not self.generations.is_ahead:
            metrics["perf/generation_tokens_per_s"] = num_generated / metrics["time/generate"]
        with self.folder.sharing():
            self.writer.log(step + 1, metrics | memory_metrics())
            self.folder.callbacks.logged(metrics, self.policy.model, self.writer)
            self.folder.saver.check()

    def _save(self):
        """Save a checkpoint of the last complete step."""
        self.writer.flush()
        step, data_state, groups = self.complete
        data_state |= {"groups": encoded(groups)} if groups else {}
        self.folder.save(step, self.policy, self.tokenizer, {"data": data_state})

    def _finish(self):
        """Do what comes after the last step: write samples of what was learned, and final/."""
        folder, writer, generations = self.folder, self.writer, self.generations
        if not self.draws_together:
            generations.close()
        folder.callbacks.call("on_train_end", self.policy.model)
        writer.flush()
        writer.draw()
        # While the last checkpoint is being written.
        if folder.is_first_rank or self.draws_together:
            text = generations.led(self._samples) if self.draws_together else self._samples()
            if text:
                writer.print(text)
        if self.draws_together:
            generations.close()
        self.algorithm.save_final(folder, self.policy, self.tokenizer)

    def _samples(self):
        """Samples of what was learned: str, empty if there are none."""
        folder = self.folder
        if not (folder.path / "completions.jsonl").exists():
            return ""
        total, epochs = self.schedule.total_steps, self.schedule.epochs_done(self.schedule.total_steps)
        llm = self.generations.leader if self.run.deploy.cuts_rollout else self.llm
        try:
            return sample_report(llm, self.prompts, self.run, folder.path, TrainingProgress(total, total, epochs))
        except UserError as error:
            # A tool or an environment that fails now takes nothing of what was trained.
            log(f"there are no samples of what was learned: {error}")
            return ""


def content_of(prompt):
    """The content of a Prompt that a run reads, for row_hashes: tuple."""
    content = prompt.prompt, prompt.prompt_token_ids, prompt.columns
    return content if prompt.given is None else (*content, prompt.given.token_ids)


def mean_metrics(of_parts):
    """The mean of each metric over the micro-batches that have it, NaN left out: dict."""
    found = {}
    for name in dict.fromkeys(name for metrics in of_parts for name in metrics):
        values = [metrics[name] for metrics in of_parts if name in metrics and not math.isnan(metrics[name])]
        found[name] = sum(values) / len(values) if values else math.nan
    return found
