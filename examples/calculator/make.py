"""The model and the data of the calculator example, from a folder of SmolLM2-135M-Instruct:

    python examples/calculator/make.py DIR         -> runs/calculator: model, sft.jsonl, train.jsonl, eval.jsonl
    rlnumba sft --config examples/calculator/sft.toml
    rlnumba grpo --config examples/calculator.toml

The chat template of the released model shows no tools: TEMPLATE takes its place. Of the supervised rows one in four
calls the tool and the others answer at once, so that the model that they train knows both, and prefers neither for
being right.
"""

import json
import pathlib
import shutil
import sys

import numpy as np

from rlnumba.environments.schema import tool_schema

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))

from calculator import calculate  # noqa: E402

SFT_ROWS, PROMPTS, EVAL_ROWS = 2_000, 2_000, 256
TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call a function, as <tool_call>
{"name": NAME, "arguments": {...}}
</tool_call>. The functions:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def questions(count, seed):
    """`count` different expressions, "a*b+c" or "a*b-c" of numbers of two and three digits: list of str."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        a, b, c = int(rng.integers(11, 100)), int(rng.integers(11, 100)), int(rng.integers(100, 1000))
        found[f"{a}*{b}{'+-'[rng.integers(2)]}{c}"] = None
    return list(found)


def user(expression):
    return {"role": "user", "content": f"What is {expression}?"}


def supervised(expression, calls):
    """A row of messages whose assistant calls the tool, or answers at once."""
    value = calculate(expression)
    turns = []
    if calls:
        function = {"name": "calculate", "arguments": {"expression": expression}}
        turns.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
        turns.append({"role": "tool", "name": "calculate", "content": value})
    return {"messages": [user(expression), *turns, {"role": "assistant", "content": value}]}


def write_rows(folder, num_eval=EVAL_ROWS):
    """sft.jsonl, train.jsonl and eval.jsonl, with no expression in two of them."""
    every = questions(SFT_ROWS + PROMPTS + num_eval, seed=0)
    schemas = [tool_schema(calculate)]
    rows = [supervised(each, i % 4 == 0) | {"tools": schemas} for i, each in enumerate(every[:SFT_ROWS])]
    prompts = [{"prompt": [user(each)], "answer": int(calculate(each))} for each in every[SFT_ROWS:]]
    parts = {"sft": rows, "train": prompts[:PROMPTS], "eval": prompts[PROMPTS:]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def write_model(source, folder):
    """A copy of a model's folder with TEMPLATE."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"chat_template": TEMPLATE}, indent=2) + "\n")
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def make(source, folder, has_own_template=True, num_eval=EVAL_ROWS):
    """All of it, in `folder`. has_own_template: whether TEMPLATE takes the place of the model's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder, num_eval)
    if has_own_template:
        write_model(source, folder / "model")
    else:
        shutil.copytree(source, folder / "model", dirs_exist_ok=True)


if __name__ == "__main__":
    make(sys.argv[1], pathlib.Path("runs/calculator"))
