"""Rows of a file to examples: reading, column detection, tokenising, packing.

    file -> read_rows -> sft_examples    -> tokenize_sft    -> pack       (load_sft does all four)
                      -> prompt_examples -> tokenize_prompts              (load_prompts does all three)

Every error names the file and the line. Nothing is dropped or cut without being counted. A tokenizer is passed in: an
object with encode, apply_chat_template, assistant_mask, chat_template and eos_token_id (model/tokenizer.py).
"""

import bisect
import json
import re
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rlnumba.errors import ConfigError, UserError

# Prompts made of a `question` column where data.prompt_template is not set. GSM8K's is verl's.
GSM8K_TEMPLATE = '{question} Let\'s think step by step and output the final answer after "####".\n'
QUESTION_TEMPLATE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.\n"


@dataclass(frozen=True)
class Rows:
    """The rows of one file: dicts, and where each came from ("train.jsonl:7")."""

    path: str
    rows: list[dict]
    places: list[str]

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return zip(self.rows, self.places, strict=True)


def read_rows(path):
    """The rows of a .jsonl or .parquet file, all of them objects: Rows.

    Raises UserError for a missing or empty file, and for the first line that is not a JSON object.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, not a .jsonl or .parquet file")
    if not path.exists():
        raise UserError(f"{path}: no such file")
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    if not rows.rows:
        raise UserError(f"{path}: holds no rows")
    return rows


def _read_jsonl(path):
    rows, places = [], []
    try:
        # Lines end at \n alone: a text may hold U+2028 and other line ends of Unicode.
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            if b"\\u" in line:
                # An escape may name half of a surrogate pair, which has no UTF-8 and no tokens.
                json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: not UTF-8: {error.reason}") from error
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            raise UserError(f"{path}:{number}: {half} is half of a character") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON: {error.msg} (column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a list in 5,000 lists
            raise UserError(f"{path}:{number}: not JSON that can be read: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: must be a JSON object, got {_kind(row)}")
        rows.append(row)
        places.append(f"{path}:{number}")
    return Rows(str(path), rows, places)


def _read_parquet(path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: parquet files need pyarrow; pip install 'rlnumba[parquet]'") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {str(error).splitlines()[0]}") from error
    return Rows(str(path), rows, [f"{path}: row {number}" for number in range(1, len(rows) + 1)])


def _kind(value):
    names = {dict: "an object", list: "a list", str: "a string", bool: "a bool", type(None): "null"}
    return names.get(type(value), f"{type(value).__name__} {value}")


def check_messages(messages, where):
    """Raises UserError unless `messages` is a non-empty list of {"role": str, "content": ...}. where: "file:line"."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where} must be a non-empty list of messages, got {_kind(messages)}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: a message must have a role and a content, got {json.dumps(message)[:80]}")
        if not isinstance(message.get("content"), str | list | None):
            raise UserError(f"{where}: the content of a message must be a string, got {_kind(message['content'])}")


def check_prompt(value, where):
    """Raises UserError unless value is a non-empty string or a list of messages."""
    if isinstance(value, list):
        check_messages(value, where)
    elif not isinstance(value, str):
        raise UserError(f"{where} must be a string or a list of messages, got {_kind(value)}")
    elif not value:
        raise UserError(f"{where} is empty")


def _need(row, column, place):
    if column not in row or row[column] is None:
        raise UserError(f"{place}: no {column!r}; its columns are {', '.join(row) or 'none'}")
    return row[column]


def _fill(template, row, place):
    """The template with {column} replaced by the row's values; braces that name no column stay as they are."""
    names = [name for name in re.findall(r"\{(\w+)\}", template) if name in row]
    if not names:
        raise ConfigError(f"data.prompt_template names no column of {place}; its columns are {', '.join(row)}")
    return re.sub(r"\{(\w+)\}", lambda m: str(row[m[1]]) if m[1] in row else m[0], template)


def _is_gsm8k(row):
    return isinstance(row.get("answer"), str) and "####" in row["answer"]


@dataclass(frozen=True)
class Question:
    """A prompt made of a template: one user message if the tokenizer has a chat template, else the text itself."""

    text: str


