"""Models as rewards: a sequence-classification folder scores prompt and completion, batched on the device.

    [rewards]
    funcs = ["runs/reward/final"]

The text is tokenised as `rlnumba reward` does: by the reward model's own tokenizer and chat template, prompt and
completion together, EOS appended to a completion that is a string.
"""

from pathlib import Path

from rlnumba import rewards
from rlnumba.data import check_ids, encode_scored
from rlnumba.data.files import TEMPLATE_COLUMNS, template_variables
from rlnumba.errors import UserError
from rlnumba.model.config import SCORE_HEAD
from rlnumba.model.hub import find_base, read_config
from rlnumba.model.sequence_score import score_sequences
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.rewards.calling import ModelReward
from rlnumba.runtime.context import Context


def load_rewards(run, functions=(), environment_classes=()):
    """The Rewards of a run, folders of models among its rewards.funcs; arguments and errors as rewards.load_rewards."""

    def open_model(folder):
        model = RewardModel(folder, run.data.chat_template_kwargs)
        return ModelReward(Path(folder).name, model.score, Path(folder))

    return rewards.load_rewards(run.rewards, functions, open_model, environment_classes)


class RewardModel:
    """A sequence-classification model of one label with its tokenizer, in the dtype of its checkpoint.

    template: variables of its chat template. Raises UserError naming the folder, file or key at fault: also for a model
    without such a head, or without a tokenizer.
    """

    def __init__(self, folder, template):
        base, adapter = find_base(folder)
        config = read_config(base, adapter)
        if config.heads != SCORE_HEAD:
            raise UserError(f"rewards.funcs: {folder} is {config.architecture}, not a sequence-classification model")
        self.tokenizer, self.template = Tokenizer.from_folder(folder) or Tokenizer.from_folder(base), template
        if self.tokenizer is None:
            raise UserError(f"rewards.funcs: {folder} has no tokenizer.json")
        self.model, self.context = load_model(folder, heads=SCORE_HEAD), Context()

    def score(self, prompts, completions, columns):
        """The score of each prompt with its completion, strings or message lists: list of float.

        columns: {name: values}, of which TEMPLATE_COLUMNS reach the chat template. Raises UserError for a text that the
        chat template refuses or that is longer than the model.
        """
        config, sequences = self.model.config, []
        names = [name for name in TEMPLATE_COLUMNS if name in columns]
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            where = f"completion {index}"
            template = self.template | template_variables({name: columns[name][index] for name in names}, where)
            ids = encode_scored(self.tokenizer, prompt, completion, config.eos_token_ids, **template)
            check_ids(ids, config.vocab_size, where)
            sequences.append(ids)
        with self.context.use():
            return score_sequences(self.model, sequences).tolist()
