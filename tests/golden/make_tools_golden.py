"""Records what transformers and TRL make of tools: tools.json.

schemas      get_json_schema of each function of tests/environments/signatures.py
templates    chat templates of released models, from TRL's package (Apache 2.0), for the tests that need them
parses       what TRL's parse_response reads in the turns of TURNS, for Qwen 3's template and Qwen 3.5's
rendered     turns that the templates of TRL's package make of a message with calls
suffixes     what TRL's trainer puts between two turns, with the templates that it trains with, in ids of tokenizer/

Needs torch, transformers and trl, in an environment of their own: `python tests/golden/make_tools_golden.py`.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import trl.chat_template_utils as trl_templates
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from trl import GRPOTrainer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "environments"))
from signatures import FUNCTIONS, REFUSED  # noqa: E402

FOLDER = Path(trl_templates.__file__).parent / "chat_templates"
KEPT = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6")
KEPT_OTHERS = ("nemotron_3_nano", "llama3_1", "glm4moe", "gemma3", "llama3_training", "lfm2_v2", "phi3")
# Headers after which the model's turn begins, and what ends it.
HEADERS = {
    "<|im_start|>assistant\n": "<|im_end|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n": "<|eot_id|>",
    "<|assistant|>": "<|observation|>",
}
FAMILIES = ("qwen", "nemotron", "llama3_1", "llama3_2", "glm4moe")
WITHOUT_CALLS = ("qwen2_5_vl", "qwen2_5_vl_training")
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "ratio": {"type": "number"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "filter": {"type": "object"},
                "after": {"type": "string", "nullable": True},
            },
        },
    },
}
ARGUMENTS = [
    {"query": "75001", "limit": 3, "ratio": 0.5, "exact": True},
    {
        "query": 'two\nlines, "quotes", \\ and 你好 🙂 {"a": 1}',
        "tags": ["a", "b\n"],
        "filter": {"a": {"b": [1, None, False]}},
    },
    {"query": "\n edges \n", "exact": False, "after": "2024-01-01"},
    {},
]

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "search", "arguments": {"limit": 2}}\n</tool_call>'
XML = "<tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>\n</function>\n</tool_call>"
XML_OTHER = "<tool_call>\n<function=search>\n<parameter=limit>\n2\n</parameter>\n</function>\n</tool_call>"
TURNS = {
    "qwen3": [
        "Just text.",
        CALL,
        f"Let me look.\n{CALL}",
        f"{CALL}\n{OTHER}",
        f"<think>\nWhat is a?\n</think>\n\nLet me look.\n{CALL}",
        f"<think>\nI could call {CALL} here.\n</think>\n\nNo.",
        f"<think>\nOpen {CALL}",
        '<tool_call>{"name": "search"}</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": null}\n</tool_call>',
        f"Before.\n{CALL}\nAfter.",
        f'{CALL}\n<tool_call>\n{{"name": "search", "arguments": }}\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}',
        '<tool_call>\n{"arguments": {"query": "a"}}\n</tool_call>',
        '<tool_call>\n[{"name": "search", "arguments": {}}]\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": "a"}\n</tool_call>',
        "<think>\n\n</think>\n\nText.",
    ],
    "qwen3_5_think": [
        "Just text.",
        XML,
        f"Let me look.\n\n{XML}",
        f"{XML}\n{XML_OTHER}",
        f"<think>\nWhat?\n</think>\n\nLet me look.\n\n{XML}",
        "<tool_call>\n<function=search>\n</function>\n</tool_call>",
        "<tool_call>\n<function=search>\n<parameter=query>\n\n a \n\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=search>\n<parameter=query>\na\n</function>\n</tool_call>",
        "<tool_call>\n<function=search>\n<parameter=query>\n75001\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=search>\n<parameter=limit>\n7\n</parameter>\n</function>\n</tool_call>",
    ],
}

RESULTS = [
    [{"role": "tool", "name": "search", "content": "6"}],
    [{"role": "tool", "name": "search", "content": ""}],
    [
        {"role": "tool", "name": "search", "content": " two\nlines \n"},
        {"role": "tool", "name": "add", "content": "你好"},
    ],
]
SUFFIXES = {
    "qwen2_5": [{}],
    "qwen3": [{}, {"enable_thinking": False}],
    "qwen3_instruct_2507": [{}],
    "qwen3_5_think": [{}, {"enable_thinking": False}],
    "qwen3_5_nothink": [{}, {"enable_thinking": True}],
    "qwen3_6": [{}],
    "nemotron_3_nano": [{}],
}


def message(arguments, content, reasoning):
    calls = [{"type": "function", "function": {"name": "search", "arguments": each}} for each in arguments]
    made = {"role": "assistant", "content": content, "tool_calls": calls}
    return made | ({"reasoning_content": reasoning} if reasoning else {})


def rendered_turns(tokenizer):
    """Records of the turns: {"message", "text": of the turn, "templates": that make it}."""
    found = {}
    for path in sorted(FOLDER.glob("*.jinja")):
        if not path.stem.startswith(FAMILIES) or path.stem in WITHOUT_CALLS:
            continue
        tokenizer.chat_template = path.read_text()
        is_llama = path.stem.startswith("llama")
        cases = [message([each], "", None) for each in ARGUMENTS]
        if not is_llama:
            cases += [message(ARGUMENTS[:2], "Let me look.", None), message(ARGUMENTS[:1], "So.", "I think.")]
        for case in cases:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": "QUESTION"}, case], tools=[TOOL], tokenize=False
            )
            text = text.partition("QUESTION")[2]
            header = next(each for each in HEADERS if each in text)
            turn = text.partition(header)[2].partition(HEADERS[header])[0]
            found.setdefault((json.dumps(case), turn), []).append(path.stem)
    return [{"message": json.loads(case), "text": turn, "templates": names} for (case, turn), names in found.items()]


def parsed_turns(tokenizer):
    """{template: [{"text", "parsed"}]} of TURNS, as the trainer parses them."""
    found = {}
    for name, turns in TURNS.items():
        tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
        trl_templates.add_response_schema(tokenizer)
        found[name] = []
        for text in turns:
            prompt = [{"role": "user", "content": "QUESTION"}]
            settings = {"enable_thinking": False} if name == "qwen3_5_think" else {}
            prefix = tokenizer.apply_chat_template(
                prompt, tools=[TOOL], add_generation_prompt=True, return_dict=False, **settings
            )
            ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
            parsed = trl_templates.parse_response(tokenizer, ids, prefix=prefix, tools=[TOOL])
            found[name].append({"text": text, "parsed": parsed})
    return found


def suffixes(tokenizer):
    """Records {"template", "template_kwargs", "results", "ids"}."""
    found = []
    for name, settings in SUFFIXES.items():
        tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
        trained_with = trl_templates.get_training_chat_template(tokenizer)
        for template_kwargs in settings:
            for results in RESULTS:
                trainer = SimpleNamespace(
                    processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=trained_with
                )
                trainer.chat_template_kwargs = template_kwargs
                ids = GRPOTrainer._get_tool_suffix_ids(trainer, results)
                found.append({"template": name, "template_kwargs": template_kwargs, "results": results, "ids": ids})
    return found


def main():
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    for function, _ in REFUSED:
        try:
            get_json_schema(function)
        except Exception:
            continue
        raise AssertionError(f"{function.__name__} has a schema")
    golden = {
        "schemas": {function.__name__: get_json_schema(function) for function in FUNCTIONS},
        "templates": {name: (FOLDER / f"{name}.jinja").read_text() for name in KEPT + KEPT_OTHERS},
        "tool": TOOL,
        "parses": parsed_turns(tokenizer),
        "rendered": rendered_turns(tokenizer),
        "suffixes": suffixes(tokenizer),
    }
    (HERE / "tools.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
