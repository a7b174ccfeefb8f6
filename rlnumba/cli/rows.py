"""The input of `generate` and `score`: a model's files, and rows that become token ids."""

from pathlib import Path

import click

from rlnumba.errors import UserError


def open_model(model, base):
    """(folder, base folder, ModelConfig, Tokenizer or None) of a folder or hub id: all but the weights, read last.

    base: an adapter's, None for a model, as load_model takes it.
    """
    from rlnumba.model.hub import find_base, read_config
    from rlnumba.model.tokenizer import Tokenizer

    folder, adapter = find_base(model, base)
    config = read_config(folder, adapter)
    if adapter is None:
        return folder, None, config, Tokenizer.from_folder(folder)
    return adapter, folder, config, Tokenizer.from_folder(adapter) or Tokenizer.from_folder(folder)


def local_folders(*models):
    """Those of models that are local folders: list of Path."""
    paths = [Path(model).expanduser() for model in models if model is not None]
    return [path for path in paths if path.is_dir()]


def read_rows_with_ids(path, column, prompt_column, completion=False):
    """The Rows of a file, each with token ids in `column`, or with a prompt and, if asked for, a completion or a text.

    The ids count if a row has both, such as a line that `generate` or `score` wrote.
    """
    from rlnumba.data import check_messages, check_prompt, read_rows
    from rlnumba.data.files import TEMPLATE_CELLS
    from rlnumba.data.formats import chat_cell, json_cell

    cells = {column: json_cell, prompt_column: chat_cell, "completion": chat_cell}
    rows = read_rows(path, cells=TEMPLATE_CELLS | cells)
    for row, where in rows:
        has_text = prompt_column in row and (not completion or "completion" in row)
        if column not in row and not has_text and not (completion and "text" in row):
            text = f"{prompt_column!r} and 'completion', or 'text'" if completion else repr(prompt_column)
            remedy = f"its columns are {', '.join(row) or 'none'}; --prompt-column names that of the prompt"
            raise UserError(f"{where}: needs either {column!r} or {text}; {remedy}")
        if column in row:
            ids = row[column]
            if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                raise UserError(f"{where}: {column!r} must be a list of integers")
            if not ids:
                raise UserError(f"{where}: {column!r} is empty")
            continue
        if not has_text:
            if not isinstance(row["text"], str):
                raise UserError(f"{where}: 'text' must be a string")
            continue
        check_prompt(row[prompt_column], f"{where}: {prompt_column!r}")
        if completion and isinstance(row.get("completion"), list):
            check_messages(row["completion"], f"{where}: 'completion'")
        elif completion and not isinstance(row.get("completion"), str):
            raise UserError(f"{where}: 'completion' must be a string or a list of messages")
    return rows


def token_ids(rows, column, encode, tokenizer, vocab_size, limit):
    """The token ids of every row, a list each: those in `column`, or encode(row, **template), with the variables of
    the chat template that the row has. UserErrors name the line."""
    from rlnumba.data import check_ids, template_variables

    sequences, in_vain = [], []
    for row, where in rows:
        ids = row.get(column)
        if ids is None:
            if tokenizer is None:
                raise UserError(f"{where}: text needs a tokenizer, and the model has no tokenizer.json; give {column}")
            template = template_variables(row, where)
            if template and not any(isinstance(value, list) for name, value in row.items() if name not in template):
                in_vain.append(f"{where}: {', '.join(template)} has no effect: no chat template is applied to a text")
            try:
                ids = encode(row, **template)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        if not ids:
            raise UserError(f"{where}: the text has no tokens")
        check_ids(ids, vocab_size, where)
        if len(ids) > limit:
            raise UserError(f"{where}: {len(ids)} tokens are more than the limit of {limit}")
        sequences.append(ids)
    for line in in_vain[:1]:
        click.echo(line, err=True)
    return sequences
