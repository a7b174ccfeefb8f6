"""Random requests to every route of the server: mostly right ones with a few mistakes, the same for the same seed."""

import json
import random
from typing import NamedTuple

DRAWING = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
POSTS = (*DRAWING, "/tokenize", "/detokenize")
GETS = ("/health", "/ping", "/version", "/metrics", "/v1/models", "/v1/models/{name:path}")
# Odd values that a key may have.
ODD = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**70, -(2**70), 0.0, 0.5, -0.5, 1e308, -1e-300, "", "a", "é",
    "\x00", "<think>", "</tool_call>", "\U0001f600", "user", "auto", "none", "required", "9" * 30, [], {}, [[]], [{}],
    [None], ["a"], [1, 2], [5, "a"], {"a": 1}, {"type": "text"}, {"type": "json_object"}, {"": {}}, "x" * 300,
)  # fmt: skip
TEXTS = ("a", "ab", "what is 3+4? ", "é", "a" * 240, "a" * 300, "<eos>", " ", "\n", "b9")
NUMBERS = (0, 0.5, 1, 2, 1.0, 0.01, 100, -1)
IDS = ([5, 6, 7], [5], [], [99], [-1], list(range(2, 30)), [5] * 300)
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, "a", None]}, "maxItems": 2},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}}},
    {"type": "string", "pattern": "(a|b)+$"}, {"pattern": "("}, {"$ref": "http://x/y"}, {"type": "no"}, True, {},
)  # fmt: skip
TOOLS = (
    [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS[0]}}],
    [{"type": "function", "function": {"name": "f"}}, {"function": {"name": "g", "parameters": {}}}],
    [{"type": "function"}], [{"function": {"name": ""}}], [],
)  # fmt: skip
MESSAGES = (
    {"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "assistant", "content": "<think>c"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "tool", "tool_call_id": "1"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, {"content": "a"}, {},
)  # fmt: skip
# Values of keys that are right, or nearly.
SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), NUMBERS),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), NUMBERS),
    **dict.fromkeys(("n", "best_of"), (1, 1, 1, 2, 2, 3, 9, 1024)),
    "top_k": (0, -1, 5, 1000), "seed": (0, 1, -5, 2**63),
    **dict.fromkeys(("stop", "bad_words"), ("b", ["a", "9"], [""], ["a"] * 70, ["<eos>"])),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), IDS), "min_tokens": (0, 1, 2, 9),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), (True, False)),
    "logit_bias": ({"5": 100}, {"5": -100, "6": 1}, {"99": 1}, {"a": 1}, {"5": 1000}, {}),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "top_logprobs"), (0, 1, 5, 20, 21, -1, True)),
    "structured_outputs": tuple({"json": schema} for schema in SCHEMAS) + (
        {"regex": "[a-c]{1,3}"}, {"regex": "("}, {"choice": ["a", "b9"]}, {"choice": []}, {"grammar": 'start: "a"'},
        {"grammar": "start: x"}, {"json": {}, "regex": "a"}, {},
    ),
}  # fmt: skip
ANSWERS = {
    "model": ("org/tiny", "", None, "none", "a"), "request_id": ("mine", "é", "x" * 300), "cache_salt": ("a", "", "é"),
    "stream": (True, False), "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}, {}),
    "priority": (0, -3), "user": ("me",), "metadata": ({"a": "b"},), "unknown": ([1],), "session_id": ("s",),
    "response_format": ({"type": "text"}, {"type": "json_object"}) + tuple(
        {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}} for schema in SCHEMAS
    ),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"), (True, False)),
    "max_tokens": (0, 1, 2, 3, 300), "truncate_prompt_tokens": (1, 4, -1, 0, 1000),
}  # fmt: skip
KEYS = {
    "/v1/completions": SAMPLING | ANSWERS | {
        "prompt": TEXTS + IDS + (["a", "b"], [[5], [6, 7]], ["a"] * 1025, [[99]], [[]]), "echo": (True, False),
        "suffix": ("", "a"), "use_beam_search": (True, False), "prompt_embeds": ("x",),
    },
    "/v1/chat/completions": SAMPLING | ANSWERS | {
        "messages": tuple([message] for message in MESSAGES) + (list(MESSAGES[:3]), [*MESSAGES[:1], *MESSAGES[5:7]]),
        "tools": TOOLS, "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "f"}},
                                        {"type": "function", "function": {"name": "none"}}, {"type": "function"}),
        **dict.fromkeys(("parallel_tool_calls", "include_reasoning", "continue_final_message"), (True, False)),
        **dict.fromkeys(("add_generation_prompt", "logprobs"), (True, False)), "max_completion_tokens": (1, 2, 300),
        "chat_template_kwargs": ({"enable_thinking": False}, {"messages": []}, {"a": {"b": "{{ 1 }}"}}, {"loop": 1}),
        "reasoning_effort": ("none", "high", ""), "modalities": (["text"], ["audio"]), "functions": ([], [{}]),
        "chat_template": ("{{ 1 }}", None),
    },
    "/inference/v1/generate": ANSWERS | {"token_ids": IDS, "sampling_params": ({}, {"max_tokens": 1})},
    "/tokenize": {
        "prompt": TEXTS, "messages": ([MESSAGES[0]], [MESSAGES[4]]), "tools": TOOLS,
        "add_special_tokens": (True, False),
        "return_token_strs": (True, False), "add_generation_prompt": (True, False), "model": ("org/tiny", "none"),
        "chat_template_kwargs": ({"enable_thinking": False}, {"tokenize": True}),
    },
    "/detokenize": {"tokens": IDS, "model": ("org/tiny", "none")},
}  # fmt: skip
GOOD = {
    "/v1/completions": {"prompt": "ab"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/inference/v1/generate": {"token_ids": [5, 6]}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]},
}  # fmt: skip
# Routes that an option of the server opens, in the same forms.
GATED_KEYS = {
    "/v1/load_lora_adapter": {
        "lora_name": ("a", "b", "org/tiny", "", "é"),
        "lora_path": ("qv_rslora/final", ".", "..", "/etc", "none", "\x00", "a" * 5000),
        "load_inplace": (True, False), "is_3d_lora_weight": (True, False),
    },
    "/v1/unload_lora_adapter": {"lora_name": ("a", "b", "none", ""), "lora_int_id": (1, "a")},
    "/abort_requests": {"request_ids": ([], ["mine"], ["a", "é"], [1])},
    "/start_weight_update": {"is_checkpoint_format": (True, "a")},
    "/update_weights": {
        "weight_dir": (None, "none", "~no user/x", "", "/", "\x00", "a" * 5000),
        "weight_version": (1, "a", -1, "\n", True, 2**70),
        "update_info": ({"weight_dir": None}, {}, {"weight_dir": 3}, []),
    },
    "/finish_weight_update": {"weight_version": (1, "a", True)},
    "/update_weight_version": {"new_version": (7, "b", "")},
}  # fmt: skip
# Routes whose values are in the query, each with some.
QUERIES = {
    "/pause": ("", "?mode=wait", "?mode=keep&clear_cache=false", "?mode=a", "?clear_cache=2"),
    "/sleep": ("", "?level=2", "?level=9&mode=keep"), "/resume": ("",), "/wake_up": ("", "?tags=weights"),
    "/reset_prefix_cache": ("",), "/init_weight_transfer_engine": ("",),
}  # fmt: skip
CONTROL_GETS = ("/is_paused", "/weight_info", "/is_sleeping", "/server_info", "/get_world_size")
GATED_GOOD = {
    "/abort_requests": {"request_ids": ["mine"]}, "/start_weight_update": {}, "/update_weights": {"weight_dir": None},
    "/finish_weight_update": {}, "/update_weight_version": {"new_version": 1}, **dict.fromkeys(QUERIES, {}),
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "all_linear/final"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}  # fmt: skip
OTHER_PATHS = ("/", "/v1", "/v1/completions/", "//v1/models", "/V1/models", "/docs", "/v1/%00", "/v1/models/%ff",
               "/v1/models/a/b?c=%zz", "/metrics?x=1", "/" + "a" * 4000)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "FOO")
