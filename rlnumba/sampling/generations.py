"""The generations of a run: completions with their rewards, as its trainer takes them, and those of its evaluations.

    generations = Generations(run, policy, llm, source, communicator)    on every rank
    generations.begin(course, step, groups, connected)                   the state of a checkpoint
    generations.start()                                                  the sampler begins
    generations.take(trainer_state, clock)                               the next one
    generations.update_weights(version)                                  after an optimizer step

Rank 0 leads: it has the pipeline, the sampler and the rewards. The others draw with it where their engines are its
sampler's, take part where weights are sent, and have all that `take` returns. Where all of them draw ahead of training,
each has its part of the sampler.
"""

from typing import NamedTuple

from rlnumba.rewards.calling import Scores
from rlnumba.sampling.inference import WaitingProcesses
from rlnumba.sampling.own import DrawingRound, OwnSampler, RankedSampler
from rlnumba.sampling.pipeline import Pipeline
from rlnumba.sampling.pipeline_state import restore, state_of
from rlnumba.sampling.processes import LLMOnProcesses, process_sampler, pusher_of
from rlnumba.sampling.ranks import LedLLM, led
from rlnumba.sampling.rollout_func import FunctionSampler, RolloutFunction
from rlnumba.sampling.samples import as_generation
from rlnumba.sampling.weights.sync import Again


class Connected(NamedTuple):
    """The needs of a run's inference processes at their start: those that wait (WaitingProcesses), and the kernels that
    processes of other hosts compile, (module, request) of ahead_of_time.start."""

    waiting: WaitingProcesses
    kernels: tuple


