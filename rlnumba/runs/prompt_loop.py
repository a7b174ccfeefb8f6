"""The loop of trainers on prompts and rewards: GRPO, RLOO and PPO, each of which is a TrainerOnPrompts.

    generation       completions from the engine with their rewards: TrainerOnPrompts.generate
    optimizer step   on micro-batches of it: TrainerOnPrompts.train_step
    then             evaluation, log, checkpoint, where they are due

Engine and policy read the same weights, so nothing is copied between them. With [async] the completions are drawn
ahead of training (asynchronous.py), and with deploy.zero_stage = 3, where no rank has all weights, those of evaluations
elsewhere, too (engine_elsewhere.py).
"""

import math
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import NamedTuple

from rlnumba.engine.llm import LLM
from rlnumba.errors import ConfigError
from rlnumba.model.config import LM_HEAD
from rlnumba.model.hub import find_base
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.optim import learning_rate_at
from rlnumba.parallel.ray_cluster import connected
from rlnumba.rewards import TrainerState
from rlnumba.runs import evaluation
from rlnumba.runs.planning.planned import Step, invented_rollouts, longest_completions
from rlnumba.runs.prompt_run import (
    check_stops_of,
    eval_params,
    evaluate,
    load_prompts,
    prompt_order,
    sample_report,
    sampling_params,
)
from rlnumba.runs.prompt_schedule import BEGINNING, DataState, MicroBatchSchedule, Start
from rlnumba.runs.resolve import resolve_here
from rlnumba.runs.run_digest import row_hashes
from rlnumba.runs.run_folder import Clock, begin_run, log, memory_metrics, owner_of
from rlnumba.runtime import device, garbage
from rlnumba.sampling.inference import WaitingProcesses
from rlnumba.sampling.replicas import llm_on_ranks
from rlnumba.sampling.samples import derived_seed
from rlnumba.sampling.weights.shards import is_in_parts
from rlnumba.trainers.asynchronous import encoded, start_ahead
from rlnumba.trainers.engine_elsewhere import EngineElsewhere
from rlnumba.trainers.reward_model import load_rewards
from rlnumba.trainers.shared_rollout import RewardsOnRanks


def save_final(folder, policy, tokenizer):
    """Write final/ of a RunFolder, the policy as a causal language model."""
    policy.gather_adapter()
    folder.finish(policy.model, tokenizer, LM_HEAD)


