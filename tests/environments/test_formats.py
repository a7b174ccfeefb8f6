import json
import random

import pytest

from rlnumba.cli.serve import CALLS
from rlnumba.config.sections.agents import CALL_FORMATS
from rlnumba.environments.formats import (
    FORMATS,
    THINK_TAGS,
    Content,
    MalformedCall,
    Reasoning,
    ToolCall,
    TurnStream,
    detect_format,
    opens_think,
    think_tags_of,
)
from rlnumba.errors import UserError
from rlnumba.serve.service import TAGS
from tests.environments.golden import GOLDEN, tokenizer_with

TOOLS = [GOLDEN["tool"]]
HERMES, XML, LLAMA, GLM, FUNCTIONGEMMA, GEMMA = FORMATS.values()
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>\n</function>\n</tool_call>"
SEARCH = ToolCall("search", {"query": "a"})

# Where TRL's answer is another one, ours: it keeps the EOS and drops content, and it takes values that no one wrote.
OTHERS = {
    f"<think>\nOpen {CALL}": {"reasoning_content": f"Open {CALL}", "content": ""},
    f"Before.\n{CALL}\nAfter.": {"content": "Before.\nAfter.", "tool_calls": [{"query": "a"}]},
    "<tool_call>\n<function=search>\n<parameter=query>\n\n a \n\n</parameter>\n</function>\n</tool_call>": {
        "content": "",
        "tool_calls": [{"query": "\n a \n"}],
    },
    (unclosed := "<tool_call>\n<function=search>\n<parameter=query>\na\n</function>\n</tool_call>"): {
        "content": unclosed,
    },
}


def expected(record):
    """The message of a golden record, or that of OTHERS in its form."""
    if record["text"] not in OTHERS:
        return record["parsed"]
    other = dict(OTHERS[record["text"]])
    calls = other.pop("tool_calls", [])
    made = [{"type": "function", "function": {"name": "search", "arguments": each}} for each in calls]
    return {"role": "assistant", **other} | ({"tool_calls": made} if calls else {})


@pytest.mark.parametrize(("template", "format"), [("qwen3", HERMES), ("qwen3_5_think", XML)])
def test_turns_as_trl_parses_them(template, format):
    records = GOLDEN["parses"][template]
    for record in records:
        turn = format.parse(record["text"], TOOLS)
        message = turn.plain_message() if turn.malformed else turn.message()
        assert message == expected(record), record["text"]
    # OTHERS are exceptions, and each is one.
    assert [record for record in records if record["text"] in OTHERS and record["parsed"] == expected(record)] == []


def test_fifteen_turns_are_compared():
    texts = {record["text"] for records in GOLDEN["parses"].values() for record in records}
    assert len(texts - set(OTHERS)) >= 15 and set(OTHERS) <= texts


@pytest.mark.parametrize("format", [HERMES, XML, LLAMA, GLM], ids=lambda format: format.name)
def test_a_rendered_call_is_the_same_call(format):
    family = {"hermes": ("qwen2_5", "qwen3"), "qwen3_xml": ("qwen3_5", "qwen3_6", "qwen3_8", "nemotron")}
    family |= {"llama3_json": ("llama",), "glm": ("glm",)}
    not_hermes = family["qwen3_xml"]
    count = 0
    for record in GOLDEN["rendered"]:
        name = record["templates"][0]
        if not name.startswith(family[format.name]) or (format is HERMES and name.startswith(not_hermes)):
            continue
        count += 1
        message, turn = record["message"], format.parse(record["text"], TOOLS)
        written = [(each["function"]["name"], each["function"]["arguments"]) for each in message["tool_calls"]]
        assert [(call.name, call.arguments) for call in turn.calls] == written, record["text"]
        assert json.dumps([call.arguments for call in turn.calls]) == json.dumps([a for _, a in written])
        assert not turn.malformed and turn.content == message["content"]
        if "<think>" in record["text"] and "reasoning_content" in message:
            assert turn.reasoning == message["reasoning_content"]
    assert count >= 4


