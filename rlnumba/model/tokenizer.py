"""Text to token ids and back, and chat templates, from the files of a Hugging Face folder.

The ids are those of tokenizer.json, whatever model_type is. Chat templates run in jinja2's sandbox with
the settings, filters and globals of transformers' `apply_chat_template`, so equal messages have equal ids.
Source: transformers 5, utils/chat_template_utils.py and tokenization_utils_base.py.
"""

import json
import os
import re
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.meta
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlnumba.errors import UserError
from rlnumba.model.config_values import read_json

# Files of a tokenizer on disk; `save` writes those that there were.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
TEMPLATE_FOLDER = "additional_chat_templates"
ADDED_TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Names under which datasets carry a message's reasoning; templates read the first, gpt-oss's the second.
REASONING = ("reasoning_content", "thinking", "reasoning")

# transformers' clean_up_tokenization, for tokenizers that set it (never BPE, where it would remove real spaces).
CLEAN_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class Tokenizer:
    """The tokenizer of a folder. special_tokens: {"bos_token": str, ...}, as templates see them.

    chat_template: the default template's text or None; templates: {name: text} of all.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.exists():
            raise UserError(f"{self.folder}: no tokenizer.json")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself, no class of its own
            # Read as JSON first, for an error with the position of the damage.
            if not isinstance(read_json(path).get("model"), dict):
                raise UserError(f"{path}: no tokenizer in it (key 'model' is missing)") from None
            raise UserError(f"{path}: not a tokenizer ({' '.join(str(error).split())})") from None
        self.backend.no_truncation()
        self.backend.no_padding()
        settings_path = self.folder / "tokenizer_config.json"
        settings = _settings(self.folder)
        self.special_tokens = _special_tokens(settings)
        self._add_tokens(settings)
        self.templates = self._templates(settings, settings_path)
        is_bpe = isinstance(self.backend.model, tokenizers.models.BPE)
        # {text: id} of the special tokens, which are in no decoded text.
        self.special_ids = {t.content: id for id, t in self.backend.get_added_tokens_decoder().items() if t.special}
        self._clean_up = settings.get("clean_up_tokenization_spaces") and not is_bpe
        self._compiled = {}
        self._literal_backend = None
        # Contents that `save` writes: the folder may have changed or gone by then.
        self._files = self._read_files()

    def __getstate__(self):
        # Templates are compiled again where they are needed, and so is the second backend.
        return vars(self) | {"_compiled": {}, "_literal_backend": None}

    @classmethod
    def from_folder(cls, folder):
        """The Tokenizer of a folder, or None without a tokenizer.json there."""
        return cls(folder) if (Path(folder) / "tokenizer.json").exists() else None

    def _add_tokens(self, settings):
        """Add the tokens that only the other files have, and mark as special those that are special there.

        In transformers' order, which decides their ids: those with a number, then the named ones, then the others.
        """
        added, path = settings.get("added_tokens_decoder"), self.folder / "tokenizer_config.json"
        try:
            if added is None:
                path = self.folder / "added_tokens.json"
                added = {number: text for text, number in read_json(path).items()} if path.exists() else {}
            tokens = [token for _, token in sorted(added.items(), key=lambda item: int(item[0]))]
            self.backend.add_tokens(
                [_added_token(token) for token in tokens if self.backend.token_to_id(_text_of(token)) is None]
            )
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            what = "added_tokens_decoder is " if path.name == "tokenizer_config.json" else ""
            raise UserError(f"{path}: {what}damaged ({error})") from None
        named = list(_named_tokens(settings).values())
        for key in ("additional_special_tokens", "extra_special_tokens"):
            others = settings.get(key)
            named += others if isinstance(others, list) else []
        special = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        for token in named:
            text = _text_of(token)
            if isinstance(text, str) and text and text not in special:
                special.add(text)
                try:
                    self.backend.add_special_tokens([_added_token(token, special=True)])
                except TypeError as error:
                    raise UserError(f"{self.folder}: the special token {text!r} is damaged ({error})") from None

    def _templates(self, settings, path):
        """{name: template}: chat_template.jinja and its folder of named ones, else tokenizer_config.json's."""
        found = {}
        if (self.folder / "chat_template.jinja").exists():
            found["default"] = _read_template(self.folder / "chat_template.jinja")
        for file in sorted((self.folder / TEMPLATE_FOLDER).glob("*.jinja")):
            found[file.stem] = _read_template(file)
        template = settings.get("chat_template")
        if found or template is None:
            return found
        if isinstance(template, str):
            return {"default": template}
        try:
            return {item["name"]: item["template"] for item in template}
        except (TypeError, KeyError):
            raise UserError(f"{path}: chat_template must be a string or a list of {{name, template}}") from None

    def _read_files(self):
        """{path in the folder: content} of the files that make up this tokenizer."""
        try:
            return {name: (self.folder / name).read_bytes() for name in tokenizer_files(self.folder)}
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None

    def save(self, folder):
        """Write the files that this tokenizer was made of to a folder, in which those of another one are replaced."""
        for name, content in self._files.items():
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # In the folder that they came from, others may be reading them.
            if not (target.exists() and target.read_bytes() == content):
                # A symbolic link is replaced: what it leads to, as in the hub's cache, is another model's.
                partial = target.with_name(f"{target.name}.partial")
                partial.write_bytes(content)
                os.replace(partial, target)
        _remove(folder, self._files)

    @property
    def chat_template(self):
        return self.templates.get("default")

    def _id(self, key):
        return self.backend.token_to_id(self.special_tokens[key]) if key in self.special_tokens else None

    @property
    def eos_token_id(self):
        """The id of eos_token, or None. It ends what is trained on, and generation, with the config's eos_token_ids."""
        return self._id("eos_token")

    @property
    def pad_token_id(self):
        return self._id("pad_token")

    def encode(self, text, add_special_tokens=True):
        """Token ids of a text, with the tokenizer's own special tokens around it (a BOS, say) by default."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def mark_special(self, messages):
        """(messages with a mark for each special token that content or name spells out, {mark: that text}).

        A chat template renders the marks as it does other words, and `encode_marked` makes text of them: so no content
        can end its own message, as one from outside may try, nor can the name of a tool that the model has made up.
        """
        spelled = re.compile("|".join(re.escape(text) for text in sorted(self.special_ids, key=len, reverse=True)))
        texts = [{key: message[key] for key in ("content", "name") if key in message} for message in messages]
        contents = "\n".join(text for each in texts for text in each.values())
        if not self.special_ids or not spelled.search(contents):
            return messages, {}
        key = "mark"
        while key in contents:
            key += "s"
        marks = {}

        def mark(found):
            return marks.setdefault(found[0], f"{key}{len(marks)}x")

        marked = [
            message | {key: spelled.sub(mark, text) for key, text in each.items()}
            for message, each in zip(messages, texts, strict=True)
        ]
        return marked, {mark: text for text, mark in marks.items()}

    def encode_marked(self, text, marks):
        """Token ids of a rendered text, without BOS or EOS around it; the texts that `marks` stand for are no tokens.

        A special token splits the text: the parts are encoded on their own, as the encoder does it.
        """
        if not marks:
            return self.encode(text, add_special_tokens=False)
        if self._literal_backend is None:
            # Another backend, because encode_special_tokens holds for all threads that encode.
            backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
            backend.encode_special_tokens = True
            self._literal_backend = backend
        split = re.compile("(" + "|".join(re.escape(t) for t in sorted(self.special_ids, key=len, reverse=True)) + ")")
        stands = re.compile("|".join(re.escape(mark) for mark in marks))
        ids = []
        for index, part in enumerate(split.split(text)):
            if index % 2:
                ids.append(self.special_ids[part])
            else:
                part = stands.sub(lambda found: marks[found[0]], part)
                ids += self._literal_backend.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids, skip_special_tokens=True):
        """The text of token ids, by default without special tokens (such as the EOS that stopped it)."""
        return self._cleaned(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def decode_batch(self, lists):
        """The texts of lists of token ids, as `decode`'s; on several cores."""
        if len(lists) == 1:
            return [self.decode(lists[0])]
        return [self._cleaned(text) for text in self.backend.decode_batch(lists, skip_special_tokens=True)]

    @property
    def decodes_piecewise(self):
        """Whether the text of some ids begins that of more: not where spaces before later tokens are removed."""
        return not self._clean_up

    def _cleaned(self, text):
        """A decoded text without the spaces that clean_up_tokenization_spaces removes."""
        for old, new in CLEAN_UP if self._clean_up else ():
            text = text.replace(old, new)
        return text

    def apply_chat_template(self, messages, add_generation_prompt=False, tools=None, tokenize=True, **variables):
        """Messages through the chat template: token ids, or the text if not tokenize.

        messages: list of {"role", "content", ...}; tools: list of JSON schemas; variables: further names that the
        template reads, such as enable_thinking=False. Raises UserError if there is no template, no message, or
        the template itself refuses them.
        """
        text, _ = self._render(messages, add_generation_prompt, tools, variables)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def assistant_mask(self, messages, tools=None, **variables):
        """1 for the assistant's tokens, 0 elsewhere, for each id of apply_chat_template(messages): list of int.

        Marked by the template's {% generation %} blocks where it has them. Without, a turn begins where the
        template's generation prompt before it ends, and goes up to its end-of-sequence token, which is included.
        Raises UserError where earlier turns change with later ones, so that a turn has no fixed span.
        """
        text, spans = self._render(messages, False, tools, variables, track=True)
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self._template(tools)):
            spans = [
                self._turn(text, messages, index, tools, variables)
                for index, message in enumerate(messages)
                if message.get("role") == "assistant"
            ]
        encoding = self.backend.encode(text, add_special_tokens=False)
        mask = [0] * len(encoding.ids)
        for start, end in spans:
            first = encoding.char_to_token(start) if start < end else None
            if first is not None:
                last = encoding.char_to_token(end - 1)
                stop = len(mask) if last is None else last + 1
                mask[first:stop] = [1] * (stop - first)
        return mask

    def _turn(self, text, messages, index, tools, variables):
        """(start, end) of the assistant message `index` in the rendered text."""
        before, _ = self._render(messages[:index], True, tools, variables) if index else ("", [])
        through, _ = self._render(messages[: index + 1], False, tools, variables)
        eos, start = self.special_tokens.get("eos_token"), len(before)
        end = len(through) if text.startswith(through) else len(text)
        if not text.startswith(before):
            problem = "changes earlier turns"
        elif eos and (found := text.find(eos, start, end)) >= 0:
            return start, found + len(eos)
        elif text.startswith(through):
            return start, end
        else:
            problem = f"does not end a turn with eos_token {eos!r}"
        raise UserError(
            f"{self.folder}: the chat template has no {{% generation %}} blocks and {problem}, so the assistant's part "
            f"of message {index + 1} cannot be found"
        )

    def _template(self, tools):
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            known = f" (only {', '.join(sorted(self.templates))})" if self.templates else ""
            raise UserError(f"{self.folder}: the tokenizer has no chat template{known}; give the prompt as text")
        return self.templates[name]

    @property
    def template_variables(self):
        """The names that the chat templates read, tools and messages among them: set."""
        read = {"tools"} if "tool_use" in self.templates else set()
        for source in self.templates.values():
            try:
                read |= jinja2.meta.find_undeclared_variables(_environment().parse(source))
            except jinja2.TemplateError as error:
                raise UserError(f"{self.folder}: chat template: {' '.join(str(error).split())}") from None
        return read

    def _render(self, messages, add_generation_prompt, tools, variables, track=False):
        """(text, spans of the generation blocks in it, if tracked)."""
        source = self._template(tools)
        if not messages:
            raise UserError("chat template: the list of messages is empty")
        try:
            if source not in self._compiled:
                self._compiled[source] = _environment().from_string(source)
            template = self._compiled[source]
            blocks = template.environment.extensions[GenerationBlocks.identifier]
            blocks.rendered, blocks.spans = ([], []) if track else (None, None)
            names = {**self.special_tokens, "messages": [_message(message) for message in messages]}
            names |= {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt, **variables}
            pieces = blocks.rendered if track else []
            for piece in template.generate(names):
                pieces.append(piece)
            return "".join(pieces), blocks.spans
        except jinja2.TemplateError as error:
            raise UserError(f"{self.folder}: chat template: {' '.join(str(error).split())}") from None
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
            raise UserError(f"{self.folder}: chat template: {type(error).__name__}: {error}") from None