HEADERS = (
    {"content-type": "text/plain"}, {"content-type": "application/json; charset=latin-1"}, {"content-type": ""},
    {"host": "evil.example"}, {"host": ""}, {"x-request-id": "a b"}, {"x-request-id": "mine"}, {"accept": "text/html"},
    {"authorization": "Bearer é"}, {"content-encoding": "gzip"}, {"expect": "100-continue"}, {"x-session-id": "s"},
    {"origin": "https://evil.example"}, {"x-data-parallel-rank": "a"}, {"cookie": "a=b"}, {"connection": "close"},
)  # fmt: skip


class FuzzRequest(NamedTuple):
    """A request. body: bytes, empty without one."""

    method: str
    path: str
    headers: dict
    body: bytes


class Fuzz:
    """Requests of a seed. opens_gated: to the routes that need an option of the server, too."""

    def __init__(self, seed, opens_gated=False):
        self.draw = random.Random(seed)
        self.keys, self.good = KEYS | GATED_KEYS, GOOD | (GATED_GOOD if opens_gated else {})
        self.gets = (*GETS, *CONTROL_GETS, "/server_info?config_format=json") if opens_gated else GETS

    def request(self):
        """The next FuzzRequest."""
        draw, headers = self.draw, {"content-type": "application/json"}
        if draw.random() < 0.1:
            headers |= draw.choice(HEADERS)
        kind = draw.random()
        if kind < 0.05:
            path = draw.choice((*OTHER_PATHS, *GETS, *self.good)).replace("{name:path}", "org/tiny")
            method = draw.choice(METHODS)
            return FuzzRequest(method, path, headers, self.bytes({}) if method == "POST" else b"")
        if kind < 0.1:
            return FuzzRequest(
                "GET", draw.choice(self.gets).replace("{name:path}", draw.choice(("org/tiny", "x"))), headers, b""
            )
        path = draw.choice(DRAWING if draw.random() < 0.6 else tuple(self.good))
        query = draw.choice(QUERIES.get(path, ("",)))
        return FuzzRequest("POST", path + query, headers, self.bytes(self.body(path)))

    def body(self, path):
        """The JSON of a body: dict."""
        draw, keys = self.draw, self.keys.get(path, {})
        body = dict(self.good[path])
        if path in DRAWING:
            body |= {"max_tokens": 2} if path != "/inference/v1/generate" else {"sampling_params": self.params()}
        for key in draw.sample(tuple(keys), min(draw.choice((0, 1, 1, 2, 3, 5)), len(keys))):
            body[key] = self.value(keys[key])
        if draw.random() < 0.1 and body:
            del body[draw.choice(tuple(body))]
        return body

    def params(self):
        """The sampling_params of the token-level route: dict."""
        names = self.draw.sample(tuple(SAMPLING), self.draw.choice((0, 0, 1, 2, 4)))
        return {"max_tokens": 2} | {name: self.value(SAMPLING[name]) for name in names}

    def value(self, usual):
        """One of the usual values of a key, one with a part replaced, or an odd one."""
        kind = self.draw.random()
        if kind < 0.6:
            return self.draw.choice(usual)
        return self.draw.choice(ODD) if kind < 0.8 else self.changed(self.draw.choice(usual))

    def changed(self, value):
        """A value with an odd one somewhere in it."""
        draw = self.draw
        if isinstance(value, dict) and value:
            key = draw.choice(tuple(value))
            return value | {key: self.changed(value[key])}
        if isinstance(value, list) and value:
            index = draw.randrange(len(value))
            return [*value[:index], self.changed(value[index]), *value[index + 1 :]]
        return draw.choice(ODD)

    def bytes(self, body):
        """A body as bytes, rarely not as JSON has them."""
        draw, data = self.draw, json.dumps(body, ensure_ascii=self.draw.random() < 0.8).encode("utf-8", "replace")
        kind = draw.random()
        if kind < 0.94:
            return data
        if kind < 0.96 and data:
            index = draw.randrange(len(data))
            return (
                data[:index] + draw.choice((b"", b"\xff", b"\x00", b'"', b"{", b"\\ud800", b"NaN")) + data[index + 1 :]
            )
        odd = (b"", b"[]", b"3", b'"a"', b"null", b"[" * 5000, b'{"n": 1e999}', b'{"a": NaN}', b"\xff\xfe", b'{"a":1}x')
        return draw.choice(odd)