@pytest.mark.parametrize(
    ("text", "content", "blocks"),
    [
        # A tag in a string of the JSON, and a string without an end.
        (CALL.replace('"a"', '"</tool_call>"'), "", [ToolCall("search", {"query": "</tool_call>"})]),
        (CALL.replace('"a"', r'"\"</tool_call> {}"'), "", [ToolCall("search", {"query": '"</tool_call> {}'})]),
        (f'<tool_call>{{it"s}}</tool_call> " {CALL}', '"', ["not JSON", SEARCH]),
        (f'<tool_call>{{"name": "x</tool_call>\n{CALL}', "", ["not JSON", SEARCH]),
        (f'<tool_call>{{"name": "x\n</tool_call>{CALL}', "", ["not JSON", SEARCH]),
        # Values that no JSON has, and text that no UTF-8 has.
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "", ["NaN is not JSON"]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "", ["too large"]),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "", ["half of a character"]),
        (f'<tool_call>{{"name": "f", "arguments": {"[" * 100_000}</tool_call>', "", ["too deep"]),
        (f'<tool_call>{{"name": "f", "arguments": {"[" * 500}{"]" * 500}}}</tool_call>', "", ["too deep"]),
        (f'<tool_call>{{"name": "f", "arguments": {"1" * 5_000}}}</tool_call>', "", ["integer"]),
        ('<tool_call>{"name": "f"} and more</tool_call>', "", ["text after"]),
        # Many lists beside each other are not deep.
        ('<tool_call>{"name": "f", "arguments": ' + str([[]] * 99) + "}</tool_call>", "", [ToolCall("f", [[]] * 99)]),
        # No name, no object; arguments of another type fail when the call is executed.
        ('<tool_call>{"name": 3}</tool_call>', "", ["no name"]),
        ("<tool_call></tool_call>", "", ["not JSON"]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "", [ToolCall("f", [1])]),
        # Without its end; good ones before it count.
        (f"A {CALL} B <tool_call>{{", "A\nB", [SEARCH, "no </tool_call>"]),
    ],
)  # fmt: skip
def test_blocks_of_json(text, content, blocks):
    turn = HERMES.parse(text, TOOLS, keep_malformed=False)
    assert turn.content == content and len(turn.blocks) == len(blocks)
    for block, wanted in zip(turn.blocks, blocks, strict=True):
        assert block == wanted if isinstance(wanted, ToolCall) else wanted in block.problem
    kept = HERMES.parse(text, TOOLS)
    assert kept.blocks == turn.blocks and all(each in kept.content for each in kept.malformed)


def xml(*parameters):
    """A block of tags with (name, what is between the tags)."""
    inside = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in parameters)
    return f"<tool_call>\n<function=search>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        (xml(("query", "\n3\n"), ("limit", "\n3\n")), {"query": "3", "limit": 3}),
        (xml(("query", "\n\n\n")), {"query": "\n"}),
        (xml(("query", "\n\n")), {"query": ""}),
        (xml(("query", "a")), {"query": "a"}),
        (xml(("query", '\n"a"\n'), ("unknown", '\n"a"\n')), {"query": '"a"', "unknown": "a"}),
        (xml(("query", "\na</parameter>b</function>c\n")), {"query": "a</parameter>b</function>c"}),
        (xml(("limit", "\nmany\n"), ("exact", "\nTrue\n")), {"limit": "many", "exact": True}),
        (xml(("after", "\nnull\n"), ("unknown", "\n[1, 2]\n")), {"after": None, "unknown": [1, 2]}),
        (xml(("unknown", "\nTrue\n"), ("ratio", "\nNaN\n")), {"unknown": "True", "ratio": "NaN"}),
        (xml(("query", "\na\n"), ("query", "\nb\n")), "twice"),
        (xml(("query", "\na\n<parameter=limit>\n3\n")), "without </parameter>"),
        (xml().replace("</function>\n", ""), "no </function>"),
        ("<tool_call>\nsearch\n</tool_call>", "no <function"),
        (CALL, "no <function"),
    ],
)
def test_blocks_of_tags(block, arguments):
    turn = XML.parse(f"A\n\n{block}\nB", TOOLS, keep_malformed=False)
    assert turn.content == "A\nB" and len(turn.blocks) == 1
    if isinstance(arguments, dict):
        assert turn.calls == [ToolCall("search", arguments)]
    else:
        assert arguments in turn.blocks[0].problem


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ({"type": ["integer", "string"]}, "7", 7),
        ({"type": ["integer", "string"]}, "seven", "seven"),
        ({"type": ["integer", "string"]}, "[7]", "[7]"),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[7]", [7]),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[7]", [7]),
        ({"oneOf": [{"type": "string"}]}, "7", "7"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "number", "nullable": True}, "None", None),
        ({"type": "string"}, "null", "null"),
        ({"type": {"odd": 1}}, "7", 7),
        ("odd", "7", 7),
    ],
)
def test_values_have_the_types_of_the_schema(kind, text, value):
    tool = {"type": "function", "function": {"name": "search", "parameters": {"properties": {"x": kind}}}}
    calls = XML.parse(xml(("x", f"\n{text}\n")), [tool]).calls
    assert calls == [ToolCall("search", {"x": value})] and type(calls[0].arguments["x"]) is type(value)