class Generations:
    """run: of a trainer on prompts. policy: Policy. llm: this rank's LLM, or the LLMOnProcesses of ranks that have
    the weights in parts and inference processes. source: PromptSource. communicator: of the ranks, or None.

    names, weights: of the reward functions, on all ranks. status: called with a line on the progress. metrics: of the
    last generation, with [async].
    """

    def __init__(self, run, policy, llm, source, communicator):
        self.run, self.policy, self.llm, self.source = run, policy, llm, source
        self.prompts, self.order, self.rewards = source
        self.communicator, self.pipeline, self.pusher = communicator, None, None
        self.is_ahead, self.is_apart = run.generates_beside, isinstance(llm, LLMOnProcesses)
        self.connected, self.metrics, self.status = None, {}, None
        # The steps at the beginning, and this rank's RankedSampler, where several draw ahead of training.
        self.step, self.ranked = 0, None
        # Rank 0's LLM of all ranks' engines.
        self.ranks = LedLLM(llm, None if self.is_apart else self.communicator, self.prompts.agents)
        self.leader, self.engine = self.ranks.llm, self.ranks.engine
        described = None if self.rewards is None else (self.rewards.names, self.rewards.weights)
        self.names, self.weights = described if self._is_alone else self.communicator.objects(described)[0]

    @property
    def _is_alone(self):
        return self.communicator is None or self.communicator.world_size == 1

    @property
    def _is_first(self):
        return self.communicator is None or self.communicator.rank == 0

    def begin(self, course, step, groups, connected):
        """Begin with the Course of the generations after `step` optimizer steps. groups: those of a checkpoint that are
        admitted and not trained on. connected: Connected."""
        self.connected, self.step = connected, step
        if self._is_first:
            self.pipeline = Pipeline(self.run, course, self.source, step)
            restore(self.pipeline, groups)
        self.pusher = pusher_of(self.run, self.policy)

    def start(self):
        """Start the sampler, with the weights as they are, and give out what may begin."""
        draws_on_ranks = self.run.draws_on_ranks and not self._is_alone
        if self.pipeline is not None or draws_on_ranks:
            sampler = self._new_ranked_sampler() if draws_on_ranks else self._new_sampler()
            try:
                sampler.start(self.step)
            except BaseException:  # a signal, too
                sampler.close()
                raise
            if self.pipeline is not None:
                self.pipeline.start(sampler)
            if self.ranked is not None:
                self.ranked.share()
        elif self.pusher is not None and not self.pusher.needs_offers:
            # Engines that have no memory of their own for weights find them at their start.
            self.pusher.take_part()

    def _new_sampler(self):
        run, policy = self.run, self.policy
        if run.deploy.num_infer_gpus:
            sampler = process_sampler(run, policy, self.llm.tokenizer, self.rewards, self.pusher, self.connected)
            if self.is_apart:
                self.llm.sampler = sampler
            return sampler
        if isinstance(self.prompts.agents, RolloutFunction):
            return FunctionSampler(self.leader, self.prompts.agents, self.prompts)
        sampler = OwnSampler(self.leader.engine, self.pipeline.options)
        return self._drawing_in_training(sampler) if self.is_ahead else sampler

    def _new_ranked_sampler(self):
        arguments = self.run.asynchronous, self.communicator, self.prompts.agents
        self.ranked = RankedSampler(self.llm.engine, *arguments)
        return self._drawing_in_training(self.ranked)

    def _drawing_in_training(self, sampler):
        """A sampler that goes on between the micro-batches of training."""
        self.policy.before_micro_batch.append(sampler.before_micro_batch)
        self.policy.before_update.append(sampler.before_update)
        return sampler

    def take(self, trainer_state, clock):
        """The next generation, whose trainer_state this is: (indices of its prompts, Generation). Raises RewardError.

        clock: the wait for rewards is its phase "reward".
        """

        def draw():
            drawn, num_unused = self.pipeline.take(trainer_state.global_step, self.status)
            if self.ranked is not None:
                self.ranked.flush()
            self.metrics = self.pipeline.metrics
            with clock.phase("reward"):
                scores = self.rewards.collect([each.pending for each in drawn])
            return [each.prompt for each in drawn], [each.completions for each in drawn], scores, num_unused

        def shared(value):
            indices, completions, scores, num_unused = value
            return indices, completions, Scores(scores.values), num_unused

        found = self._led(draw, shared) if self.is_ahead else self.led(draw, shared)
        indices, completions, scores, num_unused = found
        chosen = [self.prompts.prompts[i] for i in indices]
        with clock.phase("reward"):
            generation = as_generation(chosen, completions, scores, self.weights, self.llm.tokenizer)
        generation.num_unused = num_unused
        if self.run.train.generation.has_greedy:
            generation.set_baselines()
        generation.tool_names = [] if self.prompts.agents is None else self.prompts.agents.tool_names
        return indices, generation

    def led(self, function, shared=lambda value: value):
        """The value of function() on rank 0, which may generate by `leader`, on all ranks; see ranks.led."""
        self.ranks.wake()
        value = self._led(function, shared)
        if self.engine is not None:
            self.engine.end()
        self.ranks.sleep()
        if self.ranked is not None:
            self.ranked.wake()
        return value

    def _led(self, function, shared):
        return led(self.communicator, function, self._serve, shared)

    def _serve(self, message):
        """Do what rank 0 asks for, on another rank."""
        if isinstance(message, Again):
            self.pusher.take_part()
        elif isinstance(message, DrawingRound):
            self.ranked.serve(message)
        else:
            self.engine.serve(message)

    def update_weights(self, version):
        """The weights are of this version now."""
        if self.pipeline is not None:
            self.pipeline.update_weights(version)
        elif self.ranked is not None:
            self.ranked.update_weights(version)
        elif self.pusher is not None:
            self.pusher.take_part()
        if self.ranked is not None:
            self.ranked.share()
        elif self.pipeline is None or not self.pipeline.sampler.is_own:
            self.llm.update_weights(version)

    def settle(self):
        """Before an evaluation, complete what has begun in the engine that it has, too."""
        if self.ranked is not None:
            self.ranked.settle()
        elif self.pipeline is not None and self.is_ahead:
            self.pipeline.sampler.settle()

    def state(self):
        """The groups of a checkpoint, for `encoded`, on rank 0; all ranks call this."""
        if self.ranked is not None:
            self.ranked.collect()
        return [] if self.pipeline is None else state_of(self.pipeline)

    def close(self):
        """End what is being drawn: ahead of training, or where the run ends early."""
        if self.pipeline is not None and self.pipeline.sampler is not None:
            self.pipeline.sampler.close()
        elif self.ranked is not None:
            self.ranked.close()
        if self.engine is not None:
            self.engine.close()
        if self.pusher is not None:
            self.pusher.close()
