"""The order in which a run takes its prompts: epochs, a curriculum, pools of difficulty.

epochs                    shuffled from (seed, epoch), or in the file's order
curriculum_column         every epoch by the ascending value of a column; rows of one value as above
difficulty_weights        no epochs: each generation draws its prompts, with the weight of each prompt's pool
no_resampling_pass_rate   a prompt whose group has at least this mean reward is left out from then on
"""

import math
from itertools import islice

import numpy as np

from rlnumba.errors import UserError, shown
from rlnumba.runs.policy import epoch_order

# Pools of difficulty, by the mean reward of a prompt's last group: up to these bounds, as in prime-rl, easy above.
POOLS = ("easy", "normal", "hard")
HARD_UP_TO, NORMAL_UP_TO = 0.25, 0.75


def pool_of(mean_reward):
    """The index in POOLS of a prompt with this mean reward."""
    return 2 if mean_reward <= HARD_UP_TO else 1 if mean_reward <= NORMAL_UP_TO else 0


def curriculum_values(prompts, column):
    """(number of prompts,) of Python's int and float, of any size: a column of PromptData.

    Raises UserError for a row without a finite number there.
    """
    values = [prompt.columns.get(column) for prompt in prompts.prompts]
    for value, prompt in zip(values, prompts.prompts, strict=True):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value != value or value in (math.inf, -math.inf):
            raise UserError(f"{prompt.where}: {column!r} (data.curriculum_column) must be a number, got {shown(value)}")
    return np.array(values, object)


class PromptOrder:
    """The order in which prompts are drawn; the module's docstring has the options.

    difficulty_weights: None, or of the POOLS: prompts are drawn without replacement, from (seed, number of the draw);
    one that was not sampled yet is normal, and those of weight 0 are taken where there are too few others. solved_at:
    no_resampling_pass_rate, or None. curriculum: (num_prompts,) values, or None. epoch, position: where in the epochs.
    """

    def __init__(
        self, num_prompts, shuffle, seed, epoch=0, position=0, difficulty_weights=None, solved_at=None, curriculum=None
    ):
        self.num_prompts, self.shuffle, self.seed = num_prompts, shuffle, seed
        self.epoch, self.position, self.difficulty_weights = epoch, position, difficulty_weights
        self.solved_at, self.curriculum = solved_at, curriculum
        # Further values that carry over from generation to generation and are part of the checkpoint: JSON, and a
        # ReplayBuffer where there is one.
        self.memory, self.replay_buffer = {}, None

    def begin_with(self, moved):
        """Begin a new epoch with other prompts: {index before: index now} of those that are among them."""
        if self.position:
            self.epoch, self.position = self.epoch + 1, 0
        if "solved" in self.memory:
            self.memory["solved"] = [moved[index] for index in self.memory["solved"] if index in moved]
        if "mean_rewards" in self.memory:
            kept = {int(index): value for index, value in self.memory["mean_rewards"].items() if int(index) in moved}
            self.memory["mean_rewards"] = {str(moved[index]): value for index, value in kept.items()}

    def take(self, count):
        """The next `count` (at most num_prompts) prompt indices; what is left of an epoch and too few is dropped."""
        self._return_solved(count)
        if self.difficulty_weights is not None:
            found = self._draw(count)
            self.advance(count)
            return found
        found = list(islice(self._walk(), count))
        if found[0][1] != found[-1][1]:
            self.epoch, self.position = self.epoch + 1, 0
            found = list(islice(self._walk(), count))
        self.epoch, self.position = found[-1][1:]
        return [index for index, _, _ in found]

    def upcoming(self, least, most):
        """The next `most` prompt indices, of which `advance` takes those that are used: list of int.

        Epochs follow one another, and prompts may come again; of a draw there are as many as there are prompts, at
        least `least`.
        """
        self._return_solved(least)
        if self.difficulty_weights is not None:
            return self._draw(most)
        return [index for index, _, _ in islice(self._walk(), most)]

    def advance(self, count):
        """Take the first `count` of `upcoming`."""
        if self.difficulty_weights is not None:
            self.memory["draws"] = self.memory.get("draws", 0) + 1
        else:
            *_, (_, self.epoch, self.position) = islice(self._walk(), count)

    def _walk(self):
        """Yields (prompt index, its epoch, the position after it) without end, from where the order stands."""
        epoch, position, solved = self.epoch, self.position, set(self.memory.get("solved", ()))
        while True:
            order = epoch_order(self.num_prompts, self.shuffle, self.seed, epoch)
            if self.curriculum is not None:
                order = order[np.argsort(self.curriculum[order], kind="stable")]
            for at in range(position, self.num_prompts):
                if (index := int(order[at])) not in solved:
                    yield index, epoch, at + 1
            epoch, position = epoch + 1, 0

    def _draw(self, count):
        """The first `count` of the next draw, without taking it."""
        weights = np.asarray(self.difficulty_weights, np.float64)[self._pools()]
        # The largest of log weight + Gumbel noise are a draw without replacement (Vieira 2014).
        noise = np.random.default_rng((self.seed, self.memory.get("draws", 0) + 1)).gumbel(size=self.num_prompts)
        scores = np.where(weights > 0, np.log(np.where(weights > 0, weights, 1.0)), -1e9) + noise
        solved = self.memory.get("solved", [])
        scores[solved] = -np.inf
        return np.argsort(-scores, kind="stable")[: min(count, self.num_prompts - len(solved))].tolist()

    def _pools(self):
        """The pool of every prompt, (num_prompts,) int64."""
        pools = np.ones(self.num_prompts, np.int64)
        for index, mean_reward in self.memory.get("mean_rewards", {}).items():
            if int(index) < self.num_prompts:
                pools[int(index)] = pool_of(mean_reward)
        return pools

    def _return_solved(self, count):
        """Make solved prompts available again if fewer than `count` prompts are not solved."""
        if self.num_prompts - len(self.memory.get("solved", ())) < count:
            self.memory["solved"] = []

    def record(self, indices, groups):
        """Note the mean reward of each prompt's group, by which its pool is chosen and it is solved or not."""
        if self.difficulty_weights is None and self.solved_at is None:
            return
        for index, group in zip(indices, groups, strict=True):
            rewards = np.array([sample.reward for sample in group])
            if np.isnan(rewards).all():
                continue
            mean_reward = float(np.nanmean(rewards))
            if self.difficulty_weights is not None:
                # Strings, as JSON has them.
                self.memory.setdefault("mean_rewards", {})[str(index)] = mean_reward
            if self.solved_at is not None and mean_reward >= self.solved_at:
                solved = self.memory.setdefault("solved", [])
                if index not in solved:
                    solved.append(index)

    def shares(self):
        """Metrics: the share of the prompts that each pool has, with weights, and of those that are solved."""
        found = {}
        if self.difficulty_weights is not None:
            shares = np.bincount(self._pools(), minlength=len(POOLS)) / self.num_prompts
            found = {f"difficulty/{name}": share for name, share in zip(POOLS, shares.tolist(), strict=True)}
        if self.solved_at is not None:
            found["difficulty/solved"] = len(self.memory.get("solved", ())) / self.num_prompts
        return found