@pytest.mark.parametrize("schema", [{}, {"function": {}}, {"name": "search", "parameters": None},
                                    {"name": "search", "parameters": {"properties": []}}])  # fmt: skip
def test_schemas_of_any_form_are_read(schema):
    assert XML.parse(xml(("query", "\n7\n")), [schema]).calls == [ToolCall("search", {"query": 7})]


LLAMA_CALL = '{"name": "search", "parameters": {"query": "a"}}'


@pytest.mark.parametrize(
    ("text", "content", "calls", "malformed"),
    [
        (LLAMA_CALL, "", [SEARCH], 0),
        (f"<|python_tag|>{LLAMA_CALL}", "", [SEARCH], 0),
        (f"{LLAMA_CALL}; {LLAMA_CALL}", "", [SEARCH, SEARCH], 0),
        (f"Let me look.\n\n{LLAMA_CALL}", "Let me look.", [SEARCH], 0),
        (LLAMA_CALL.replace("parameters", "arguments"), "", [SEARCH], 0),
        ('{"name": "f", "parameters": null}', "", [ToolCall("f", {})], 0),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', [], 0),
        ('{"answer": 4}', '{"answer": 4}', [], 0),
        ("The set {", "The set {", [], 0),
        ('{"name"', '{"name"', [], 0),
        ('{"name": "f", "parameters": {"a": 1', '{"name": "f", "parameters": {"a": 1', [], 1),
        (f"Like `{LLAMA_CALL}`", f"Like `{LLAMA_CALL}`", [], 0),
    ],
)
def test_llama_turns(text, content, calls, malformed):
    turn = LLAMA.parse(text, TOOLS)
    assert (turn.content, turn.calls, len(turn.malformed)) == (content, calls, malformed)


def test_glm_blocks():
    good = "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</arg_value>\n</tool_call>"
    assert GLM.parse(good, TOOLS).calls == [SEARCH]
    assert GLM.parse("<tool_call>search\n</tool_call>", TOOLS).calls == [ToolCall("search", {})]
    for bad in (good.replace("</arg_value>", ""), good.replace("search\n", ""), good.replace("</arg_key>", "")):
        assert len(GLM.parse(bad, TOOLS).malformed) == 1
    key, end = good.index("<arg_key>"), good.index("</tool_call>")
    twice = GLM.parse(good[:end] + good[key:], TOOLS)
    assert not twice.calls and twice.blocks[0].problem == "the argument query is there twice"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('query:<|"|>a, }]{<|"|>', {"query": "a, }]{"}),
        ('limit:3,query:<|"|>a\nb<|"|>', {"limit": 3, "query": "a\nb"}),
        ('limit:<|"|>3<|"|>,query:<|"|>3<|"|>', {"limit": 3, "query": "3"}),
        (
            ' a:[1, <|"|>x<|"|>, [], {}], b:{c:null, <|"|>d<|"|>:-2.5e3}',
            {"a": [1, "x", [], {}], "b": {"c": None, "d": -2500.0}},
        ),
        ("a:true,b:word of it", {"a": True, "b": "word of it"}),
        ("", {}),
        ("query", None),
        ("query:", None),
        ('query:<|"|>a', None),
        ('query:<|"|>a<|"|>,query:<|"|>a<|"|>', None),
        ("a:[1", None),
        ("a:1}b", None),
        ("a:" + "[" * 5000, None),
    ],
)
def test_gemma_calls(arguments, expected):
    properties = {"query": {"type": "string"}, "limit": {"type": "integer"}}
    tools = [{"function": {"name": "search", "parameters": {"type": "object", "properties": properties}}}]
    for format in (GEMMA, FUNCTIONGEMMA):
        text = arguments.replace(GEMMA.quote, format.quote)
        text = f"so {format.OPEN}call:search{{{text}}}{format.CLOSE}"
        turn = format.parse(text, tools)
        if expected is None:
            assert len(turn.malformed) == 1 and not turn.calls and turn.content == text
        else:
            assert turn.calls == [ToolCall("search", expected)] and turn.content == "so"
    assert GEMMA.parse("<|tool_call>search{}<tool_call|>", TOOLS).blocks[0].problem == "no call:NAME{"
    assert GEMMA.parse("<|tool_call>call:search{}", TOOLS).blocks[0].problem == "no <tool_call|>"


