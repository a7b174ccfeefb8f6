"""Rows of a dataset as token ids: prompts for rollouts, sequences for supervised fine-tuning, packing."""

from rlnumba.data.files import check_ids, check_messages, check_prompt, read_dataset, read_rows, template_variables
from rlnumba.data.packing import TokenSequence, best_fit_decreasing, pack_sequences
from rlnumba.data.prompts import Prompt, PromptData, encode_pair, encode_prompt, encode_scored, load_prompts
from rlnumba.data.sft import load_sft
