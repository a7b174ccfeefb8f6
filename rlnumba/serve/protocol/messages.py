"""Messages of a request as chat templates take them."""

import functools
import json

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlnumba.errors import shown
from rlnumba.serve.protocol.bodies import MOST_ITEMS, Body
from rlnumba.serve.protocol.errors import ApiError

# Parts of a content that are text, each with the key that has it.
TEXT_PARTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
# Keys of a message that templates read; others are left out.
KEYS = ("role", "content", "name", "tool_call_id", "reasoning", "reasoning_content", "thinking")


def read_messages(body, template):
    """The messages of a body. template: the chat template's text, which decides what becomes of lists of parts, and of
    the role developer. Raises ApiError naming the message."""
    messages = body.list("messages", most=4 * MOST_ITEMS)
    if not messages:
        body.refuse("messages", "a list of at least one message")
    keeps_parts = loops_over_content(template)
    found = [read_message(message, f"messages[{i}]", keeps_parts) for i, message in enumerate(messages)]
    for message in found:
        if message["role"] == "developer" and "developer" not in template:
            message["role"] = "system"
    return found


def read_message(message, name, keeps_parts):
    """A message with the keys that templates read."""
    if not isinstance(message, dict):
        raise ApiError(f"{name} must be an object with role and content, got {shown(message)}", name)
    message = Body(message, name)
    if not message.string("role"):
        message.refuse("role", "a string, such as user")
    found = {key: message.string(key) for key in KEYS if key != "content" and message.has(key)}
    found["content"] = read_content(message, keeps_parts)
    calls = message.list("tool_calls")
    if calls:
        found["tool_calls"] = [read_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return found


def read_content(message, keeps_parts):
    """The content as a text, "" where there is none; as a list of text parts if the template loops over it."""
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message.refuse("content", "a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        name = f"{message.name('content')}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise ApiError(f"{name}: parts must be text, got {shown(kind if kind is not None else part)}", name)
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            name = f"{name}.{TEXT_PARTS[kind]}"
            raise ApiError(f"{name} must be a string, got {shown(text)}", name)
        texts.append(text)
    return [{"type": "text", "text": text} for text in texts] if keeps_parts else "\n".join(texts)


def read_call(call, name):
    """A call of an earlier turn, with its arguments as an object."""
    function = Body(call, name).object("function") if isinstance(call, dict) else None
    if function is None or not function.string("name"):
        raise ApiError(f"{name} must be an object with a function, which has a name and arguments", name)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            function.refuse("arguments", "the JSON of an object")
    if not isinstance(arguments, dict):
        function.refuse("arguments", "the JSON of an object")
    found = {"type": "function", "function": {"name": function.get("name"), "arguments": arguments}}
    return found | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


@functools.cache
def loops_over_content(template):
    """Whether a chat template takes the content of a message apart itself, in a loop over its parts."""
    try:
        tree = ImmutableSandboxedEnvironment(
            extensions=["jinja2.ext.loopcontrols", "rlnumba.model.tokenizer.GenerationBlocks"]
        ).parse(template)
    except jinja2.TemplateError:
        return False
    names = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node)
    }
    loops = [loop.iter for loop in tree.find_all(nodes.For)]
    return any(_is_content(each) or (isinstance(each, nodes.Name) and each.name in names) for each in loops)


def _is_content(node):
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def read_tools(body):
    """The schemas of a body's tools, as templates take them; None without any. Raises ApiError naming the tool."""
    tools = body.list("tools")
    if tools is None:
        return None
    if not tools:
        raise ApiError("tools is empty; leave it out", "tools")
    for index, tool in enumerate(tools):
        name = f"tools[{index}]"
        function = Body(tool, name).object("function") if isinstance(tool, dict) else None
        if function is None or tool.get("type", "function") != "function" or not function.string("name"):
            raise ApiError(f'{name} must be {{"type": "function", "function": {{"name": ...}}}}', name)
        function.object("parameters")
        function.string("description")
    return tools


def cut_after_last_content(text, message):
    """A rendered conversation up to the end of its last message's content, which is to be continued."""
    content = message["content"]
    if isinstance(content, list):
        content = content[-1]["text"] if content else ""
    start = text.rfind(content.strip())
    if not content.strip() or start < 0:
        raise ApiError("continue_final_message: the chat template does not end in the last message", "messages")
    whole = content.lstrip()
    end = start + (len(whole) if text[start : start + len(whole)] == whole else len(content.strip()))
    return text[:end]
