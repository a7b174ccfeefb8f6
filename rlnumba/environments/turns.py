"""Token-in, token-out: the ids that follow a turn's drawn ids in the context of the next one.

next context = context + the ids that were drawn + `suffix_ids` of the tools' results. The drawn ids stay as they are:
their text is decoded to be parsed, and never encoded again, because half of the ways in which a text can be cut into
tokens are none that an encoder finds.
"""

import os

from rlnumba.errors import UserError

SENTINEL = "call_before_the_results"
PROBE = {"role": "tool", "name": "probe", "content": "probe_result_b7d2"}


def check_turns(tokenizer, template_kwargs=None, schemas=None, end_ids=()):
    """The id of the special token with which a turn that calls tools ends: eos_token, where the template writes it, or
    else the one that it writes before the results, such as GLM's <|observation|>.

    end_ids: those at which the model stops besides eos_token. Raises UserError for another one, and if `suffix_ids`
    cannot be made for the tokenizer.
    """
    end, suffix, _ = _suffix(tokenizer, [PROBE], template_kwargs, schemas)
    found = tokenizer.special_ids[end]
    if PROBE["content"] not in suffix or found not in (tokenizer.eos_token_id, *end_ids):
        raise _no_end(tokenizer)
    return found


def suffix_ids(tokenizer, has_ended, results, template_kwargs=None, schemas=None):
    """The ids after a turn that called tools: the results' messages and the generation prompt; list of int.

    results: messages {"role": "tool", "name": str, "content": str}, at least one; or those of others that answer a turn
    without calls, such as {"role": "user", "content": str}. has_ended: whether the last drawn id is that of
    `check_turns`, mostly the EOS; otherwise the suffix begins with it. template_kwargs, schemas: as for the prompt. A
    special token that a result or a name spells out is text, so that neither a tool nor the name of none, which the
    model has written, can end its message and begin another. Raises UserError where eos_token is not special, or where
    the template does not end a turn with a special token.
    """
    end, *suffix = _suffix(tokenizer, results, template_kwargs, schemas)
    ids = tokenizer.encode_marked(*suffix)
    return ids if has_ended else [tokenizer.special_ids[end], *ids]


def _suffix(tokenizer, results, template_kwargs, schemas):
    """(the token that ends a turn with a call, the text after it, with marks in it; what the marks stand for)."""
    eos = tokenizer.special_tokens.get("eos_token")
    if eos is None:
        raise UserError(f"{tokenizer.folder}: the tokenizer has no eos_token, with which a turn that calls a tool ends")
    if eos not in tokenizer.special_ids:
        raise UserError(f"{tokenizer.folder}: eos_token {eos!r} is not a special token, so no turn can end with it")
    marked, literals = tokenizer.mark_special(results)
    texts = [message[key] for message in marked for key in ("content", "name") if key in message]
    sentinel = _absent(SENTINEL, texts, schemas)
    turn = {"role": "assistant", "content": sentinel}
    if results[0]["role"] == "tool":
        call = {"type": "function", "function": {"name": marked[0]["name"], "arguments": {"argument": sentinel}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [{"role": "user", "content": "question"}, turn, *marked]
    settings = {"tools": schemas or None, **(template_kwargs or {})}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **settings)
    # The results may have an EOS in them as text, which is a mark by now.
    after = text.partition(sentinel)[2]
    _, end, suffix = after.partition(eos)
    if not end:
        turn = tokenizer.apply_chat_template(messages[:2], tokenize=False, **settings).partition(sentinel)[2]
        end, suffix = _other_end(tokenizer, os.path.commonprefix([turn, after]), after)
    return end, suffix, literals


def _other_end(tokenizer, turn, after):
    """(the special token that ends a turn, the text after it). after: the text behind a call; turn: that part of it
    which is there without results, too. Raises UserError without such a token."""
    tokens = sorted(tokenizer.special_ids, key=len, reverse=True)
    # It is the turn's own last one, or begins the results.
    end = next((each for each in tokens if turn.rstrip().endswith(each)), None)
    if end is not None:
        return end, after[turn.rindex(end) + len(end) :]
    rest = after[len(turn) :].lstrip()
    end = next((each for each in tokens if rest.startswith(each)), None)
    if end is None:
        raise _no_end(tokenizer)
    return end, rest[len(end) :]


def _no_end(tokenizer):
    eos = tokenizer.special_tokens["eos_token"]
    return UserError(
        f"{tokenizer.folder}: the chat template does not end a turn that calls a tool with eos_token {eos!r}, nor with "
        "another special token at which the model stops (eos_token_id)"
    )


def _absent(word, texts, schemas):
    """`word`, made longer until no text has it in it, nor the schemas."""
    everything = "\n".join([*texts, repr(schemas)])
    while word in everything:
        word += "_"
    return word