def tokenizer_files(folder):
    """The files of a folder's tokenizer, as paths in the folder: list."""
    folder = Path(folder)
    found = [folder / name for name in FILES if (folder / name).exists()]
    return [path.relative_to(folder) for path in [*found, *sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))]]


def remove_other_tokenizer(folder, source):
    """Remove the files of another tokenizer than that of the folder `source`, whose own have been copied.

    A chat template or special tokens that are left there would count.
    """
    own = tokenizer_files(source)
    if Path("tokenizer.json") in own:
        _remove(folder, own)


def _remove(folder, kept):
    for name in tokenizer_files(folder):
        if name not in kept:
            (Path(folder) / name).unlink()


def _settings(folder):
    """The content of a folder's tokenizer_config.json, in old folders with special_tokens_map.json: dict."""
    path, legacy = (Path(folder) / name for name in ("tokenizer_config.json", "special_tokens_map.json"))
    settings = read_json(path) if path.exists() else {}
    return {**settings, **read_json(legacy)} if "added_tokens_decoder" not in settings and legacy.exists() else settings


def _named_tokens(settings):
    """{"eos_token": a token as the settings have it, ...}: those that all tokenizers may have, then the model's own."""
    own = {
        key: token
        for key, token in settings.items()
        if key.endswith("_token") and (isinstance(token, str) or isinstance(token, dict) and "__type" in token)
    }
    for key in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
        others = settings.get(key)
        own |= others if isinstance(others, dict) else {}
    return {key: settings.get(key) for key in SPECIAL_TOKENS} | {k: own[k] for k in own if k not in SPECIAL_TOKENS}


