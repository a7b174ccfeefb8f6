"""Rows to sequences for supervised fine-tuning: load_sft.

Rows that are truncated or dropped are counted.
"""

import json
from dataclasses import dataclass, field

import numpy as np

from rlnumba.data.files import check_ids, check_messages, check_prompt, column_value, kind_of, read_rows, text_value
from rlnumba.data.packing import TokenSequence, pack
from rlnumba.data.prompts import as_messages, as_prompt, encode_pair, is_gsm8k, question_prompt, with_system_prompt
from rlnumba.errors import UserError


@dataclass(frozen=True)
class SFTExample:
    """One row for SFT: a conversation (messages, tools), a pair (prompt, completion), or a text (completion alone)."""

    messages: list | None = None
    tools: list | None = None
    prompt: str | list | None = None
    completion: str | list | None = None


def reader_of(rows, data, tokenizer):
    """The function that makes an SFTExample of (row, where); the first row's columns decide for all. data: DataConfig.

    Raises UserError naming file and line, and the columns seen where none of the forms fits.
    """
    seen = rows.rows[0]
    completion_column = data.completion_column or "completion"
    prompt_column = data.prompt_column or "prompt"
    question_column = data.prompt_column or "question"

    def pair(row, where):
        prompt, completion = column_value(row, prompt_column, where), column_value(row, completion_column, where)
        check_prompt(prompt, f"{where}: {prompt_column!r}")
        if isinstance(completion, list):
            check_messages(completion, f"{where}: {completion_column!r}")
        elif not isinstance(completion, str):
            raise UserError(f"{where}: {completion_column!r} must be a string, got {kind_of(completion)}")
        return SFTExample(prompt=as_prompt(prompt, data), completion=completion)

    def gsm8k(row, where):
        answer = column_value(row, "answer", where)
        if not isinstance(answer, str):
            raise UserError(f"{where}: 'answer' must be a string, got {kind_of(answer)}")
        prompt = question_prompt(row, data, where, question_column, tokenizer)
        return SFTExample(prompt=prompt, completion=answer)

    if "messages" in seen:
        return _conversation
    if prompt_column in seen and completion_column in seen:
        return pair
    if question_column in seen and is_gsm8k(seen):
        return gsm8k
    if "text" in seen:
        return lambda row, where: SFTExample(completion=text_value(row, "text", where))
    raise UserError(
        f"{rows.locations[0]}: sft needs the columns messages, or {prompt_column} and {completion_column}, or "
        f"question and answer, or text; its columns are {', '.join(seen) or 'none'}"
    )


def _conversation(row, where):
    messages = column_value(row, "messages", where)
    check_messages(messages, f"{where}: 'messages'")
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: 'tools' is a string that is not JSON: {error.msg}") from error
    if not isinstance(tools, list | None):
        raise UserError(f"{where}: 'tools' must be a list, got {kind_of(tools)}")
    return SFTExample(messages=messages, tools=tools)


@dataclass
class SFTData:
    """The training rows of a file: lists of sequences (one, or a pack), and counts.

    counts: rows, truncated_rows, dropped_rows (no token to train on), tokens.
    """

    rows: list[list[TokenSequence]]
    counts: dict[str, int] = field(default_factory=dict)


def load_sft(path, data, train, tokenizer, model_limit, vocab_size, eos_token_ids=()):
    """The rows of a file ready to train on: SFTData.

    data, train: DataConfig and SFTConfig. model_limit: the model's longest sequence in tokens. eos_token_ids: the ids
    that end a sequence of the model; the tokenizer's own is the one appended. Raises UserError naming file and line.
    """
    if tokenizer is None:
        raise UserError("sft needs a tokenizer, and the model folder has no tokenizer.json")
    source, sequences = read_rows(path), []
    example_of = reader_of(source, data, tokenizer)
    for row, where in source:
        example = example_of(row, where)
        try:
            sequence = tokenize_sft(example, data, train, tokenizer, eos_token_ids)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        check_ids(sequence.input_ids, vocab_size, where)
        if train.max_length is None and len(sequence) > model_limit:
            raise UserError(
                f"{where}: {len(sequence)} tokens are more than the model's {model_limit}; "
                "set train.max_length to cut longer ones"
            )
        sequences.append(sequence)
    limit, truncated = min(train.max_length or model_limit, model_limit), 0
    if not train.packing or train.packing_strategy == "bfd":
        truncated = sum(len(sequence) > limit for sequence in sequences)
        sequences = [sequence.slice(0, limit) for sequence in sequences]
    if train.packing:
        packed = pack(sequences, train.max_length, train.packing_strategy, limit)
    else:
        packed = [[sequence] for sequence in sequences]
    rows = [kept for row in packed if (kept := [s for s in row if s.num_trained])]
    if not rows:
        raise UserError(f"{path}: no row has a token to train on")
    dropped = sum(not sequence.num_trained for sequence in sequences)
    tokens = sum(len(sequence) for row in rows for sequence in row)
    counts = {"rows": len(source.rows), "truncated_rows": truncated, "dropped_rows": dropped, "tokens": tokens}
    return SFTData(rows, counts)


def tokenize_sft(example, data, train, tokenizer, eos_token_ids=()):
    """An SFTExample as a TokenSequence, not yet truncated.

    Prompt and completion are tokenised together. EOS is appended where it is missing, but not to conversations, whose
    chat template ends them. Raises UserError if a loss option of `train` does not apply to the row.
    """
    template = data.chat_template_kwargs
    if example.prompt is None and train.completion_only_loss:
        raise UserError("train.completion_only_loss needs rows with a prompt and a completion")
    messages, start = None, 0
    if example.messages is not None:
        messages = with_system_prompt(example.messages, data)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tools=example.tools, **template)
    elif example.prompt is None:
        ids = tokenizer.encode(example.completion)
    else:
        ids, start = encode_pair(tokenizer, example.prompt, example.completion, **template)
        if isinstance(example.prompt, list) or isinstance(example.completion, list):
            messages = as_messages(example.prompt, "user") + as_messages(example.completion, "assistant")
    eos = tokenizer.eos_token_id
    if eos is None and eos_token_ids:
        eos = eos_token_ids[0]
    if messages is None and eos is not None and (not ids or ids[-1] not in (eos, *eos_token_ids)):
        ids = [*ids, eos]
    trained = np.ones(len(ids), bool)
    if train.completion_only_loss is not False:
        trained[:start] = False
    if train.assistant_only_loss:
        if messages is None:
            raise UserError("train.assistant_only_loss needs rows of messages")
        trained &= np.array(tokenizer.assistant_mask(messages, tools=example.tools, **template), bool)
    return TokenSequence(np.array(ids, np.int32), trained)
