"""Rows of preferences to token ids: a prompt, a chosen and a rejected completion.

    file -> read_dataset -> the sides of a row -> tokenize_pair        (load_pairs does all)

A row is {"prompt", "chosen", "rejected"}, each a string or a list of messages. Without a prompt the common beginning of
the two sides is the prompt, in whole messages if they are lists of them, in whole tokens if they are strings.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlnumba.data.files import (
    TEMPLATE_CELLS,
    check_ids,
    check_messages,
    check_one_form,
    check_prompt,
    column_value,
    kind_of,
    number_value,
    read_dataset,
    template_variables,
)
from rlnumba.data.formats import chat_cell, number_cell
from rlnumba.data.packing import TokenSequence
from rlnumba.data.prompts import as_prompt, encode_pair, template_notes, with_eos
from rlnumba.errors import UserError

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferencePair:
    """A prompt and its two completions as token ids, not truncated; margin: the row's, or None; where: file and line.

    prompt_ids is empty where the completions of a row without a prompt differ in their first token.
    """

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float | None
    where: str = field(compare=False)

    @property
    def completions(self):
        """(chosen_ids, rejected_ids)."""
        return self.chosen_ids, self.rejected_ids

    @property
    def num_tokens(self):
        """Tokens of both sequences, each with the prompt: int."""
        return 2 * len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids)


@dataclass
class PairData:
    """The pairs of a file, counts: rows, truncated_rows (one side or both), dropped_rows, and template_notes."""

    rows: list[PreferencePair]
    counts: dict[str, int]
    notes: list[str] = field(default_factory=list)


class LongPairs(NamedTuple):
    """The most tokens of a sequence of a pair, None for the model's, and what becomes of pairs with longer ones.

    truncation_mode: what is kept of a longer sequence, "keep_start" or "keep_end"; None: such pairs are left out.
    """

    max_length: int | None
    truncation_mode: str | None = None


def load_pairs(path, data, long, tokenizer, model_limit, vocab_size, eos_token_ids=(), for_eval=None):
    """The pairs of a file: PairData. The first row decides whether the rows have a prompt.

    data: DataConfig. model_limit: the model's longest sequence in tokens. eos_token_ids: the ids that end a sequence of
    the model. long: LongPairs. With a truncation_mode longer sequences are left to `truncated`, and dropped are only
    pairs whose prompt alone fills max_length, unless the mode is keep_end.
    for_eval: read_dataset's. Raises UserError naming file and line.
    """
    if tokenizer is None:
        raise UserError("a preference dataset needs a tokenizer, and the model folder has no tokenizer.json")
    limit = min(long.max_length or model_limit, model_limit)
    rows = read_dataset(path, data, for_eval, pair_cells(data) | {"margin": number_cell})
    has_prompt = has_prompt_column(rows[0], data)
    pairs, truncated, dropped = [], 0, 0
    for row, where in rows:
        pair = parse_pair(row, where, has_prompt, data, tokenizer, eos_token_ids)
        longest = len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))
        for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids):
            check_ids(ids, vocab_size, where)
        check_length(longest, long.max_length, model_limit, where)
        mode = long.truncation_mode
        if longest > limit and (mode is None or prompt_fills(pair.prompt_ids, limit, mode)):
            dropped += 1
            continue
        truncated += longest > limit
        pairs.append(pair)
    if not pairs:
        raise UserError(f"{path}: all {len(rows)} pairs are too long for train.max_length {limit}")
    notes = template_notes(path, data, rows, is_templated(rows, data), tokenizer)
    return PairData(pairs, {"rows": len(rows), "truncated_rows": truncated, "dropped_rows": dropped}, notes)


def is_templated(rows, data):
    """Whether the chat template is applied to any row: to one with a list of messages, or with data.apply_chat_template
    to a prompt. rows: those of read_dataset."""
    columns = data.prompt_column or "prompt", data.completion_column or "completion", *SIDES
    values = [[row.get(name) for name in columns] for row, _ in rows]
    return any(isinstance(value, list) for each in values for value in each) or (
        bool(data.apply_chat_template) and any(each[0] is not None for each in values)
    )


def pair_cells(data):
    """The functions that read the csv cells of pairs: {column: function of formats.py}."""
    return TEMPLATE_CELLS | dict.fromkeys((data.prompt_column or "prompt", *SIDES), chat_cell)


def has_prompt_column(first, data):
    """Whether the rows have prompts, from the first (row, where). Raises UserError if data.prompt_column is missing."""
    row, where = first
    if data.prompt_column is not None:
        column_value(row, data.prompt_column, where)
    return row.get(data.prompt_column or "prompt") is not None


def check_length(length, max_length, model_limit, where):
    """Raises UserError for a sequence beyond the model's limit where no max_length says to cut it."""
    if max_length is None and length > model_limit:
        raise UserError(
            f"{where}: {length} tokens are more than the model's {model_limit}; set train.max_length to cut longer ones"
        )


def prompt_fills(prompt_ids, limit, truncation_mode="keep_start"):
    """Whether truncation leaves nothing of a completion after this prompt."""
    return truncation_mode == "keep_start" and len(prompt_ids) >= limit


