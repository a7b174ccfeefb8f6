"""Writes the golden models and chats, computed by torch and transformers, beside itself.

Run it in an environment that has torch, transformers and tokenizers (the only place where they are used):

    python tests/golden/make_golden.py [--samples FOLDER]

models/NAME/       a tiny Hugging Face folder with random weights, and expected.npz: token ids, logits, entropies,
                   greedy continuations, the mean cross-entropy over the packed batch and its gradient for every
                   parameter, all float32
tokenizer/         a byte-level BPE tokenizer of 487 ids with a chat template, and chats.json: messages, the options of
                   apply_chat_template, and the ids and masks that transformers gives
samples/NAME.npz   with --samples: log-probs, greedy continuations and gradient norms of models too large to keep here
samples/NAME.json  chats for their tokenizers
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

HERE = Path(__file__).parent
VOCAB = 144

COMMON = dict(
    vocab_size=VOCAB,
    num_hidden_layers=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
MODELS = {
    "qwen3_tied": (
        Qwen3Config(
            **COMMON, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            rope_parameters=dict(rope_type="default", rope_theta=1e6), tie_word_embeddings=True,
        ),
        {},
    ),
    "qwen3_untied": (
        Qwen3Config(
            **COMMON, hidden_size=40, intermediate_size=64, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
            rope_parameters=dict(rope_type="default", rope_theta=1e6), tie_word_embeddings=False,
        ),
        dict(max_shard_size="100KB"),
    ),
    "qwen2": (
        Qwen2Config(
            **COMMON, hidden_size=64, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2,
            rope_parameters=dict(rope_type="default", rope_theta=1e4), tie_word_embeddings=True,
        ),
        dict(dtype=torch.bfloat16, old_style=True),
    ),
    "llama3": (
        LlamaConfig(
            **COMMON, hidden_size=40, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            rope_parameters=LLAMA3, tie_word_embeddings=False, rms_norm_eps=1e-5,
        ),
        dict(old_style=True),
    ),
    "llama_head48": (
        LlamaConfig(
            **COMMON, hidden_size=48, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=48,
            rope_parameters=dict(rope_type="default", rope_theta=1e4), tie_word_embeddings=True, rms_norm_eps=1e-5,
            attention_bias=True, mlp_bias=True,
        ),
        dict(dtype=torch.float16),
    ),
    # Small enough for the simulator.
    "qwen3_micro": (
        Qwen3Config(
            **{**COMMON, "num_hidden_layers": 1, "vocab_size": 40}, hidden_size=16, intermediate_size=24,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, attention_bias=True, tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
        ),
        dict(lengths=(1, 6)),
    ),
}  # fmt: skip


def expected_of(model, sequences, max_new_tokens=24, logits=True, gradients=True):
    """Everything the tests compare: arrays by name. Sequences run one at a time, without padding."""
    model.eval()
    model.zero_grad()
    found = {"input_ids": np.concatenate(sequences).astype(np.int32), "lengths": [len(s) for s in sequences]}
    all_logits, logprobs, entropy, loss, targets = [], [], [], 0.0, 0
    for ids in sequences:
        ids = torch.tensor(ids)[None]
        z = model(ids).logits[0].float()
        logp = z.log_softmax(-1)
        loss = loss - logp[:-1].gather(1, ids[0, 1:, None]).sum()
        targets += ids.shape[1] - 1
        all_logits.append(z.detach())
        chosen = logp[:-1].gather(1, ids[0, 1:, None])[:, 0].detach()
        logprobs.append(torch.cat([torch.zeros(1), chosen]))
        entropy.append(torch.cat([torch.zeros(1), -(logp.exp() * logp).sum(-1)[:-1].detach()]))
    loss = loss / targets
    loss.backward()
    found["loss"] = loss.item()
    found["logprobs"], found["entropy"] = torch.cat(logprobs).numpy(), torch.cat(entropy).numpy()
    if logits:
        found["logits"] = torch.cat(all_logits).numpy()
    for name, parameter in model.named_parameters():
        if gradients:
            found[f"grad/{name}"] = parameter.grad.numpy()
        else:
            found[f"grad_norm/{name}"] = parameter.grad.norm().item()
    for index, ids in enumerate(sequences):
        prompt = torch.tensor(ids[: max(1, len(ids) // 2)])[None]
        with torch.no_grad():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens,
                temperature=None, top_p=None, top_k=None, pad_token_id=0,
            )  # fmt: skip
        found[f"greedy/{index}/prompt"] = prompt[0].numpy().astype(np.int32)
        found[f"greedy/{index}/completion"] = out[0, prompt.shape[1] :].numpy().astype(np.int32)
    return found


def make_model(name, config, dtype=torch.float32, old_style=False, max_shard_size=None, lengths=(1, 17, 30)):
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_((0.3 if parameter.ndim == 1 else 0.15) * torch.randn_like(parameter))
            parameter.copy_(parameter.to(dtype).float())
    folder = HERE / "models" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    raw = json.loads((folder / "config.json").read_text())
    raw["torch_dtype"] = raw.pop("dtype")
    if old_style:
        # As transformers 4 wrote it.
        rope = raw.pop("rope_parameters")
        raw["rope_theta"] = rope.pop("rope_theta")
        raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    # Read back, because .to(dtype) rounds the rotary frequencies as well.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rng = np.random.default_rng(7)
    sequences = [rng.integers(3, config.vocab_size, n).tolist() for n in lengths]
    np.savez_compressed(folder / "expected.npz", **expected_of(model, sequences))


CORPUS = """The quick brown fox jumps over the lazy dog. How many apples are left? There are 12 apples in 3 boxes, so
each box holds 12 / 3 = 4 apples. Let us think step by step: first we add, then we multiply. The answer is 42.
user assistant system tool name arguments weather city degrees. Natalia sold clips to 48 of her friends in April.
def add(a, b): return a + b  # naïve café, Größe, 你好世界, 🙂. It's what they've said; don't you'll we're I'm."""

