"""Rows to prompts: templates, chat prompts, token ids.

A tokenizer is passed in: an object with encode, apply_chat_template, assistant_mask, chat_template and eos_token_id
(model/tokenizer.py). Prompts that are dropped are counted.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rlnumba.data.files import (
    TEMPLATE_CELLS,
    TEMPLATE_COLUMNS,
    check_completion,
    check_ids,
    check_prompt,
    column_value,
    read_dataset,
    template_variables,
    text_value,
)
from rlnumba.data.formats import chat_cell, number_cell, object_cell, text_cell
from rlnumba.errors import ConfigError, UserError

# Templates for a `question` column where data.prompt_template is not set. GSM8K's is verl's, reasoning-gym's asks for
# what its scorers are given.
GSM8K_TEMPLATE = '{question} Let\'s think step by step and output the final answer after "####".\n'

QUESTION_TEMPLATE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.\n"

GYM_TEMPLATE = "{question}\nThink step by step, then write the final answer as <answer>answer here</answer>.\n"


# Columns of messages, besides those that [data] names; and roles that templates render or refuse.
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
USUAL_ROLES = ("system", "user", "assistant", "tool")


def is_gsm8k(row):
    return isinstance(row.get("answer"), str) and "####" in row["answer"]


def question_prompt(row, data, tokenizer, where, column):
    """The prompt that data.prompt_template, or a default, makes of a row; {name} of no column stays as it is.

    One user message if the tokenizer has a chat template, else the text itself; data.apply_chat_template decides first.
    """
    row = {**row, "question": text_value(row, column, where)}
    default = GYM_TEMPLATE if "gym_dataset" in row else GSM8K_TEMPLATE if is_gsm8k(row) else QUESTION_TEMPLATE
    template = data.prompt_template or default
    if not any(name in row for name in re.findall(r"\{(\w+)\}", template)):
        raise ConfigError(f"data.prompt_template names no column of {where}; its columns are {', '.join(row)}")
    text = re.sub(r"\{(\w+)\}", lambda m: str(row[m[1]]) if m[1] in row else m[0], template)
    chat = tokenizer.chat_template is not None if data.apply_chat_template is None else data.apply_chat_template
    return as_messages(text.strip(), "user") if chat else text


def as_prompt(prompt, data):
    """A str or message list as the engine and the rewards get it: a str is used verbatim. data: DataConfig."""
    if data.apply_chat_template:
        prompt = as_messages(prompt, "user")
    if isinstance(prompt, list) and data.system_prompt is not None and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
    return prompt


def encode_prompt(tokenizer, prompt, **template):
    """Token ids of a string (verbatim) or of a message list (chat template with the generation prompt): list of int."""
    if isinstance(prompt, list):
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **template)
    return tokenizer.encode(prompt)


def template_notes(path, data, rows, is_templated, tokenizer):
    """Lines about what a file and [data] ask of the chat template in vain: list of str.

    data: DataConfig; rows: those of read_dataset; is_templated: whether the template is applied to any of them.
    """
    columns = [name for name in TEMPLATE_COLUMNS if any(row.get(name) for row, _ in rows)]
    notes = _role_notes(rows, data, tokenizer) if is_templated else []
    if not is_templated:
        names = ("system_prompt", "chat_template_kwargs", "apply_chat_template")
        asked = [f"data.{name}" for name in names if getattr(data, name)] + [f"the column {name}" for name in columns]
        return [f"{path}: {each} has no effect: no chat template is applied to its rows, texts" for each in asked]
    if not columns and not data.chat_template_kwargs:
        return notes
    given = {name: f"data.chat_template_kwargs.{name}" for name in data.chat_template_kwargs}
    for row, where in rows:
        found = template_variables(row, where)
        given |= {name: "the column tools" if name == "tools" else f"chat_template_kwargs.{name}" for name in found}
    read = tokenizer.template_variables
    return notes + [
        f"{path}: {each} has no effect: the chat template does not read it"
        for name, each in given.items()
        if name not in read
    ]


def _role_notes(rows, data, tokenizer):
    """Lines about roles whose messages the chat template leaves out, as many do with all that they do not name."""
    columns = {*MESSAGE_COLUMNS, data.prompt_column, data.completion_column}
    first_of = {}
    for row, where in rows:
        for messages in (row.get(name) for name in columns):
            for message in messages if isinstance(messages, list) else ():
                if isinstance(message, dict) and message.get("role") not in USUAL_ROLES:
                    first_of.setdefault(message.get("role"), where)
    return [
        f"{where}: messages of the role {role!r} have no effect: the chat template leaves them out"
        for role, where in first_of.items()
        if _leaves_out(tokenizer, role)
    ]


def _leaves_out(tokenizer, role):
    """Whether the chat template renders a message of this role, after a user's, as the same whatever its content."""
    user = {"role": "user", "content": "question"}
    try:
        first, second = (
            tokenizer.apply_chat_template([user, {"role": role, "content": content}], add_generation_prompt=False)
            for content in ("one", "two")
        )
    except UserError:
        return False
    return list(first) == list(second)


