"""Rows of completions that are desirable or not to token ids.

A row is {"prompt", "completion", "label": true or false}, prompt and completion each a string or a list of messages.
Pairs (data/pairs.py) are taken apart: their chosen completions are desirable, the rejected ones are not.
"""

from dataclasses import dataclass, field

from rlnumba.data.files import (
    check_ids,
    check_one_form,
    check_prompt,
    column_value,
    kind_of,
    read_dataset,
    template_variables,
)
from rlnumba.data.formats import chat_cell, flag_cell
from rlnumba.data.pairs import (
    check_length,
    completion_value,
    has_prompt_column,
    is_templated,
    pair_cells,
    prompt_fills,
    sides_of,
    tokenize_pair,
    tokenize_side,
)
from rlnumba.data.prompts import as_prompt, template_notes
from rlnumba.errors import UserError

# Pairs taken apart at a time, all chosen completions before the rejected ones, which is TRL's order.
BLOCK = 1000
# The labels of the chosen and of the rejected completion of a pair.
LABELS = (True, False)


@dataclass(frozen=True)
class LabelledCompletion:
    """A prompt and a completion as token ids, not truncated; label: whether it is desirable; where: file and line."""

    prompt_ids: list[int]
    completion_ids: list[int]
    label: bool
    where: str


@dataclass
class LabelledData:
    """The completions of a file, counts: rows (after pairs were taken apart), truncated_rows, dropped_rows, and
    template_notes."""

    rows: list[LabelledCompletion]
    counts: dict[str, int]
    notes: list[str] = field(default_factory=list)


def load_unpaired(path, data, train, tokenizer, model_limit, vocab_size, eos_token_ids=(), for_eval=None):
    """The completions of a file: LabelledData. The first row decides which form the rows have.

    data: DataConfig; train: a section with max_length, beyond which sequences lose their end; rows whose prompt alone
    fills it are dropped. model_limit: the model's longest sequence in tokens. eos_token_ids: the ids that end one. The
    chosen completions of every BLOCK rows of pairs come first. for_eval: read_dataset's. Raises UserError naming
    file and line.
    """
    if tokenizer is None:
        raise UserError("a preference dataset needs a tokenizer, and the model folder has no tokenizer.json")
    limit = min(train.max_length or model_limit, model_limit)
    cells = pair_cells(data) | {data.completion_column or "completion": chat_cell, "label": flag_cell}
    rows = read_dataset(path, data, for_eval, cells)
    seen, _ = rows[0]
    if "chosen" in seen or "rejected" in seen:
        completions = unpaired(rows, data, tokenizer, eos_token_ids)
    else:
        completions = [parse_row(row, where, data, tokenizer, eos_token_ids) for row, where in rows]
    kept, truncated_rows = [], 0
    for each in completions:
        for ids in (each.prompt_ids, each.completion_ids):
            check_ids(ids, vocab_size, each.where)
        length = len(each.prompt_ids) + len(each.completion_ids)
        check_length(length, train.max_length, model_limit, each.where)
        if not prompt_fills(each.prompt_ids, limit):
            truncated_rows += length > limit
            kept.append(each)
    if not kept:
        raise UserError(f"{path}: the prompts of all {len(completions)} rows fill train.max_length {limit}")
    dropped = len(completions) - len(kept)
    counts = {"rows": len(completions), "truncated_rows": truncated_rows, "dropped_rows": dropped}
    return LabelledData(kept, counts, template_notes(path, data, rows, is_templated(rows, data), tokenizer))


def parse_row(row, where, data, tokenizer, eos_token_ids=()):
    """The LabelledCompletion of a row with a label. Raises UserError naming `where`."""
    prompt_column, completion_column = data.prompt_column or "prompt", data.completion_column or "completion"
    prompt = column_value(row, prompt_column, where)
    check_prompt(prompt, f"{where}: {prompt_column!r}")
    completion, label = completion_value(row, completion_column, where), column_value(row, "label", where)
    if not isinstance(label, bool):
        raise UserError(f"{where}: 'label' must be true or false, got {kind_of(label)}")
    check_one_form(prompt, completion, where, completion_column, data)
    template = data.chat_template_kwargs | template_variables(row, where)
    return tokenize_row(as_prompt(prompt, data), completion, label, where, tokenizer, eos_token_ids, **template)


def unpaired(rows, data, tokenizer, eos_token_ids=()):
    """The LabelledCompletions of pairs, from (row, where): list. Raises UserError naming file and line."""
    has_prompt, found = has_prompt_column(rows[0], data), []
    for first in range(0, len(rows), BLOCK):
        sides = [], []
        for row, where in rows[first : first + BLOCK]:
            prompt, *completions = sides_of(row, where, has_prompt, data)
            if prompt is None:
                # The common tokens of both are the prompt, which has no text of its own.
                ids = tokenize_pair(None, *completions, tokenizer, eos_token_ids)
                pair = [
                    LabelledCompletion(ids[0], side, label, where) for side, label in zip(ids[1:], LABELS, strict=True)
                ]
            else:
                template = data.chat_template_kwargs | template_variables(row, where)
                pair = [
                    tokenize_row(prompt, completion, label, where, tokenizer, eos_token_ids, **template)
                    for completion, label in zip(completions, LABELS, strict=True)
                ]
            for side, each in zip(sides, pair, strict=True):
                side.append(each)
        found += [*sides[0], *sides[1]]
    return found


def tokenize_row(prompt, completion, label, where, tokenizer, eos_token_ids=(), **template):
    """The LabelledCompletion of a prompt and a completion, strings or lists of messages."""
    try:
        ids, begin = tokenize_side(prompt, completion, tokenizer, eos_token_ids, **template)
    except UserError as error:
        raise type(error)(f"{where}: {error}") from error
    if len(ids) <= begin:
        raise UserError(f"{where}: the completion has no tokens")
    return LabelledCompletion(ids[:begin], ids[begin:], label, where)