# Templates in the way of Gemma 4's and FunctionGemma's: the results follow a call in the turn of the model, or are
# those of a user.
GEMMA_TEMPLATE = """{{ tools | tojson }}
{%- for m in messages -%}
{%- if m.role != 'tool' -%}<|turn>{{ m.role }}
{% if not m.tool_calls %}{{ m.content }}<turn|>
{% endif -%}{% endif -%}
{%- for c in m.tool_calls -%}<|tool_call>call:{{ c.function.name }}{
{%- for k, v in c.function.arguments.items() -%}{{ k }}:<|"|>{{ v }}<|"|>{{ '' if loop.last else ',' }}{%- endfor -%}
}<tool_call|>{%- endfor -%}
{%- if m.tool_calls and loop.last -%}<|tool_response>{%- endif -%}
{%- if m.role == 'tool' -%}
<|tool_response>response:{{ m.name }}{value:<|"|>{{ m.content }}<|"|>}<tool_response|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}<|turn>model
{% endif -%}"""


@pytest.mark.parametrize(
    ("text", "starts_in_think", "reasoning", "content", "calls"),
    [
        (f"Why {CALL}\n</think>\n\nSo.\n{CALL}", True, f"Why {CALL}", "So.", 1),
        (f"<think>\nWhy\n</think>\n\n{CALL}", True, "Why", "", 1),
        (f"Why {CALL}", True, f"Why {CALL}", "", 0),
        ("\n</think>\n\nSo.", True, None, "So.", 0),
        (f"So. <think>Why {CALL}</think> Then {CALL}", False, f"Why {CALL}", "So.\nThen", 1),
        ("<think>a</think>b<think>c</think>d", False, "a\nc", "b\nd", 0),
        ("An end </think> alone", False, None, "An end </think> alone", 0),
        ("\n Text. \n", False, None, "\n Text. \n", 0),
        ("", False, None, "", 0),
        ("", True, None, "", 0),
    ],
)
def test_reasoning(text, starts_in_think, reasoning, content, calls):
    turn = HERMES.parse(text, TOOLS, starts_in_think)
    assert (turn.reasoning, turn.content, len(turn.calls)) == (reasoning, content, calls)
    # Without the split it stays in the content, and what is in it is no call all the same.
    stream = HERMES.stream(TOOLS, starts_in_think, split_reasoning=False)
    events = stream.feed(text) + stream.finish()
    assert len([event for event in events if isinstance(event, ToolCall)]) == calls
    assert not any(isinstance(event, Reasoning) for event in events)
    if not calls:
        assert "".join(event.text for event in events) == text


GEMMA_CALL = "<|tool_call>call:search{q:1}<tool_call|>"
THOUGHT = "<|channel>thought\n"


