"""Forced tool calls: what the grammar of a format lets a model draw is read as calls, with arguments of the schema."""

from pathlib import Path

import pytest

from rlnumba.engine import LLM, SamplingParams
from rlnumba.environments.formats import FORMATS
from rlnumba.environments.formats.lark import calls_grammar
from rlnumba.model.tokenizer import Tokenizer
from tests.engine.test_llm import make_model

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

FOLDER = Path(__file__).parent.parent / "golden" / "tokenizer"
COLOR = {"type": "string", "enum": ["red", "dark </blue>"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "$defs": {"color": COLOR, "point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
                "type": "object",
                "properties": {
                    "color": COLOR,
                    "at": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}], "title": "Where"},
                    "deep": {"type": "object", "properties": {"c": {"$ref": "#/$defs/color"}}, "required": ["c"]},
                    "note": {"type": "string", "maxLength": 4},
                    "bold": {"type": "boolean"},
                },
                "required": ["color", "at"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stöp", "description": "Takes nothing."}},
]


@pytest.fixture(scope="module")
def llms():
    """With <tool_call> as text, and as an added token."""
    plain, special = Tokenizer(FOLDER), Tokenizer(FOLDER)
    special.backend.add_tokens(TAGS)
    model = make_model(vocab_size=500, eos_token_id=[2, 6], max_position_embeddings=400)
    return [LLM(model, plain), LLM(model, special)]


RENDERED = {
    "hermes": (
        '<tool_call>\n{"name": "paint", "arguments": {"color": "red", "at": [1, 2], "note": "é"}}\n</tool_call>',
        '<tool_call>\n{"name": "stöp", "arguments": {}}\n</tool_call>',
        "\n",
    ),
    "qwen3_xml": (
        "<tool_call>\n<function=paint>\n<parameter=color>\nred\n</parameter>\n<parameter=at>\n[1, 2]\n</parameter>\n"
        "<parameter=note>\né\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=stöp>\n</function>\n</tool_call>",
        "\n",
    ),
    "llama3_json": (
        '{"name": "paint", "parameters": {"color": "red", "at": [1, 2], "note": "é"}}',
        '{"name": "stöp", "parameters": {}}',
        "; ",
    ),
    "glm": (
        "<tool_call>paint\n<arg_key>color</arg_key>\n<arg_value>red</arg_value>\n<arg_key>at</arg_key>\n"
        "<arg_value>[1, 2]</arg_value>\n<arg_key>note</arg_key>\n<arg_value>é</arg_value>\n</tool_call>",
        "<tool_call>stöp\n</tool_call>",
        "\n",
    ),
    "functiongemma": (
        "<start_function_call>call:paint{at:[1,2],color:<escape>red<escape>,note:<escape>é<escape>}<end_function_call>",
        "<start_function_call>call:stöp{}<end_function_call>",
        "",
    ),
    "gemma4": (
        '<|tool_call>call:paint{at:[1,2],color:<|"|>red<|"|>,note:<|"|>é<|"|>}<tool_call|>',
        "<|tool_call>call:stöp{}<tool_call|>",
        "",
    ),
}
TAGS = ["<tool_call>", "</tool_call>", "</arg_value>", "</parameter>"]
TAGS += ["<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>"]


def grammar_of(llm, name, is_single=False):
    added = {t.content: i for i, t in llm.tokenizer.backend.get_added_tokens_decoder().items()}
    return SamplingParams(structured_outputs={"grammar": calls_grammar(FORMATS[name], TOOLS, added, is_single)})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_special", [False, True])
def test_calls_as_templates_write_them_are_of_the_grammar(llms, name, is_special):
    llm, (first, second, between) = llms[is_special], RENDERED[name]
    one, two = (llm.tokenizer.encode(text, add_special_tokens=False) for text in (first, first + between + second))
    turn = FORMATS[name].parse(first + between + second, TOOLS)
    assert [call.arguments for call in turn.calls] == [{"color": "red", "at": [1, 2], "note": "é"}, {}]
    for is_single, most in ((False, len(two)), (True, len(one))):
        matcher = llm.engine.grammars.state(grammar_of(llm, name, is_single)).matcher
        assert not matcher.is_accepting() and matcher.validate_tokens(two) == most
        assert matcher.consume_tokens(one) and matcher.is_accepting()
    for wrong in (first.replace("red", "blue"), first.replace("paint", "none"), first[:-1], "a" + first):
        ids = llm.tokenizer.encode(wrong, add_special_tokens=False)
        matcher = llm.engine.grammars.state(grammar_of(llm, name)).matcher
        assert not (matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_special", [False, True])
def test_drawn_calls_are_read(llms, name, is_special):
    llm, format = llms[is_special], FORMATS[name]
    grammar = grammar_of(llm, name).structured_outputs
    params = SamplingParams(structured_outputs=grammar, max_tokens=150, n=6, seed=1, skip_special_tokens=False)
    (output,) = llm.generate([[5, 6, 7]], params)
    tag, ended = llm.tokenizer.backend.token_to_id(getattr(format, "OPEN", "<tool_call>")), 0
    for completion in output.completions:
        if completion.finish_reason == "stop":
            turn = format.parse(completion.text, TOOLS)
            assert turn.calls and not turn.content and not turn.malformed
            for call in turn.calls:
                tool = TOOLS[["paint", "stöp"].index(call.name)]["function"]
                jsonschema.validate(call.arguments, tool.get("parameters", {"maxProperties": 0}))
            assert name == "llama3_json" or not is_special or completion.token_ids.count(tag) == len(turn.calls)
            ended += 1
    assert ended >= 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_list_that_must_be_empty_is(llms, name):
    schema = {"type": "object", "properties": {"of": {"type": "array", "maxItems": 0}}, "required": ["of"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = {"grammar": calls_grammar(FORMATS[name], tools, {}, True)}
    params = SamplingParams(structured_outputs=grammar, max_tokens=150, n=6, seed=1, skip_special_tokens=False)
    (output,) = llms[0].generate([[5, 6, 7]], params)
    ended = [each.text for each in output.completions if each.finish_reason == "stop"]
    for text in ended:
        turn = FORMATS[name].parse(text, tools)
        assert [call.arguments for call in turn.calls] == [{"of": []}] and not turn.malformed, text
    assert ended