class TrainerOnPrompts(NamedTuple):
    """A trainer on the model's own completions of prompts, with rewards; the loop, PromptLoop, is the same for all.

    run_class: its Run. load(run, folder): (Policy, Tokenizer), folder being the RunFolder. generate(policy, llm,
    rewards, prompts, order, run, trainer_state, index, on_policy, clock, writer): (Rollouts, list of Generation,
    metrics), where order and index are grpo.roll_out's and on_policy grpo.add_logprobs'; raises RewardError; with
    [async] it has the keyword ahead, an Ahead. train_step(policy, micro_batches, learning_rate): LateMetrics, or a
    dict. save_final(folder, policy, tokenizer): writes what a run ends with.

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
            begin_run(run, resume, communicator) as folder,
        ):
            return PromptLoop(self, folder, reward_funcs, communicator, waiting).train()

    def check_eval_data(self, run):
        """Every rank reads the prompts itself."""

    def evaluate(self, run, model, status, communicator, reward_funcs=()):
        """(metrics of a run's data.eval by name, lines of completions.jsonl) for a folder of a model or an adapter,
        None: the run's, on each rank. status: called with a line on the progress, or None."""
        params = eval_params(run)
        if params.temperature == 0 and params.n > 1:
            raise ConfigError(f"eval.num_generations ({params.n}) completions at temperature 0 are all the same")
        rewards = load_rewards(run, reward_funcs) if communicator.rank == 0 else None
        base, _ = find_base(model or run.model)
        check_stops_of(params, base)
        llm = LLM(load_model(model or run.model, run.train.dtype), Tokenizer.from_folder(base), run.engine)
        if communicator.world_size > 1:
            llm, rewards = llm_on_ranks(llm, communicator), RewardsOnRanks(rewards, communicator)
        prompts = load_prompts(run.data.eval, run, llm, for_eval=True)
        generation = evaluation.generate(llm, rewards, prompts, params, TrainerState(0, 0, 0.0), status)
        rows = generation.rows(rewards.names)
        for row in rows:
            del row["advantage"]
        return evaluation.metrics_of(generation, rewards.names, run), rows

    def planned_step(self, planner, run):
        """The Step of a Planner's run, or of a variant of it: completions of the longest prompt, as long as they may
        be."""
        prompts, prompt, length = longest_completions(planner, run)
        rows = self.completions_at_once(run.train, length)
        longest = invented_rollouts(run.train, [prompt], length - prompt, rows)

        def rehearse(policy, critic, rollouts, every_form):
            return self.rehearse(run, policy, critic, rollouts, every_form)

        def calls(policy, critic):
            return rehearse(policy, critic, longest, True)

        sequences = rows
        if run.train.max_tokens_per_micro_batch is not None:
            # However short the completions of a step are.
            sequences = max(rows, run.train.per_device_train_batch_size * run.train.micro_batches_per_step)
        return Step(calls, rows * length, sequences, self.models_of(run), prompts, rehearse)


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


class PromptLoop:
    """The loaded parts of the run of a RunFolder, and its steps. The other arguments are those of
    TrainerOnPrompts.train.

    llm: this rank's; generator: the LLM, or that of all ranks. elsewhere: the EngineElsewhere that both have where
    ranks have the weights in parts, else None. ahead: the Ahead of a run with [async], else None; waiting: the
    WaitingProcesses that become its inference processes. state: the DataState; complete: what a checkpoint keeps of the
    data after the last complete step.
    """

    def __init__(self, algorithm, folder, reward_funcs, communicator, waiting):
        self.algorithm, self.folder, self.waiting = algorithm, folder, waiting
        self.run = run = folder.run
        self.rewards = load_rewards(run, folder.moved_models(reward_funcs)) if folder.is_first_rank else None
        if self.rewards is not None:
            # While the model is loaded.
            self.rewards.start()
            folder.compare_rewards(self.rewards)
        self.policy, self.tokenizer = algorithm.load(run, folder)
        model, self.elsewhere = self.policy.model, None
        if is_in_parts(model.weights):
            self.elsewhere = EngineElsewhere(model.config, run.engine)
        self.llm = self.generator = LLM(model, self.tokenizer, run.engine, engine=self.elsewhere)
        if not folder.is_alone:
            self.generator = self.llm if self.elsewhere else llm_on_ranks(self.llm, communicator)
            self.rewards = RewardsOnRanks(self.rewards, communicator)
        self.prompts = load_prompts(run.data.train, run, self.llm)
        self.eval_data = load_prompts(run.data.eval, run, self.llm, for_eval=True) if run.data.eval else None
        hashes = [
            None if data is None else row_hashes([(each.prompt, each.prompt_token_ids, each.columns) for each in data])
            for data in (self.prompts.prompts, self.eval_data and self.eval_data.prompts)
        ]
        # {index of a prompt there: its index here} if the prompts are not the checkpoint's, else None.
        self.moved = folder.compare_rows(*hashes)
        self.schedule = self._new_schedule()
        self.state = DataState(prompt_order(self.prompts, run))
        self.ahead = self._start_ahead(self._restore())
        self.complete = self._completed(folder.step)
        # Generations that are not in completions.jsonl yet.
        self.unwritten, self.is_first_step = [], True

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

    def _start_ahead(self, groups):
        """The Ahead of a run with [async], with these groups of a checkpoint, and let the algorithm generate by it."""
        run, train, step = self.run, self.run.train, self.folder.step
        if not run.generates_beside:
            if groups:
                raise ConfigError(
                    f"{self.folder.model_folder} has {len(groups)} prompts of an asynchronous run that are not trained "
                    "on yet: resume it with its section [async]"
                )
            return None

        def params_of(step, index):
            return sampling_params(train, derived_seed(run.seed, step, index, 0), train.num_generations)

        parts = self.policy, self.llm, self.prompts, self.rewards, self.state, self.schedule
        ahead = start_ahead(run, *parts, step, groups, params_of, self.waiting)
        if self.elsewhere:
            self.elsewhere.ahead = ahead
        self.algorithm = self.algorithm._replace(generate=partial(self.algorithm.generate, ahead=ahead))
        return ahead

    def _completed(self, step):
        """The state of the data after so many steps, for a checkpoint."""
        schedule = self.schedule
        kept = self.state.state_dict(schedule.within_generation(step))
        within = schedule.micro_steps(step)[0].index % schedule.micro_steps_per_generation
        kept |= {"sizes": schedule.sizes, "start": schedule.start, "within": within}
        kept["epochs"] = schedule.epochs_done(step)
        return step, kept, self.ahead.state() if self.ahead else []

    def train(self):
        """All steps that are left, and the end of the run: its TrainerState."""
        folder, ahead = self.folder, self.ahead
        with (
            self.policy.context.use(),
            folder.writer(self.schedule.total_steps) as self.writer,
            folder.kept_after_error(self.policy, self._save, lambda: self.complete[0]),
            garbage.unfrozen_at_end(),
            closing(ahead) if ahead else nullcontext(),
        ):
            folder.hold_signals()
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

    def _begin(self):
        """Do what comes before the first step."""
        step, total_steps = self.folder.step, self.schedule.total_steps
        if self.elsewhere:
            self.ahead.start()
        if self.eval_data and self.run.train.eval_on_start and step == 0:
            self.writer.log(0, self._evaluate(TrainerState(0, total_steps, 0.0)))
        self.folder.callbacks.begin(step, total_steps, self.schedule.epochs_done(step), self.policy.model)
        if self.ahead and not self.elsewhere:
            self.ahead.start()

    def _step(self, step):
        """Generate as needed, one optimizer step, and what is due after it: whether the run ends with it."""
        schedule, callbacks, clock = self.schedule, self.folder.callbacks, self.clock
        trainer_state = TrainerState(step, schedule.total_steps, schedule.epochs_done(step))
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
                    rollouts, generations, own_metrics = self.algorithm.generate(
                        self.policy, self.generator, self.rewards, self.prompts, state.order, self.run, trainer_state,
                        micro.index, schedule.on_policy, clock, self.writer,
                    )  # fmt: skip
                with clock.phase("log"):
                    names = self.rewards.names
                    state.begin(rollouts, generations, names, own_metrics)
                    num_generated += sum(each.num_generated + each.num_unused for each in generations)
                    self.unwritten += generations
            parts.append((micro, state.rollouts))
            metrics.append(state.metrics)
        return parts, mean_metrics(metrics), num_generated

    def _update(self, step, micro_batches):
        """The optimizer step, and its weights to the engine: metrics. Signals are held from here on."""
        learning_rate = learning_rate_at(self.run.train, step, self.schedule.total_steps)
        metrics = self.algorithm.train_step(self.policy, micro_batches, learning_rate)
        self._write_completions(step)
        self.policy.move_reference_if_due(step + 1)
        self.complete, self.policy.is_updating = self._completed(step + 1), False
        (self.ahead or self.llm).update_weights(step + 1)
        # Kernels that were launched count here.
        device.synchronize()
        return metrics

    def _write_completions(self, step):
        """Let a thread write the completions of a step: while the device computes, it takes no time from this one."""
        generations, self.unwritten = self.unwritten, []
        if generations:
            self.writer.completions(step + 1, (row for each in generations for row in each.rows(self.rewards.names)))

    def _evaluate_if_due(self, trainer_state, is_last, metrics):
        """Add an evaluation to the metrics of a step where one is due."""
        folder, done = self.folder, trainer_state.global_step + 1
        if not self.eval_data or not folder.decided(folder.callbacks.evaluation_due(done, is_last)):
            return
        with self.writer.logged_on_interruption(done, metrics), folder.interruptible(), self.clock.phase("eval"):
            if self.ahead:
                self.ahead.settle()
            found = self._evaluate(trainer_state)
        metrics |= found
        with self.clock.phase("log"):
            if folder.is_first_rank:
                with folder.sharing():
                    folder.callbacks.evaluated(found, self.policy.model)

    def _evaluate(self, trainer_state):
        return evaluate(self.generator, self.rewards, self.eval_data, self.run, trainer_state)

    def _log(self, step, metrics, num_tokens, num_generated):
        """Write the metrics of a step. num_tokens, num_generated: trained on, and generated."""
        # Time from here on counts in the next step.
        metrics |= self.clock.read()
        metrics["perf/throughput"] = num_tokens / metrics["step_time"]
        if num_generated and not self.ahead:
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
        state = {"policy": self.policy.state_dict(), "data": data_state}
        self.folder.save(step, self.policy.model, self.tokenizer, state)

    def _finish(self):
        """Do what comes after the last step: write samples of what was learned, and final/."""
        folder, writer = self.folder, self.writer
        if self.ahead and not self.elsewhere:
            self.ahead.close()
        folder.callbacks.call("on_train_end", self.policy.model)
        writer.flush()
        writer.draw()
        # While the last checkpoint is being written.
        if folder.is_first_rank or self.elsewhere:
            self._print_samples()
        if self.elsewhere:
            self.ahead.close()
        self.algorithm.save_final(folder, self.policy, self.tokenizer)

    def _print_samples(self):
        """On rank 0, print samples of what was learned; with an EngineElsewhere all ranks draw them."""
        folder = self.folder
        is_there = (folder.path / "completions.jsonl").exists()
        if folder.decided(is_there) if self.elsewhere else is_there:
            if text := sample_report(self.llm, self.prompts, self.run, folder.path):
                self.writer.print(text)


def mean_metrics(of_parts):
    """The mean of each metric over the micro-batches that have it, NaN left out: dict."""
    found = {}
    for name in dict.fromkeys(name for metrics in of_parts for name in metrics):
        values = [metrics[name] for metrics in of_parts if name in metrics and not math.isnan(metrics[name])]
        found[name] = sum(values) / len(values) if values else math.nan
    return found