def _special_tokens(settings):
    """{"eos_token": its text, ...} of a tokenizer's settings: dict."""
    texts = {key: _text_of(token) for key, token in _named_tokens(settings).items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _text_of(token):
    """The text of a token that is written as one, or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _added_token(token, **flags):
    """The AddedToken of a token that is written as its text, or as an object with it and flags. KeyError without it."""
    if isinstance(token, dict):
        own = {key: value for key, value in token.items() if key in ADDED_TOKEN_FLAGS}
        return tokenizers.AddedToken(token["content"], **own | flags)
    return tokenizers.AddedToken(token, **flags)


def end_token_id(folder):
    """The EOS id of a folder's tokenizer, or None; the vocabulary is read only where tokenizer_config.json lacks it."""
    if not (Path(folder) / "tokenizer.json").exists():
        return None
    settings = _settings(folder)
    text, added = _special_tokens(settings).get("eos_token"), settings.get("added_tokens_decoder")
    if text is None:
        return None
    ids = [id for id, token in added.items() if _text_of(token) == text] if isinstance(added, dict) else []
    return int(ids[0]) if ids and ids[0].isdecimal() else Tokenizer(folder).eos_token_id


def _read_template(path):
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason}") from None


def _message(message):
    """A message as templates see it: without null keys, and its reasoning under the names they look for."""
    if not isinstance(message, dict):
        raise UserError(f"chat template: a message must be an object with role and content, got {message!r}")
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class GenerationBlocks(Extension):
    """{% generation %} ... {% endgeneration %}: renders its body, and records its span while `spans` is set."""

    tags = {"generation"}
    rendered = None
    spans = None

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller):
        text = caller()
        if self.spans is not None:
            start = len("".join(self.rendered))
            self.spans.append((start, start + len(text)))
        return text


def _environment():
    extensions = [GenerationBlocks, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja2's own filter escapes HTML characters and sorts keys.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.TemplateError(message)