@pytest.mark.parametrize(
    ("text", "starts_in_think", "reasoning", "content", "calls"),
    [
        (f"{THOUGHT}Why\nnot {GEMMA_CALL}\n<channel|>So.\n{GEMMA_CALL}", False, f"Why\nnot {GEMMA_CALL}", "So.", 1),
        # The template writes an empty channel where a model is not to think, some models write it themselves.
        (f"{THOUGHT}<channel|>So.", False, None, "So.", 0),
        (f"Why<channel|>{GEMMA_CALL}", True, "Why", "", 1),
        (f"{THOUGHT}Why", True, "Why", "", 0),
        (f"{THOUGHT}Why", False, "Why", "", 0),
        # Neither another channel nor another model's tags are its reasoning.
        ("<|channel>thoughtful\nA<channel|>", False, None, "<|channel>thoughtful\nA<channel|>", 0),
        ("<think>a</think>", False, None, "<think>a</think>", 0),
    ],
)
def test_reasoning_of_gemma_4(text, starts_in_think, reasoning, content, calls):
    turn = GEMMA.parse(text, TOOLS, starts_in_think, think=THINK_TAGS["gemma4"])
    assert (turn.reasoning, turn.content, len(turn.calls)) == (reasoning, content, calls)
    for size in (1, 2, 7):
        stream = GEMMA.stream(TOOLS, starts_in_think, think=THINK_TAGS["gemma4"])
        events = [event for at in range(0, len(text), size) for event in stream.feed(text[at : at + size])]
        events += stream.finish()
        assert "".join(event.text for event in events if isinstance(event, Reasoning)) == (reasoning or "")
        assert "".join(event.text for event in events if isinstance(event, Content)) == content


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen3", "qwen3"),
        ("{{ '<|turn>model\\n<|channel>thought\\n<channel|>' }}", "gemma4"),
        # GPT-OSS, and templates without any.
        ("{{ '<|channel|>analysis<|message|>' }}", None),
        ("llama3", None),
    ],
)
def test_the_tags_of_a_template(template, name):
    assert think_tags_of(tokenizer_with(template).chat_template) == THINK_TAGS.get(name)
    assert think_tags_of(None) is None


def test_prompts_that_open_a_channel():
    tags = THINK_TAGS["gemma4"]
    assert opens_think("<|turn>model\n<|channel>thought\n", tags)
    assert not opens_think("<|turn>model\n<|channel>thought\n<channel|>", tags)
    assert not opens_think("<|turn>model\n<think>\n", tags)


def test_prompts_that_open_a_think():
    assert opens_think("<|im_start|>assistant\n<think>\n") and not opens_think("<think>\n\n</think>\n\n")
    assert not opens_think("")


def merged(events):
    """Events with neighbouring pieces of one kind joined."""
    found = []
    for event in events:
        if found and isinstance(event, Content | Reasoning) and type(event) is type(found[-1]):
            found[-1] = type(event)(found[-1].text + event.text)
        else:
            found.append(event)
    return found


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "\n", "  ", "text", "{", '"', "; ", CALL, XML_CALL,
          LLAMA_CALL, "<|python_tag|>", '{"name": "Ada"}', "<tool_call>{}</tool_call>", "<function=search>", "</th",
          "é", "\n\n", "<parameter=a>\nb", '{"name"', "<tool", "}", '<tool_call>{"name": "f</tool_call>']  # fmt: skip


@pytest.mark.parametrize("name", [*FORMATS, None])
def test_a_stream_has_the_events_of_the_whole_text(name):
    draw = random.Random(0)
    for _ in range(400):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 8)))
        options = {option: draw.random() < 0.5 for option in ("starts_in_think", "keep_malformed", "split_reasoning")}

        def stream(options=options):
            parameters = {"search": TOOLS[0]["function"]["parameters"]["properties"]}
            return TurnStream(FORMATS.get(name), parameters, **options)

        whole, pieces, events, at = stream(), stream(), [], 0
        while at < len(text):
            step = draw.choice([1, 1, 2, 5, 30])
            events += pieces.feed(text[at : at + step])
            at += step
            if draw.random() < 0.2:  # nothing that is certain is held back
                assert merged(events) == merged(stream().feed(text[:at])), (text[:at], options)
        assert merged(events + pieces.finish()) == merged(whole.feed(text) + whole.finish()), (text, options)


CODE = "if a < b: x = {'a': 1}; "
LONG_TURNS = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"code": "%s"}}\n</tool_call>', 1),
    ("qwen3_xml", "<tool_call>\n<function=f>\n<parameter=code>\n%s\n</parameter>\n</function>\n</tool_call>", 1),
    ("glm", "<tool_call>f\n<arg_key>code</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>", 1),
    ("llama3_json", '{"name": "f", "parameters": {"code": "%s"}}', 1),
    ("llama3_json", '{"name": "f", "parameters": {"code": [%s]}}', None),
    ("llama3_json", '{%s"name": "f", "parameters": {}}', None),
    ("hermes", "a%sb", 0),
]