def _question(row, data, place, column):
    text = _need(row, column, place)
    if not isinstance(text, str) or not text:
        raise UserError(f"{place}: {column!r} must be a non-empty string, got {_kind(text)}")
    template = data.prompt_template or (GSM8K_TEMPLATE if _is_gsm8k(row) else QUESTION_TEMPLATE)
    return Question(_fill(template, {**row, "question": text}, place))


def as_prompt(prompt, data, tokenizer):
    """A prompt as the engine and the rewards see it: a string that is used verbatim, or a message list.

    prompt: str, message list or Question. data: DataConfig; its system_prompt is put before chat prompts without one.
    """
    wanted = data.apply_chat_template
    if isinstance(prompt, Question):
        chat = tokenizer.chat_template is not None if wanted is None else wanted
        prompt = [{"role": "user", "content": prompt.text.strip()}] if chat else prompt.text
    elif isinstance(prompt, str) and wanted:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and data.system_prompt is not None and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
    return prompt


def encode_prompt(tokenizer, prompt, **template):
    """Token ids of a string (verbatim) or of a message list (chat template with the generation prompt): list of int."""
    if isinstance(prompt, list):
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **template)
    return tokenizer.encode(prompt)


def as_messages(value, role):
    """A message list as it is, a string as the one message of `role`."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def encode_pair(tokenizer, prompt, completion, **template):
    """Prompt and completion tokenised together: (ids, the index at which the completion begins).

    It begins where the tokens of both part from the tokens of the prompt alone. Either may be a string or a message
    list; a string beside a message list is a message of its user or assistant.
    """
    if isinstance(prompt, list) or isinstance(completion, list):
        prompt, completion = as_messages(prompt, "user"), as_messages(completion, "assistant")
        alone = encode_prompt(tokenizer, prompt, **template)
        both = tokenizer.apply_chat_template(prompt + completion, add_generation_prompt=False, **template)
    else:
        alone, both = tokenizer.encode(prompt), tokenizer.encode(prompt + completion)
    start = 0
    while start < min(len(alone), len(both)) and alone[start] == both[start]:
        start += 1
    return both, start


# --- supervised fine-tuning -------------------------------------------------------------------------------------------


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

        def make(row, place):
            prompt, completion = _need(row, prompt_column, place), _need(row, completion_column, place)
            check_prompt(prompt, f"{place}: {prompt_column!r}")
            if isinstance(completion, list):
                check_messages(completion, f"{place}: {completion_column!r}")
            elif not isinstance(completion, str):
                raise UserError(f"{place}: {completion_column!r} must be a string, got {_kind(completion)}")
            return SFTExample(place, prompt=prompt, completion=completion)

    elif question_column in seen and _is_gsm8k(seen):

        def make(row, place):
            answer = _need(row, "answer", place)
            if not isinstance(answer, str):
                raise UserError(f"{place}: 'answer' must be a string, got {_kind(answer)}")
            return SFTExample(place, prompt=_question(row, data, place, question_column), completion=answer)

    elif "text" in seen:
        make = _text
    else:
        raise UserError(
            f"{rows.places[0]}: sft needs the columns messages, or {prompt_column} and {completion_column}, or "
            f"question and answer, or text; its columns are {', '.join(seen) or 'none'}"
        )
    return [make(row, place) for row, place in rows]


def _conversation(row, place):
    messages = _need(row, "messages", place)
    check_messages(messages, f"{place}: 'messages'")
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: 'tools' is a string that is not JSON: {error.msg}") from error
    if not isinstance(tools, list | None):
        raise UserError(f"{place}: 'tools' must be a list, got {_kind(tools)}")
    return SFTExample(place, messages=messages, tools=tools)


def _text(row, place):
    text = _need(row, "text", place)
    if not isinstance(text, str) or not text:
        raise UserError(f"{place}: 'text' must be a non-empty string, got {_kind(text)}")
    return SFTExample(place, text=text)


@dataclass(frozen=True)
class TokenSequence:
    """One training sequence. input_ids: (S,) int32. loss_mask: (S,) bool, True at the tokens that are trained on."""

    input_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self):
        return len(self.input_ids)

    def part(self, start, stop):
        return TokenSequence(self.input_ids[start:stop], self.loss_mask[start:stop])

    @property
    def num_trained(self):
        """Tokens that are trained on: the first has nothing before it that could predict it."""
        return int(self.loss_mask[1:].sum())


@dataclass
class SFTData:
    """The training rows of a file: lists of sequences (one, or a pack), and what happened on the way.

    counts: rows, truncated_rows (lost their end), dropped_rows (nothing left to train on), tokens.
    """

    rows: list[list[TokenSequence]]
    counts: dict[str, int] = field(default_factory=dict)


def load_sft(path, data, train, tokenizer, model_limit, vocab_size, eos_token_ids=()):
    """The rows of a file ready to train on: SFTData.

    data, train: DataConfig and SFTConfig. model_limit: the model's longest sequence in tokens. eos_token_ids: the ids
    that end a text for the model; the tokenizer's own is the one appended. Raises UserError naming file and line.
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
    cut = 0 if splits else sum(len(sequence) > limit for sequence in sequences)
    if not splits:
        sequences = [sequence.part(0, limit) for sequence in sequences]
    if train.packing:
        packed = pack(sequences, train.max_length, train.packing_strategy, limit)
    else:
        packed = [[sequence] for sequence in sequences]
    rows = [kept for row in packed if (kept := [s for s in row if s.num_trained])]
    if not rows:
        raise UserError(f"{path}: no row has a token to train on")
    dropped = sum(not sequence.num_trained for sequence in sequences)
    tokens = sum(len(sequence) for row in rows for sequence in row)
    return SFTData(rows, {"rows": len(examples), "truncated_rows": cut, "dropped_rows": dropped, "tokens": tokens})


