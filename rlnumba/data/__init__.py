"""Rows of a dataset as token ids: prompts for rollouts, sequences for supervised fine-tuning, packing."""

from rlnumba.data.rows import (
    Prompt,
    PromptData,
    TokenSequence,
    best_fit_decreasing,
    check_ids,
    check_messages,
    check_prompt,
    encode_pair,
    encode_prompt,
    load_prompts,
    load_sft,
    pack,
    read_rows,
)

__all__ = [
    "Prompt",
    "PromptData",
    "TokenSequence",
    "best_fit_decreasing",
    "check_ids",
    "check_messages",
    "check_prompt",
    "encode_pair",
    "encode_prompt",
    "load_prompts",
    "load_sft",
    "pack",
    "read_rows",
]
