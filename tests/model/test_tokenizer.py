import json
import pathlib
import pickle
import shutil

import pytest

from rlnumba.errors import UserError
from rlnumba.model.tokenizer import Tokenizer, end_token_id

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CHATS = json.loads((GOLDEN / "tokenizer" / "chats.json").read_text())


@pytest.fixture
def tokenizer():
    return Tokenizer(GOLDEN / "tokenizer")


def edited(folder, **settings):
    """A copy of the golden tokenizer whose tokenizer_config.json has other values."""
    shutil.copytree(GOLDEN / "tokenizer", folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return Tokenizer(folder)


def assert_chats(tokenizer, records):
    """The ids, and where transformers marks them the masks, of every golden chat."""
    for record in records:
        messages, arguments = record["messages"], record["arguments"]
        ids = tokenizer.apply_chat_template(messages, **arguments)
        assert ids == record["ids"], tokenizer.decode(ids, skip_special_tokens=False)
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        if "mask" in record:
            assert tokenizer.assistant_mask(messages) == record["mask"]


def spoken(tokenizer, messages, **variables):
    """The text that assistant_mask marks."""
    ids = tokenizer.apply_chat_template(messages, **variables)
    mask = tokenizer.assistant_mask(messages, **variables)
    assert len(mask) == len(ids)
    return tokenizer.decode([i for i, marked in zip(ids, mask, strict=True) if marked], skip_special_tokens=False)


def test_texts(tokenizer):
    for golden in CHATS["texts"]:
        assert tokenizer.encode(golden["text"]) == golden["ids"]
        assert tokenizer.encode(golden["text"], add_special_tokens=False) == golden["bare"]
        assert tokenizer.decode(golden["ids"]) == golden["decoded"]
        assert tokenizer.decode(golden["ids"], skip_special_tokens=False) == golden["decoded_all"]
    of_all = [golden["ids"] for golden in CHATS["texts"]]
    assert tokenizer.decode_batch(of_all) == [tokenizer.decode(ids) for ids in of_all]
    assert tokenizer.decode_batch(of_all[:1]) == [tokenizer.decode(of_all[0])] and tokenizer.decode_batch([]) == []
    assert max(len(golden["ids"]) for golden in CHATS["texts"]) > 8  # the file's own truncation is off


def test_a_pickled_tokenizer_needs_no_folder(tmp_path):
    """Also one that has compiled a template."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "tokenizer", folder)
    own = Tokenizer(folder)
    assert_chats(own, CHATS["default"])
    sent = pickle.dumps(own)
    shutil.rmtree(folder)
    found = pickle.loads(sent)
    assert_chats(found, CHATS["default"])
    for golden in CHATS["texts"]:
        assert found.encode(golden["text"]) == golden["ids"] and found.decode(golden["ids"]) == golden["decoded"]
    found.save(tmp_path)
    assert Tokenizer(tmp_path).special_tokens == own.special_tokens


def test_special_tokens(tokenizer, tmp_path):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.encode(tokenizer.special_tokens["bos_token"], add_special_tokens=False) == [3]
    named = edited(tmp_path / "a", eos_token={"content": "<|eot_id|>"}, bos_token=None)
    assert named.eos_token_id == 6 and "bos_token" not in named.special_tokens
    damaged = {"content": "e", "lstrip": "x"}
    with pytest.raises(UserError, match=f"^{tmp_path / 'c'}: the special token 'e' is damaged"):
        edited(tmp_path / "c", extra_special_tokens={"image_token": damaged})
    # What only tokenizer_config.json calls special is one, and a token that only it knows is added.
    added = {"487": {"content": "<new>", "lstrip": False, "rstrip": False, "special": True, "normalized": False}}
    odd = edited(tmp_path / "b", eos_token="e", added_tokens_decoder=added, additional_special_tokens=["f"])
    assert odd.encode("a<new>", add_special_tokens=False)[-1] == 487
    assert odd.decode(odd.encode("efa<new>")) == "a"


def test_special_tokens_map_of_old_folders(tmp_path):
    old = edited(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|eot_id|>"}}))
    assert old.eos_token_id == 2 and Tokenizer(tmp_path).eos_token_id == 6


ADDED = json.loads((GOLDEN / "added_tokens.json").read_text())


@pytest.mark.parametrize("name", ADDED)
def test_tokens_that_other_files_add(name, tmp_path):
    golden = ADDED[name]
    edited(tmp_path, **golden["settings"])
    for file, content in golden["files"].items():
        (tmp_path / file).write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.encode(text, add_special_tokens=False) for text in golden["texts"]] == golden["ids"]
    assert [tokenizer.decode(ids) for ids in golden["ids"]] == golden["decoded"]
    assert tokenizer.eos_token_id == end_token_id(tmp_path) == golden["eos_token_id"]
    assert tokenizer.pad_token_id == golden["pad_token_id"]
    if "rendered" in golden:
        assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == golden["rendered"]
    (tmp_path / "copy").mkdir()
    tokenizer.save(tmp_path / "copy")
    assert Tokenizer(tmp_path / "copy").encode(golden["texts"][0]) == tokenizer.encode(golden["texts"][0])


def test_chats_with_named_templates(tokenizer):
    assert tokenizer.templates.keys() == {"default", "tool_use"}
    assert_chats(tokenizer, CHATS["default"])


def test_variables_that_templates_read(tokenizer, tmp_path):
    assert tokenizer.template_variables == {"messages", "tools", "add_generation_prompt", "thinking"}
    template = "{% for m in messages %}{% generation %}{{ m.content ~ mood }}{% endgeneration %}{% endfor %}"
    assert edited(tmp_path, chat_template=template).template_variables == {"messages", "mood"}


@pytest.mark.parametrize("name", ["llama", "marked", "raw"])
def test_chats_with_a_template_file(name, tmp_path):
    tokenizer = edited(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATS[f"{name}_template"])
    replaced = Tokenizer(tmp_path)
    assert replaced.chat_template != tokenizer.chat_template
    assert_chats(replaced, CHATS[name])


def test_named_template_files(tmp_path):
    edited(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ messages[0].content }}")
    (tmp_path / "chat_template.jinja").write_text("plain {{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "plain hi"
    assert tokenizer.apply_chat_template(messages, tools=[{}], tokenize=False) == "tools hi"
    tokenizer.save(tmp_path / "copy")
    copied = Tokenizer(tmp_path / "copy")
    assert copied.templates == tokenizer.templates and copied.special_tokens == tokenizer.special_tokens


def test_mask_without_generation_blocks(tokenizer):
    user = {"role": "user", "content": "How many?"}
    first, second = ({"role": "assistant", "content": text} for text in ("4 apples.", "5 boxes 你好."))
    said = spoken(tokenizer, [user, first, user, second])
    assert said == "4 apples.<|im_end|>5 boxes 你好.<|im_end|>"
    assert spoken(tokenizer, [user]) == ""


def test_mask_where_the_template_drops_earlier_thoughts(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: "
        "{{ m.content if loop.last else m.content.split('!')[-1] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    tokenizer = edited(tmp_path, chat_template=template)
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "hm!yes"}
    assert spoken(tokenizer, [user, answer, user, answer]) == "yes<|im_end|>hm!yes<|im_end|>"
    unended = edited(tmp_path, chat_template=template, eos_token="<|eot_id|>")
    with pytest.raises(UserError, match="does not end a turn with eos_token"):
        unended.assistant_mask([user, answer, user, answer])
    shifting = edited(tmp_path, chat_template="{{ messages|length }}{{ messages[-1].content }}")
    with pytest.raises(UserError, match="changes earlier turns"):
        shifting.assistant_mask([user, answer])


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], "the list of messages is empty"),
        (["hello"], "a message must be an object"),
        ([{"role": "alien", "content": "x"}], "unknown role alien"),
    ],
)
def test_messages_that_are_refused(tokenizer, messages, words):
    with pytest.raises(UserError, match=words) as caught:
        tokenizer.apply_chat_template(messages)
    assert "\n" not in str(caught.value)


def test_templates_run_in_a_sandbox(tmp_path):
    tokenizer = edited(tmp_path, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(UserError, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    tokenizer = edited(tmp_path, chat_template="{{ messages.append(1) }}")
    with pytest.raises(UserError, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_folders_without_a_tokenizer_or_template(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    with pytest.raises(UserError, match="no tokenizer.json"):
        Tokenizer(tmp_path)
    bare = edited(tmp_path, chat_template=None)
    assert bare.chat_template is None
    with pytest.raises(UserError, match="has no chat template"):
        bare.apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(UserError, match="chat_template must be"):
        edited(tmp_path, chat_template=[{"name": "x"}])
    for template, words in (("{{ x", "unexpected end of template"), ("{{ messages + 1 }}", "TypeError")):
        with pytest.raises(UserError, match=words):
            edited(tmp_path, chat_template=template).apply_chat_template([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="chat_template.jinja: not UTF-8"):
        Tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(UserError, match="tokenizer.json: not valid JSON"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer in it"):
        Tokenizer(tmp_path)
    for model in ({"type": "BPE", "vocab": [1]}, {"type": "BPE", "vocab": {"a": 0}, "merges": ["a\nb c"]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
        with pytest.raises(UserError, match="tokenizer.json: not a tokenizer") as caught:
            Tokenizer(tmp_path)
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_saving_where_it_came_from_changes_nothing(tmp_path):
    tokenizer = edited(tmp_path / "a")
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    tokenizer.save(tmp_path / "a" / ".." / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tokenizer.json").symlink_to(tmp_path / "a" / "tokenizer.json")
    tokenizer.save(tmp_path / "b")
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    assert Tokenizer(tmp_path / "b").special_tokens == tokenizer.special_tokens


def test_a_saved_tokenizer_takes_the_place_of_another(tokenizer, tmp_path):
    """No file of the other counts, and none that a link leads to is written, as in the hub's cache."""
    (tmp_path / "cache").mkdir()
    found = tmp_path / "model"
    (found / "additional_chat_templates").mkdir(parents=True)
    others = ("chat_template.jinja", "additional_chat_templates/rag.jinja", "special_tokens_map.json")
    for name in (*others, "tokenizer.json", "tokenizer_config.json"):
        other = tmp_path / "cache" / pathlib.Path(name).name
        other.write_text("{}")
        (found / name).symlink_to(other)
    tokenizer.save(found)
    saved = Tokenizer(found)
    assert saved.templates == tokenizer.templates and saved.special_tokens == tokenizer.special_tokens
    assert {path.read_text() for path in (tmp_path / "cache").iterdir()} == {"{}"}
    assert not [name for name in others if (found / name).exists()]


@pytest.mark.parametrize("name", ["qwen3-tokenizer", "smollm2"])
def test_chats_of_released_models(name, samples):
    folder = samples / "models" / name
    if not folder.exists():
        pytest.skip(f"RLNUMBA_SAMPLES has no models/{name}")
    tokenizer = Tokenizer(folder)
    assert_chats(tokenizer, json.loads((GOLDEN / "samples" / f"{name}.json").read_text()))


def test_qwen3_masks(samples):
    folder = samples / "models" / "qwen3-tokenizer"
    if not folder.exists():
        pytest.skip("RLNUMBA_SAMPLES has no models/qwen3-tokenizer")
    tokenizer = Tokenizer(folder)
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    said = spoken(tokenizer, [user, answer, user, answer])
    assert said == "yes<|im_end|><think>\nhm\n</think>\n\nyes<|im_end|>"