def check_ids(ids, vocab_size, where):
    """Raises UserError naming `where` if a token id is outside of [0, vocab_size)."""
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise UserError(f"{where}: token id {outside[0]} is outside of the model's vocabulary of {vocab_size}")


def tokenize_sft(example, data, train, tokenizer, eos_token_ids=()):
    """An SFTExample as a TokenSequence, not yet cut to length.

    Prompt and completion are tokenised together. EOS is appended where it is missing, but not to conversations, whose
    template ends them. Raises UserError if the loss that `train` asks for does not fit the row.
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
            spoken = np.array(tokenizer.assistant_mask(messages, **template), bool)
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
        trained &= spoken
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


def best_fit_decreasing(lengths, size):
    """Which sequences share a bin of `size` tokens: list of lists of indices into `lengths` (all at most `size`).

    Longest first (equal lengths in order), each into the bin with the least space that still holds it; of bins with
    equal space, the one that came to it first. Source: arXiv 2404.10830, TRL's packing strategy bfd.
    """
    bins = []
    spaces = []  # the distinct free spaces of open bins, ascending
    waiting = {}  # free space -> its bins, the oldest first
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        at = bisect.bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            chosen = waiting[space].popleft()
            if not waiting[space]:
                spaces.pop(at)
        else:
            space, chosen = size, []
            bins.append(chosen)
        chosen.append(index)
        left = space - length
        if left > 0:
            if not waiting.setdefault(left, deque()):
                bisect.insort(spaces, left)
            waiting[left].append(chosen)
    return bins


def pack(sequences, size, strategy="bfd", limit=None):
    """Sequences in rows of at most `size` tokens: list of lists of TokenSequence.

    "bfd": sequences are cut to `size`. "bfd_split": what is beyond it becomes further sequences. "wrapped": all tokens
    in one stream, cut into sequences every `size` tokens. limit: the longest sequence, if below `size`.
    """
    limit = min(limit or size, size)
    if strategy == "wrapped":
        ids = np.concatenate([s.input_ids for s in sequences])
        mask = np.concatenate([s.loss_mask for s in sequences])
        stream = TokenSequence(ids, mask)
        return [[stream.part(i, i + limit)] for i in range(0, len(stream), limit)]
    if strategy == "bfd":
        pieces = [s.part(0, limit) for s in sequences]
    else:
        pieces = [s.part(i, i + limit) for s in sequences for i in range(0, len(s), limit)]
    pieces = [piece for piece in pieces if len(piece)]
    return [[pieces[i] for i in row] for row in best_fit_decreasing([len(piece) for piece in pieces], size)]


# --- reinforcement learning -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptExample:
    """One row for RL: its prompt, the columns that rewards get, and where it came from ("file:line")."""

    where: str
    prompt: str | list | Question
    columns: dict


def prompt_examples(rows, data):
    """Rows to a list of PromptExample; the first row's columns decide for all. data: DataConfig.

    Every column but the prompt goes to the rewards. Added to them: `ground_truth` from verl's reward_model, `solution`
    from GSM8K's `#### n` or from data.answer_column. Raises UserError naming file and line.
    """
    seen = rows.rows[0]
    column = data.prompt_column or ("prompt" if "prompt" in seen else "question")
    if column not in seen:
        wanted = repr(column) if data.prompt_column else "'prompt' or 'question'"
        raise UserError(f"{rows.places[0]}: grpo needs a column {wanted}; its columns are {', '.join(seen) or 'none'}")
    from_template = isinstance(seen[column], str) and (column == "question" or data.prompt_template is not None)

    def make(row, place):
        if from_template:
            return _question(row, data, place, column)
        prompt = _need(row, column, place)
        check_prompt(prompt, f"{place}: {column!r}")
        return prompt

    return [PromptExample(place, make(row, place), _reward_columns(row, data, place, column)) for row, place in rows]


def _reward_columns(row, data, place, prompt_column):
    taken = ("prompt", "completion") if prompt_column == "question" else (prompt_column, "prompt", "completion")
    columns = {name: value for name, value in row.items() if name not in taken}
    if data.answer_column is not None:
        columns["solution"] = _need(row, data.answer_column, place)
    elif isinstance(row.get("reward_model"), dict) and "ground_truth" in row["reward_model"]:
        columns.setdefault("ground_truth", row["reward_model"]["ground_truth"])
    elif _is_gsm8k(row):
        columns.setdefault("solution", row["answer"].rpartition("####")[2].strip())
    return columns


@dataclass(frozen=True)
class Prompt:
    """A prompt that can be generated from: what rewards see (str or message list), its token ids, its columns."""

    prompt: str | list
    prompt_token_ids: list[int]
    columns: dict
    where: str


@dataclass
class PromptData:
    """The prompts of a file and the number of those dropped because they are too long."""

    prompts: list[Prompt]
    dropped_prompts: int = 0

    def columns(self, indices):
        """{name: values} of the chosen prompts, None where a row has no such column. indices: iterable of int."""
        chosen = [self.prompts[i].columns for i in indices]
        names = dict.fromkeys(name for columns in chosen for name in columns)
        return {name: [columns.get(name) for columns in chosen] for name in names}


def load_prompts(path, data, tokenizer, model_limit, vocab_size):
    """The prompts of a file: PromptData.

    model_limit: the model's longest sequence in tokens, prompt and completion. Prompts longer than
    data.max_prompt_length are dropped and counted; one that leaves no room for a completion is a UserError unless
    max_prompt_length is set. Raises UserError naming file and line.
    """
    if tokenizer is None:
        raise UserError("grpo needs a tokenizer, and the model folder has no tokenizer.json")
    longest = model_limit - 1 if data.max_prompt_length is None else min(data.max_prompt_length, model_limit - 1)
    kept, dropped = [], 0
    for example in prompt_examples(read_rows(path), data):
        prompt = as_prompt(example.prompt, data, tokenizer)
        try:
            ids = list(encode_prompt(tokenizer, prompt, **data.chat_template_kwargs))
        except UserError as error:
            raise UserError(f"{example.where}: {error}") from error
        if not ids:
            raise UserError(f"{example.where}: the prompt has no tokens")
        check_ids(ids, vocab_size, example.where)
        if len(ids) <= longest:
            kept.append(Prompt(prompt, ids, example.columns, example.where))
        elif data.max_prompt_length is None:
            raise UserError(
                f"{example.where}: a prompt of {len(ids)} tokens leaves no room for a completion in the model's "
                f"{model_limit}; set data.max_prompt_length to drop longer ones"
            )
        else:
            dropped += 1
    if not kept:
        raise UserError(f"{path}: all {dropped} prompts are longer than data.max_prompt_length {longest}")
    return PromptData(kept, dropped)