CHATML = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson(indent=1) }}
        {%- endfor %}
    {%- endif %}
    {{- (message.content or '') | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thinking is defined and not thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n" }}
{%- if strftime_now is defined %}{{- strftime_now("%%") }}{% endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if loop.index > 6 %}{% break %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MARKED = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.reasoning_content | default('') }}{{ message.content }}<|im_end|>{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
"""
# What a template sees of a message.
RAW = "{% for message in messages %}{{ message | tojson }}{% endfor %}{{ tools }}{{ bos_token }}{{ eos_token }}"

USER = {"role": "user", "content": "How many apples are left? 你好 🙂"}
ASSISTANT = {"role": "assistant", "content": "  Let us think: 12 / 3 = 4.\n"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in <city> & more, e.g. Größe",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich <b>"}}}],
}
THOUGHT = {"role": "assistant", "content": "<think>\nIt's 4.\n</think>\n\nThe answer is 4."}
REASONED = {"role": "assistant", "content": "The answer is 4.", "reasoning_content": "12 / 3"}
SYSTEM = {"role": "system", "content": "You are a helpful assistant.", "tool_calls": None}
CHATS = [
    ([USER], dict(add_generation_prompt=True)),
    ([USER], {}),
    ([SYSTEM, USER, ASSISTANT, USER], dict(add_generation_prompt=True)),
    ([SYSTEM, USER, ASSISTANT, USER, ASSISTANT], {}),
    ([USER, THOUGHT, USER, THOUGHT], {}),
    ([USER, REASONED, USER, REASONED], {}),
    ([USER, {"role": "assistant", "content": "Yes.", "thinking": "hm"}], {}),
    ([USER], dict(add_generation_prompt=True, thinking=False)),
    ([USER], dict(add_generation_prompt=True, enable_thinking=False)),
]
TOOL_CHATS = [
    ([USER], dict(add_generation_prompt=True, tools=[TOOL])),
    ([SYSTEM, USER, CALL, {"role": "tool", "content": "21 degrees"}, ASSISTANT, USER], dict(tools=[TOOL])),
]


def chat_records(tokenizer, chats, **options):
    """What apply_chat_template gives for every chat; the mask too where the template marks it."""
    records = []
    for messages, arguments in chats:
        out = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options, **arguments)
        records.append({"messages": messages, "arguments": arguments, "ids": out["input_ids"]})
        if options.get("return_assistant_tokens_mask"):
            records[-1]["mask"] = out["assistant_masks"]
    return records


def make_tokenizer():
    folder = HERE / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    special = [
        "<pad>",
        "<|im_start|>",
        "<|im_end|>",
        "<|begin|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([CORPUS] * 4, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", special.index("<|begin|>"))]
    )
    backend.enable_truncation(8)
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|begin|>", "lstrip": False, "normalized": False,
                      "rstrip": False, "single_word": False, "special": True},
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": True,
        "chat_template": [
            {"name": "default", "template": CHATML},
            {"name": "tool_use", "template": "tools! " + CHATML},
        ],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["The quick brown fox", "  naïve café 你好 🙂\n\n", "a<|im_end|>b <pad>", "It 's , ok .", ""]
    golden = {
        "texts": [
            {
                "text": text,
                "ids": tokenizer.encode(text),
                "bare": tokenizer.encode(text, add_special_tokens=False),
                "decoded": tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True),
                "decoded_all": tokenizer.decode(tokenizer.encode(text)),
            }
            for text in texts
        ],
        "default": chat_records(tokenizer, CHATS + TOOL_CHATS),
    }
    plain = [chat for chat in CHATS if not chat[1]]
    for name, template, chats, options in (
        ("llama", LLAMA, CHATS, {}),
        ("raw", RAW, CHATS + TOOL_CHATS, {}),
        ("marked", MARKED, plain, {"return_assistant_tokens_mask": True}),
    ):
        tokenizer.chat_template = template
        golden[f"{name}_template"] = template
        golden[name] = chat_records(tokenizer, chats, **options)
    (folder / "chats.json").write_text(json.dumps(golden) + "\n")


TEXTS = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
    "One day, a big dog came to the house. The dog was",
    "Tom and his friends",
]


def make_samples(samples):
    """Expected values of the sample models that are too large for the repository."""
    folder = HERE / "samples"
    folder.mkdir(exist_ok=True)
    for name in ("stories15M", "smollm2"):
        source = samples / "models" / name
        if not source.exists():
            continue
        tokenizer = AutoTokenizer.from_pretrained(source)
        backend = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        sequences = [backend.encode(text).ids for text in TEXTS]
        found = expected_of(model, sequences, logits=False, gradients=False)
        np.savez_compressed(folder / f"{name}.npz", **found)
        if tokenizer.chat_template:
            write_chats(folder / f"{name}.json", tokenizer, [chat for chat in CHATS])
    source = samples / "models" / "qwen3-tokenizer"
    if source.exists():
        write_chats(folder / "qwen3-tokenizer.json", AutoTokenizer.from_pretrained(source), CHATS + TOOL_CHATS)


def write_chats(path, tokenizer, chats):
    path.write_text(json.dumps(chat_records(tokenizer, chats)) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for name, (config, options) in MODELS.items():
        make_model(name, config, **options)
    make_tokenizer()
    if arguments.samples:
        make_samples(arguments.samples)


if __name__ == "__main__":
    main()
