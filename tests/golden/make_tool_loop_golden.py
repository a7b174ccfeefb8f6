"""Makes tool_loop.json: what TRL's own GRPOTrainer._tool_call_loop keeps of scripted turns at each limit of length.

    python tests/golden/make_tool_loop_golden.py        (torch, transformers, trl 1.16; an environment of their own)

The trainer is not built: the loop is called on an object that has the attributes it reads. A turn with a call, its
result, and a turn without; max_completion_length, or the model's longest sequence, goes from below the ids of call and
result up to more than all. The template is Qwen 3's, the tokenizer that of tokenizer/.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import trl.chat_template_utils as templates
from transformers import AutoTokenizer
from trl import GRPOTrainer

HERE = Path(__file__).parent
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
LAST, RESULT = "It is 12.", 12
LONG = 10_000


def loop(tokenizer, prompt, max_completion_length, max_model_len):
    """The ids after the prompt, their mask and the messages that TRL keeps."""
    drawn = tokenizer.encode(CALL, add_special_tokens=False) + [tokenizer.eos_token_id]
    last = tokenizer.encode(LAST, add_special_tokens=False) + [tokenizer.eos_token_id]
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}}
    trainer = SimpleNamespace(
        max_tool_calling_iterations=9,
        _sync_tool_dicts=[{"multiply": lambda a, b: RESULT}],
        _async_tool_dicts=[{}],
        use_vllm=False,
        _is_vlm=False,
        environment_factories=None,
        tools=[],
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=templates.get_training_chat_template(tokenizer),
        chat_template_kwargs={},
        max_completion_length=max_completion_length,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=max_model_len)),
        _generate_single_turn=lambda *arguments, **keys: ([list(last)], [[-0.5] * len(last)]),
    )
    trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    mask, messages, ids, *_ = GRPOTrainer._tool_call_loop(
        trainer,
        [[{"role": "user", "content": "3*4"}]],
        [list(prompt)],
        [list(drawn)],
        [[message]],
        [[-0.5] * len(drawn)],
        None,
        {},
    )
    return {"ids": ids[0], "mask": mask[0], "roles": [each["role"] for each in messages[0]]}


def main():
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    tokenizer.chat_template = templates.qwen3_chat_template
    tokenizer.eos_token = "<|im_end|>"
    templates.add_response_schema(tokenizer)
    prompt = tokenizer.encode("p" * 20, add_special_tokens=False)
    whole = loop(tokenizer, prompt, LONG, LONG)
    result = len(whole["mask"]) - whole["mask"][::-1].index(0)
    records = []
    for limit in range(result - 2, len(whole["ids"]) + 2):
        records.append({"max_completion_length": limit} | loop(tokenizer, prompt, limit, LONG))
        records.append({"max_model_len": limit} | loop(tokenizer, prompt, LONG, len(prompt) + limit))
    texts = {"call": CALL, "last": LAST, "num_call_and_result": result}
    (HERE / "tool_loop.json").write_text(json.dumps(texts | {"records": records}) + "\n")
    print(len(records), "records", result, len(whole["ids"]))


if __name__ == "__main__":
    main()
