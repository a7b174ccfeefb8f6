"""Dynamic sampling: as many prompts as it takes for a batch of groups whose rewards differ, in one run of the engine.

    order    prompts come in the order of the run, with one seed: a completion is what it would be in any batch
    window   prompts enter the engine while fewer than over_sampling_batch_size groups are unfinished, not scored
             yet, or known to differ: each group of equal rewards makes room for another prompt
    taken    the first groups in that order that differ; when as many as are wanted are known, all prompts after
             the last of them leave the engine

So a batch depends on prompts, weights and seed alone: a group that is long, or whose rewards are slow, is waited for,
not replaced. Groups after the last one taken are dropped, and their prompts come again in the next generation.

Sources: DAPO (arXiv 2503.14476); slime, whose over_sampling_batch_size this is.
"""

from contextlib import suppress

from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.rewards import RewardError
from rlnumba.sampling.samples import as_generation, columns_of, distinct_params, submit_group


def generate(llm, rewards, prompts, indices, params, trainer_state, clock, wanted, window, differs, status=None):
    """The completions and rewards of as many of the prompts `indices`, from the first on, as it takes: Generation.

    It has `wanted` groups for which differs(group of Samples) is true, the last group being such a one, or all prompts.
    window: over_sampling_batch_size, at least `wanted`. The other arguments are draw_samples's. Raises RewardError
    for a group that is needed.
    """
    stream = Stream(llm, rewards, prompts, indices, params, trainer_state, wanted, window, differs)
    try:
        while not stream.is_complete:
            stream.admit()
            if not stream.episodes.is_idle:
                stream.step()
            with clock.phase("reward"):
                stream.score()
            stream.drop_what_is_not_needed()
            if status is not None:
                status(
                    f"{stream.num_differing} of {wanted} groups with rewards that differ, "
                    f"{stream.episodes.num_tokens} tokens"
                )
    except BaseException:
        llm.engine.reset()
        raise
    return stream.generation()


class Stream:
    """The groups of a generation, by their position in the order of the prompts; the arguments are generate's.

    admitted: positions below it have entered the engine. completions[i]: n Completions, and pending[i]: the rewards
    under way, None before all are there. differ[i]: None before the rewards are known.
    """

    def __init__(self, llm, rewards, prompts, indices, params, trainer_state, wanted, window, differs):
        self.llm, self.rewards, self.prompts, self.indices = llm, rewards, prompts, indices
        self.episodes = Episodes(llm.engine)
        self.trainer_state, self.wanted, self.window, self.differs = trainer_state, wanted, window, differs
        self.chosen = [prompts.prompts[i] for i in indices]
        self.params = distinct_params([prompt.prompt_token_ids for prompt in self.chosen], params)
        self.columns = columns_of(prompts, indices, params.n)
        self.completions, self.pending, self.differ = ([None] * len(indices) for _ in range(3))
        self.admitted = 0

    @property
    def num_differing(self):
        """Groups that are known to differ: int."""
        return self.differ.count(True)

    @property
    def end(self):
        """One past the last group that is needed, as far as is known: int."""
        found = [i for i, differs in enumerate(self.differ) if differs]
        return found[self.wanted - 1] + 1 if len(found) >= self.wanted else len(self.indices)

    @property
    def is_complete(self):
        """Whether all groups up to `end` are known."""
        return None not in self.differ[: self.end]

    def admit(self):
        """Let prompts enter the engine while there is room in the window."""
        end = self.end
        while self.admitted < end and self.admitted - self.differ.count(False) < self.window:
            prompt, params = self.chosen[self.admitted].prompt_token_ids, self.params[self.admitted]
            self.episodes.submit(GroupRequest(self.admitted, prompt, params))
            self.admitted += 1

    def step(self):
        """One step of the engine; the rewards of groups that it completes begin."""
        for request in self.episodes.step():
            position = request.number
            self.completions[position] = group = request.completions
            of_group = self.prompts, self.indices[position], group, self.columns, self.trainer_state
            self.pending[position] = submit_group(self.rewards, *of_group)

    def score(self):
        """Note for groups whose rewards are known whether they differ; waits for rewards where the engine is idle.

        Functions of this process are called when as many groups wait as are still wanted, so that a model scores a
        batch.
        """
        waiting = [i for i in range(self.end) if self.pending[i] is not None and self.differ[i] is None]
        idle = self.episodes.is_idle
        if self.rewards.all_in_workers:
            known = self.rewards.ready([self.pending[i] for i in waiting])
            ready = [i for i, is_ready in zip(waiting, known, strict=True) if is_ready] or waiting[: int(idle)]
        else:
            ready = waiting if idle or len(waiting) >= self.wanted - self.num_differing else []
            with suppress(RewardError):  # it is raised below, for its group
                self.rewards.collect([self.pending[i] for i in ready])
        for i in ready:
            if i >= self.end:
                break
            try:
                scores = self.rewards.collect([self.pending[i]])
            except RewardError:
                # A group that turns out not to be needed may fail.
                if None not in self.differ[:i]:
                    raise
                continue
            generation = self._generation([i], scores)
            self.differ[i] = self.differs(generation.groups[0])

    def drop_what_is_not_needed(self):
        """Abort the requests after `end`."""
        for position in range(self.end, self.admitted):
            self.episodes.abort(position)

    def generation(self):
        """The Generation of all groups up to `end`."""
        positions = range(self.end)
        found = self._generation(positions, self.rewards.collect([self.pending[i] for i in positions]))
        found.num_unused = self.episodes.num_tokens - found.num_generated
        return found

    def _generation(self, positions, scores):
        chosen, completions = ([values[i] for i in positions] for values in (self.chosen, self.completions))
        return as_generation(chosen, completions, scores, self.rewards.weights, self.llm.tokenizer)