def truncated(prompt_ids, completion_ids, limit, truncation_mode="keep_start"):
    """The TokenSequence of prompt and completion, trained on the completion, with at most `limit` tokens.

    truncation_mode: "keep_start" or "keep_end", what stays of a longer one.
    """
    ids = np.array([*prompt_ids, *completion_ids], np.int32)
    trained = np.arange(len(ids)) >= len(prompt_ids)
    start = max(len(ids) - limit, 0) if truncation_mode == "keep_end" else 0
    return TokenSequence(ids, trained).slice(start, start + limit)


def parse_pair(row, where, has_prompt, data, tokenizer, eos_token_ids=()):
    """The PreferencePair of a row. Raises UserError naming `where`."""
    prompt, *sides = sides_of(row, where, has_prompt, data)
    template = data.chat_template_kwargs | template_variables(row, where)
    try:
        ids = tokenize_pair(prompt, *sides, tokenizer, eos_token_ids, **template)
    except UserError as error:
        raise type(error)(f"{where}: {error}") from error
    margin = row.get("margin")
    margin = None if margin is None else float(number_value(margin, f"{where}: 'margin'"))
    return PreferencePair(*ids, margin=margin, where=where)


def sides_of(row, where, has_prompt, data):
    """(prompt, chosen, rejected) of a row, strings or lists of messages; the prompt is None for strings without one."""
    chosen, rejected = (completion_value(row, side, where) for side in SIDES)
    lists = isinstance(chosen, list) and isinstance(rejected, list)
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise UserError(f"{where}: 'chosen' and 'rejected' must both be strings or both lists of messages")
    if has_prompt:
        column = data.prompt_column or "prompt"
        prompt = column_value(row, column, where)
        check_prompt(prompt, f"{where}: {column!r}")
        # Some datasets repeat the prompt at the beginning of both sides, its text as their first message.
        if not (lists and repeats_prompt(prompt, chosen, rejected)):
            check_one_form(prompt, chosen, where, "chosen", data)
            return as_prompt(prompt, data), chosen, rejected
        if isinstance(prompt, list):
            return as_prompt(prompt, data), chosen[len(prompt) :], rejected[len(prompt) :]
    elif not lists:
        return None, chosen, rejected
    begin = common_beginning(chosen, rejected)
    if not begin:
        raise UserError(f"{where}: no 'prompt', and 'chosen' and 'rejected' do not begin with the same message")
    return as_prompt(chosen[:begin], data), chosen[begin:], rejected[begin:]


def repeats_prompt(prompt, chosen, rejected):
    """Whether two lists of messages begin with a prompt, a string or messages, that they are the completions of."""
    if isinstance(prompt, str):
        return chosen[0] == rejected[0] and chosen[0]["role"] != "assistant"
    sides = chosen, rejected
    return all(len(side) > len(prompt) and side[: len(prompt)] == prompt for side in sides)


def completion_value(row, column, where):
    """A column's string (it may be empty) or list of messages. Raises UserError for anything else."""
    value = column_value(row, column, where)
    if isinstance(value, list):
        check_messages(value, f"{where}: {column!r}")
    elif not isinstance(value, str):
        raise UserError(f"{where}: {column!r} must be a string or a list of messages, got {kind_of(value)}")
    return value


def common_beginning(first, second):
    """The number of leading elements that two lists share, at least one of each left over: int."""
    shortest, count = min(len(first), len(second)), 0
    while count < shortest - 1 and first[count] == second[count]:
        count += 1
    return count


def tokenize_pair(prompt, chosen, rejected, tokenizer, eos_token_ids=(), **template):
    """(prompt_ids, chosen_ids, rejected_ids), lists of int, of strings or lists of messages.

    Prompt and completion are tokenised together, and both completions begin where the shorter agreement with the prompt
    ends. prompt None: where the ids of the two sides part, one token at least left to each. EOS is appended to strings
    that lack it. Raises UserError for a completion without tokens.
    """
    if prompt is None:
        sides = [with_eos(tokenizer.encode(side), tokenizer, eos_token_ids) for side in (chosen, rejected)]
        begin = common_beginning(*sides)
    else:
        found = [tokenize_side(prompt, side, tokenizer, eos_token_ids, **template) for side in (chosen, rejected)]
        sides, begin = [ids for ids, _ in found], min(begin for _, begin in found)
    for name, side in zip(SIDES, sides, strict=True):
        if len(side) <= begin:
            raise UserError(f"{name!r} has no tokens")
    return sides[0][:begin], sides[0][begin:], sides[1][begin:]


def tokenize_side(prompt, completion, tokenizer, eos_token_ids=(), **template):
    """(ids of prompt and completion, a list of int; where the completion begins) of strings or lists of messages."""
    ids, begin = encode_pair(tokenizer, prompt, completion, **template)
    if isinstance(prompt, str) and isinstance(completion, str):
        return with_eos(ids, tokenizer, eos_token_ids), begin
    return list(ids), begin