@pytest.mark.parametrize("filling", [CODE, "</tool_call>", r"\"{}\\", '{"a": 1}, ', "\n"], ids=ascii)
@pytest.mark.parametrize(("name", "form", "num_calls"), LONG_TURNS)
def test_a_stream_reads_each_character_a_few_times(monkeypatch, name, form, num_calls, filling):
    """However long a block is, and however small its pieces."""
    format, read = type(FORMATS[name])(), 0

    def counted(function, size):
        def call(*arguments):
            nonlocal read
            read += size(*arguments)
            return function(*arguments)

        return call

    def counted_finder(text, start):
        finder = end_finder(text, start)
        if finder is not None:
            finder.feed = counted(finder.feed, len)
        return finder

    end_finder = format.end_finder
    monkeypatch.setattr(format, "find", counted(format.find, lambda text, start, before: len(text) - start))
    monkeypatch.setattr(format, "block", counted(format.block, lambda text, start, *_: len(text) - start))
    monkeypatch.setattr(format, "end_finder", counted_finder)
    text = form.replace("%s", filling * (6_000 // len(filling)))
    stream, events = format.stream(None), []
    for at in range(0, len(text), 3):
        events += stream.feed(text[at : at + 3])
    events += stream.finish()
    calls = [event for event in events if isinstance(event, ToolCall)]
    if filling == CODE and num_calls is not None:
        assert len(calls) == num_calls
    assert read < 16 * len(text)


def test_a_stream_gives_text_as_soon_as_it_is_certain():
    stream = HERMES.stream(TOOLS)
    assert stream.feed("Let me ") == [Content("Let me")]
    assert stream.feed("look <to") == [Content(" look")]
    assert stream.feed("p>.") == [Content(" <top>.")]
    assert stream.feed(f"\n{CALL[:-1]}") == []
    assert stream.feed(CALL[-1:]) == [SEARCH]
    assert stream.feed("\n<tool_call>{}</tool_call>!") == [
        Content("\n<tool_call>{}</tool_call>"),
        MalformedCall("<tool_call>{}</tool_call>", "no name"),
        Content("!"),
    ]
    # A string that has a line end in it is none, so the block ends.
    assert stream.feed('<tool_call>{"a\n</tool_call>')[:1] == [Content('<tool_call>{"a\n</tool_call>')]
    assert stream.finish() == []


@pytest.mark.parametrize(
    ("template", "name"),
    [
        *((name, "hermes") for name in ("qwen2_5", "qwen3", "qwen3_instruct_2507")),
        *((name, "qwen3_xml") for name in ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "nemotron_3_nano")),
        ("llama3_1", "llama3_json"),
        ("glm4moe", "glm"),
        (GEMMA_TEMPLATE, "gemma4"),
        (
            GEMMA_TEMPLATE.replace("<|tool_call>", "<start_function_call>")
            .replace("<tool_call|>", "<end_function_call>")
            .replace('<|"|>', "<escape>"),
            "functiongemma",
        ),
    ],
)
def test_the_format_is_what_the_template_renders(template, name):
    tokenizer = tokenizer_with(template)
    assert detect_format(tokenizer, TOOLS).name == name
    assert detect_format(tokenizer, parser="hermes").name == "hermes"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("phi3", "drops the tools' schemas and the name of a call and the arguments of a call and the result"),
        ("llama3_training", "drops the tools' schemas and the name of a call and the arguments of a call, which"),
        ("gemma3", "roles must alternate.*rendering a tool call"),
        ("lfm2_v2", "format that is none of hermes, qwen3_xml, llama3_json, glm"),
        ("{{ tools }}{{ messages }}".replace("{{ tools }}", ""), "drops the tools' schemas, which"),
    ],
)
def test_a_template_that_drops_what_tools_need(template, words):
    with pytest.raises(UserError, match=words):
        detect_format(tokenizer_with(template), TOOLS)


def test_an_unknown_parser():
    with pytest.raises(UserError, match="tools.parser must be auto or one of hermes, .*'xml'"):
        detect_format(tokenizer_with("qwen3"), parser="xml")


def test_one_list_of_formats_is_everyones():
    assert tuple(FORMATS) == CALL_FORMATS and tuple(CALLS.choices) == ("auto", *CALL_FORMATS, "none")
    assert all(format.tags and set(format.tags) <= set(TAGS) for format in FORMATS.values())
