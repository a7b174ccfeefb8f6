"""The rules of the grammar of calls, as text."""

import json

import pytest

from rlnumba.environments.formats.lark import JSON_OPTIONS, CallGrammar, arguments_schema, quoted, tagged_arguments

ADDED = {"<end>": 5, "<end><end>": 6}


def test_texts_and_tokens():
    grammar = CallGrammar(ADDED)
    # The longest token first; quotes and line breaks as Lark has them.
    assert grammar.literal('a"\n<end><end>b<end>') == r'"a\"\n" <[6]> "b" <[5]>'
    assert grammar.literal("é") == '"é"' and CallGrammar({}).literal("<end>") == '"<end>"' == quoted("<end>")


@pytest.mark.parametrize(
    "added, end, expression, rules",
    [
        # A text: the shortest that ends so.
        ({}, "</a>", "rule_3", ['END_1: TEXT_1? "</a>"', "rule_3[lazy]: END_1"]),
        (ADDED, "</a>", "rule_3", ['END_1: TEXT_1? "</a>"', "rule_3[lazy]: END_1"]),
        # A token: the text has certainly ended there, with what is before the token.
        (ADDED, "\n<end>", "END_1 <[5]>", ['END_1: TEXT_1? "\\n"']),
        (ADDED, "<end>\n", 'TEXT_1? <[5]> "\\n"', ['END_1: TEXT_1? ""']),
        (ADDED, "a<end>b", 'END_1 <[5]> "b"', ['END_1: TEXT_1? "a"']),
    ],
)
def test_texts_up_to_an_end(added, end, expression, rules):
    grammar = CallGrammar(added)
    grammar.rules.append("something else")
    assert grammar.until(end, ["</a>", "b|c"]) == expression
    text = r"TEXT_1: /(?s:.+)/ & ~/(?s:.*)(<\/a>|b\|c)(?s:.*)/"
    assert grammar.rules == ["something else", text, *rules]


def test_values_of_schemas():
    options = {"x-guidance": JSON_OPTIONS}

    def rules_of(schema, root=None):
        grammar = CallGrammar({})
        return grammar.value(schema, root or {}, "<", [">"]), grammar.rules

    assert rules_of({"type": "string", "enum": ["a", "b"]}) == ('rule_0 "<"', ['rule_0: "a" | "b"'])
    # A string that is no choice is a text up to the end, also where it may be something else or anything.
    for schema in ({"type": "string"}, {}, {"type": ["string", "null"]}, {"type": "string", "enum": ["a", 1]}):
        assert rules_of(schema)[0] == "rule_2"
    expression, (rule,) = rules_of({"type": "integer"}, {"$defs": {"x": {}}, "other": 1})
    assert expression == 'rule_0 "<"'
    assert json.loads(rule.removeprefix("rule_0: %json ")) == {"$defs": {"x": {}}, "type": "integer", **options}
    assert json.loads(rules_of({"enum": [1, 2]})[1][0].removeprefix("rule_0: %json ")) == {"enum": [1, 2], **options}
    grammar = CallGrammar({})
    assert grammar.json(True) == "rule_0" and json.loads(grammar.rules[0].removeprefix("rule_0: %json ")) == options


def test_sources():
    grammar = CallGrammar(ADDED)
    assert grammar.source(["a", "b"], "<end>", False) == "start: call (<[5]> call)*\ncall: (a) | (b)\n"
    grammar = CallGrammar(ADDED)
    grammar.rules.append("x: y")
    assert grammar.source(["a"], "<end>", True) == "start: call\nx: y\ncall: (a)\n"


def test_arguments():
    assert arguments_schema({}) == {"type": "object", "additionalProperties": False}
    assert arguments_schema({"parameters": {"properties": {}}}) == {"properties": {}, "type": "object"}
    assert arguments_schema({"parameters": {"anyOf": []}}) == {"anyOf": []}
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]}
    found = tagged_arguments(CallGrammar({}), schema, "<", "=", ">", [])
    assert found == '("<" "a" "=" rule_0 ">")? ("<" "b" "=" rule_1 ">")'
    assert tagged_arguments(CallGrammar({}), {"properties": {"a": {"type": "integer"}}}, "<", "=", ">", []).endswith(
        "?"
    )
    assert tagged_arguments(CallGrammar({}), {}, "<", "=", ">", []) == ""