def as_messages(value, role):
    """A message list as it is, a string as the one message of `role`."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def encode_pair(tokenizer, prompt, completion, **template):
    """Prompt and completion tokenised together: (ids, index of the completion's first token).

    The completion begins at the first token at which the ids differ from those of the prompt alone. Either may be a
    string or a message list; a string beside a message list becomes a user or assistant message.
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


def with_eos(ids, tokenizer, eos_token_ids=()):
    """Token ids with EOS at their end: the tokenizer's, else the model's first; list of int."""
    eos = tokenizer.eos_token_id
    if eos is None and eos_token_ids:
        eos = eos_token_ids[0]
    missing = eos is not None and (not ids or ids[-1] not in (eos, *eos_token_ids))
    return [*ids, eos] if missing else list(ids)


def encode_scored(tokenizer, prompt, completion, eos_token_ids=(), **template):
    """Token ids of prompt and completion as a reward model reads them: list of int; EOS is appended to strings."""
    ids = encode_pair(tokenizer, prompt, completion, **template)[0]
    text = isinstance(prompt, str) and isinstance(completion, str)
    return with_eos(ids, tokenizer, eos_token_ids) if text else list(ids)


def _reward_columns(row, data, where, prompt_column):
    excluded = {prompt_column, "prompt", "completion"} - {"question"}
    columns = {name: value for name, value in row.items() if name not in excluded}
    if data.answer_column is not None:
        columns["solution"] = column_value(row, data.answer_column, where)
    elif isinstance(row.get("reward_model"), dict) and "ground_truth" in row["reward_model"]:
        columns.setdefault("ground_truth", row["reward_model"]["ground_truth"])
    elif is_gsm8k(row):
        columns.setdefault("solution", row["answer"].rpartition("####")[2].strip())
    return columns


class GivenCompletion(NamedTuple):
    """A completion that a row has, as one that is drawn: token_ids (T,) int32 that follow the prompt's, and their text.

    is_cut: whether the row has more tokens.
    """

    token_ids: np.ndarray
    text: str
    is_cut: bool


def given_completion(tokenizer, prompt, prompt_token_ids, completion, limit, **template):
    """The GivenCompletion of a prompt as the engine gets it, cut to `limit` tokens.

    completion: str or message list. A text is tokenised together with a prompt that is text; where its first tokens
    would merge with the prompt's last ones it is tokenised by itself, because a drawn completion begins a token. EOS is
    appended to texts, and chat templates end messages. Raises UserError for a template that writes the prompt in
    another way before a completion, and for one without tokens.
    """
    ids, start = encode_pair(tokenizer, prompt, completion, **template)
    is_chat = isinstance(prompt, list) or isinstance(completion, list)
    if start < len(prompt_token_ids):
        if is_chat:
            raise UserError("the chat template writes the prompt in another way where a completion follows it")
        ids, start = tokenizer.encode(completion, add_special_tokens=False), 0
    found = list(ids[start:])
    found = found if is_chat else with_eos(found, tokenizer)
    if not found:
        raise UserError("the completion has no tokens")
    kept = np.array(found[:limit], np.int32)
    return GivenCompletion(kept, tokenizer.decode(kept.tolist()), len(found) > limit)


@dataclass(frozen=True)
class Prompt:
    """A prompt for rollouts: as rewards get it (str or message list), its token ids, its columns, its file and line.

    given: the GivenCompletion of its row, None where no completion is read.
    """

    prompt: str | list
    prompt_token_ids: list[int]
    columns: dict
    where: str
    given: GivenCompletion | None = None


@dataclass
class PromptData:
    """The prompts of a file, the number of those dropped as too long, and template_notes. agents: the Agents of a run
    whose completions are episodes (rlnumba/environments/agents.py), or None."""

    prompts: list[Prompt]
    dropped_prompts: int = 0
    notes: list[str] = field(default_factory=list)
    agents: object = None

    def columns(self, indices):
        """{name: values} of the chosen prompts, None where a row has no such column. indices: iterable of int."""
        chosen = [self.prompts[i].columns for i in indices]
        names = dict.fromkeys(name for columns in chosen for name in columns)
        return {name: [columns.get(name) for columns in chosen] for name in names}


class PromptTools(NamedTuple):
    """The tools of the rows of a run whose policy calls some. schemas_of(row, where): the JSON schemas of a row's, or
    None; raises UserError. default_prompt: the messages of a row without a prompt, None where each must have one.
    num_rows: rows without columns, which a run without data.train has."""

    schemas_of: Callable
    default_prompt: list | None = None
    num_rows: int = 0


# The place of a row that no file has, in messages.
NO_FILE = "a run without data.train"


def check_messages(prompt, where, column):
    """Raise UserError for a prompt that is no list of messages, to which no result of a tool can be added."""
    if not isinstance(prompt, list):
        raise UserError(
            f"{where}: {column!r} is text, and with tools or an environment a prompt is a list of messages "
            "(data.apply_chat_template = true makes one)"
        )


def _columns_of(row):
    """The columns that a row has, and the key that names the prompt's: the end of a message."""
    return f"its columns are {', '.join(row) or 'none'}; --data.prompt_column names that of the prompt"


def load_prompts(path, data, tokenizer, model_limit, vocab_size, for_eval=None, tools=None, completion_limit=None):
    """The prompts of a file: PromptData. The first row's columns decide for all. path: None for tools.num_rows rows
    without columns.

    data: DataConfig; for_eval: read_dataset's. model_limit: the model's longest sequence in tokens, prompt and
    completion. Prompts longer than data.max_prompt_length are dropped and counted; one that leaves no room for a
    completion is a UserError unless max_prompt_length is set. Every column but the prompt is passed to the rewards,
    with two additions: `ground_truth` from verl's reward_model, `solution` from GSM8K's `#### n` or from
    data.answer_column. tools: PromptTools, with which prompts are messages. completion_limit: read the completion of
    each row, too, and cut it to so many tokens and to the model's limit; None: read none. Raises UserError naming file
    and line.
    """
    if tokenizer is None:
        raise UserError("grpo needs a tokenizer, and the model folder has no tokenizer.json")
    longest = model_limit - 1 if data.max_prompt_length is None else min(data.max_prompt_length, model_limit - 1)
    # verl's rows have objects in the last two.
    cells = TEMPLATE_CELLS | dict.fromkeys(("reward_model", "extra_info"), object_cell)
    cells |= {name: text_cell for name in (data.answer_column,) if name}
    cells |= dict.fromkeys((data.prompt_column,) if data.prompt_column else ("prompt", "question"), chat_cell)
    cells |= {name: number_cell for name in (data.curriculum_column,) if name}
    completion_column = data.completion_column or "completion"
    cells |= {} if completion_limit is None else {completion_column: chat_cell}
    if path is None:
        path, rows = NO_FILE, [({}, NO_FILE)] * tools.num_rows
    else:
        rows = read_dataset(path, data, for_eval, cells)
    seen, where = rows[0]
    column = data.prompt_column or ("prompt" if "prompt" in seen else "question")
    default_prompt = tools.default_prompt if tools is not None and data.prompt_column is None else None
    if column not in seen and default_prompt is None:
        wanted = repr(column) if data.prompt_column else "'prompt' or 'question'"
        raise UserError(f"{where}: grpo needs a column {wanted}; {_columns_of(seen)}")
    from_template = isinstance(seen.get(column), str) and (column == "question" or data.prompt_template is not None)
    kept, dropped = [], 0
    for row, where in rows:
        if default_prompt is not None and row.get(column) is None:
            prompt = default_prompt
        elif from_template:
            prompt = question_prompt(row, data, tokenizer, where, column)
        else:
            prompt = column_value(row, column, where)
            check_prompt(prompt, f"{where}: {column!r}")
        prompt = as_prompt(prompt, data)
        columns, schemas = _reward_columns(row, data, where, column), None
        if tools is not None:
            check_messages(prompt, where, column)
            schemas = tools.schemas_of(row, where)
        try:
            template = data.chat_template_kwargs | template_variables(row, where)
            template |= {"tools": schemas} if schemas else {}
            ids = list(encode_prompt(tokenizer, prompt, **template))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        if not ids:
            raise UserError(f"{where}: the prompt has no tokens")
        check_ids(ids, vocab_size, where)
        if len(ids) <= longest:
            kept.append(Prompt(prompt, ids, columns, where))
            if completion_limit is not None:
                completion = column_value(row, completion_column, where)
                check_completion(prompt, completion, where, completion_column, data)
                limit = min(completion_limit, model_limit - len(ids))
                try:
                    given = given_completion(tokenizer, prompt, ids, completion, limit, **template)
                except UserError as error:
                    raise UserError(f"{where}: {completion_column!r}: {error}") from error
                check_ids(given.token_ids, vocab_size, where)
                kept[-1] = replace(kept[-1], given=given)
        elif data.max_prompt_length is None:
            raise UserError(
                f"{where}: a prompt of {len(ids)} tokens leaves no room for a completion in the model's "
                f"{model_limit}; set data.max_prompt_length to drop longer ones"
            )
        else:
            dropped += 1
    if not kept:
        raise UserError(f"{path}: all {dropped} prompts are longer than data.max_prompt_length {longest}")
    is_templated = any(isinstance(each.prompt, list) for each in kept)
    return PromptData(kept, dropped, template_notes(path, data, rows, is_templated, tokenizer))
