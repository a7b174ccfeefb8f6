"""Rows to sequences for supervised fine-tuning.

    file -> read_rows -> sft_examples -> tokenize_sft -> pack       (load_sft does all four)

Rows that are truncated or dropped are counted.
"""

import json
from dataclasses import dataclass, field, replace

import numpy as np

from rlnumba.data.files import check_ids, check_messages, check_prompt, column_value, kind_of, read_rows
from rlnumba.data.packing import TokenSequence, pack
from rlnumba.data.prompts import Question, as_messages, as_prompt, encode_pair, is_gsm8k, templated_question
from rlnumba.errors import UserError


@dataclass(frozen=True)
class SFTExample:
    """One row for SFT: a conversation (messages, tools), a pair (prompt, completion) or a text. where: "file:line"."""

    where: str
    messages: list | None = None
    tools: list | None = None
    prompt: str | list | Question | None = None
    completion: str | list | None = None
    text: str | None = None


def sft_examples(rows, data):
    """Rows to a list of SFTExample; the first row's columns decide for all. data: DataConfig.

    Raises UserError naming file and line, and the columns seen where none of the forms fits.
    """
    seen = rows.rows[0]
    completion_column = data.completion_column or "completion"
    prompt_column = data.prompt_column or "prompt"
    question_column = data.prompt_column or "question"
    if "messages" in seen:
        make = _conversation
    elif prompt_column in seen and completion_column in seen:

        def make(row, where):
            prompt, completion = column_value(row, prompt_column, where), column_value(row, completion_column, where)
            check_prompt(prompt, f"{where}: {prompt_column!r}")
            if isinstance(completion, list):
                check_messages(completion, f"{where}: {completion_column!r}")
            elif not isinstance(completion, str):
                raise UserError(f"{where}: {completion_column!r} must be a string, got {kind_of(completion)}")
            return SFTExample(where, prompt=prompt, completion=completion)

    elif question_column in seen and is_gsm8k(seen):

        def make(row, where):
            answer = column_value(row, "answer", where)
            if not isinstance(answer, str):
                raise UserError(f"{where}: 'answer' must be a string, got {kind_of(answer)}")
            return SFTExample(where, prompt=templated_question(row, data, where, question_column), completion=answer)

    elif "text" in seen:
        make = _text
    else:
        raise UserError(
            f"{rows.locations[0]}: sft needs the columns messages, or {prompt_column} and {completion_column}, or "
            f"question and answer, or text; its columns are {', '.join(seen) or 'none'}"
        )
    return [make(row, where) for row, where in rows]


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
    return SFTExample(where, messages=messages, tools=tools)


def _text(row, where):
    text = column_value(row, "text", where)
    if not isinstance(text, str) or not text:
        raise UserError(f"{where}: 'text' must be a non-empty string, got {kind_of(text)}")
    return SFTExample(where, text=text)


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
    examples = sft_examples(read_rows(path), data)
    sequences = [tokenize_sft(example, data, train, tokenizer, eos_token_ids) for example in examples]
    for example, sequence in zip(examples, sequences, strict=True):
        check_ids(sequence.input_ids, vocab_size, example.where)
    splits = train.packing and train.packing_strategy != "bfd"
    if train.max_length is None:
        for example, sequence in zip(examples, sequences, strict=True):
            if len(sequence) > model_limit:
                raise UserError(
                    f"{example.where}: {len(sequence)} tokens are more than the model's {model_limit}; "
                    "set train.max_length to cut longer ones"
                )
    limit = min(train.max_length or model_limit, model_limit)
    truncated = 0 if splits else sum(len(sequence) > limit for sequence in sequences)
    if not splits:
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
    return SFTData(
        rows, {"rows": len(examples), "truncated_rows": truncated, "dropped_rows": dropped, "tokens": tokens}
    )


def tokenize_sft(example, data, train, tokenizer, eos_token_ids=()):
    """An SFTExample as a TokenSequence, not yet truncated.

    Prompt and completion are tokenised together. EOS is appended where it is missing, but not to conversations, whose
    chat template ends them. Raises UserError if a loss option of `train` does not apply to the row.
    """
    template = data.chat_template_kwargs
    try:
        if example.messages is not None:
            return _tokenize_conversation(example, data, train, tokenizer, template)
        messages = None
        if example.text is not None:
            if train.completion_only_loss:
                raise UserError("train.completion_only_loss needs rows with a prompt and a completion")
            ids, start = tokenizer.encode(example.text), 0
        else:
            prompt = as_prompt(example.prompt, data, tokenizer)
            ids, start = encode_pair(tokenizer, prompt, example.completion, **template)
            if isinstance(prompt, list) or isinstance(example.completion, list):
                messages = as_messages(prompt, "user") + as_messages(example.completion, "assistant")
        if train.assistant_only_loss:
            if messages is None:
                raise UserError("train.assistant_only_loss needs rows of messages")
            assistant = np.array(tokenizer.assistant_mask(messages, **template), bool)
    except UserError as error:
        raise type(error)(f"{example.where}: {error}") from error
    eos = tokenizer.eos_token_id
    if eos is None and eos_token_ids:
        eos = eos_token_ids[0]
    if messages is None and eos is not None and (not ids or ids[-1] not in (eos, *eos_token_ids)):
        ids = [*ids, eos]
    trained = np.ones(len(ids), bool)
    if train.completion_only_loss is not False:
        trained[:start] = False
    if train.assistant_only_loss:
        trained &= assistant
    return TokenSequence(np.array(ids, np.int32), trained)


def _tokenize_conversation(example, data, train, tokenizer, template):
    if train.completion_only_loss:
        raise UserError("train.completion_only_loss needs rows with a prompt and a completion")
    messages = as_prompt(example.messages, replace(data, apply_chat_template=None), tokenizer)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tools=example.tools, **template)
    trained = np.ones(len(ids), bool)
    if train.assistant_only_loss:
        trained = np.array(tokenizer.assistant_mask(messages, tools=example.tools, **template), bool)
    return TokenSequence(np.array(ids, np.int32), trained)
