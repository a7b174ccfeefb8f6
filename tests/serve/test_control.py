"""Control by an outside trainer: pause, new weights, sleep."""

import json
import shutil
import threading
import time

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine.core import Engine, PromptError
from rlnumba.model import new_weights, weights
from rlnumba.model.transformer import load_model, save_model
from rlnumba.runtime import device
from tests.serve.conftest import MODEL, Reply, connect, is_idle, request, running, wait_until

MODELS = MODEL.parent / "models"
LONG = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "seed": 1}
SERVED = {"weight_dir": None, "weight_version": 0}
SHORT = {"prompt": "ab", "max_tokens": 8, "ignore_eos": True, "seed": 1, "logprobs": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of the served model after some training."""
    model, folder = load_model(MODEL), tmp_path_factory.mktemp("trained")
    model.weights.flat *= np.float32(1.5)
    save_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def process(tokenizer):
    config = EngineConfig(max_num_seqs=4, enable_sleep_mode=True, num_gpu_blocks_override=128)
    engine = Engine(load_model(MODEL), tokenizer, config)
    with running(engine, tokenizer, dev_endpoints=True) as process:
        yield process


@pytest.fixture
def controlled(process):
    """A server under control, which has the weights of MODEL as version 0 before each test."""
    yield process
    for path, body in (("/resume", None), ("/wake_up", None), ("/update_weights", SERVED)):
        assert post(process, path, body).status == 200
    wait_until(lambda: is_idle(process))


class Gate:
    """Lets the engine make so many steps, and then any number once it is open."""

    def __init__(self, loop):
        self.loop, self.step, self.is_open = loop, loop._step, False
        self.permits = threading.Semaphore(0)

    def __call__(self):
        if self.is_open or self.loop.engine.outputs or self.permits.acquire(blocking=False):
            self.step()
        else:
            time.sleep(0.001)

    def begin(self, path="/v1/completions", body=LONG):
        """A Stream that has some of its tokens, and gets no more for now."""
        before = self.loop.engine.num_unfinished
        stream = Stream(self.loop.process, path, body)
        wait_until(lambda: self.loop.engine.num_unfinished > before)
        self.permits.release(8)
        stream.read_first()
        return stream

    def open(self):
        self.is_open = True


@pytest.fixture
def gate(controlled, monkeypatch):
    loop = controlled.engine_loop
    monkeypatch.setattr(loop, "process", controlled, raising=False)
    found = Gate(loop)
    monkeypatch.setattr(loop, "_step", found)
    yield found
    found.open()


def post(process, path, body=None):
    """The Reply to a POST; without a body it has no content type, as most clients send it."""
    headers = {"content-type": None} if body is None else {}
    return request(process, path, b"" if body is None else body, "POST", headers)


def answer_of(process, body=SHORT):
    return post(process, "/v1/completions", body).json


def text_of(process, body=SHORT):
    return answer_of(process, body)["choices"][0]["text"]


class Stream:
    """A stream. first: its first event."""

    def __init__(self, process, path, body):
        self.connection = connect(process)
        self.connection.request("POST", path, json.dumps(body | {"stream": True}), {"content-type": "application/json"})

    def read_first(self):
        self.response, self.first = self.connection.getresponse(), []
        while not self.first:
            if (line := self.response.readline()).startswith(b"data: "):
                self.first.append(json.loads(line[6:]))

    def rest(self):
        """All its events, after the end."""
        while self.response.fp.peek(1)[:1] == b"\n":
            self.response.readline()
        try:
            return self.first + Reply(self.response).events
        finally:
            self.connection.close()


def joined(events):
    return "".join(event["choices"][0]["text"] for event in events)


class Later:
    """A request in a thread of its own. reply: its Reply, None before."""

    def __init__(self, function, *arguments):
        self.reply = None
        self.thread = threading.Thread(target=self._run, args=(function, *arguments), daemon=True)
        self.thread.start()

    def _run(self, function, *arguments):
        self.reply = function(*arguments)

    def result(self):
        self.thread.join(60)
        return self.reply


GETS = ["/is_paused", "/weight_info", "/is_sleeping", "/server_info", "/get_world_size"]
POSTS = ["/pause", "/resume", "/abort_requests", "/reset_prefix_cache", "/start_weight_update", "/update_weights"]
POSTS += ["/finish_weight_update", "/update_weight_version", "/init_weight_transfer_engine", "/sleep", "/wake_up"]


def keys_of(reply):
    """The keys of an answer beside success."""
    found = reply.json
    assert reply.status == 200 and found.pop("success") is True and reply.headers["content-type"] == "application/json"
    return found


def test_without_the_flag_there_is_none_of_them(server):
    for path in (*GETS, *POSTS, "/collective_rpc"):
        assert post(server, path, {}).status == request(server, path).status == 404


def test_answers(controlled):
    for path in GETS:
        assert post(controlled, path, {}).status == 405
    for path in POSTS:
        assert request(controlled, path).status == 405
    assert post(controlled, "/collective_rpc", {"method": "reload_weights"}).status == 404
    assert keys_of(request(controlled, "/get_world_size")) == {"world_size": 1}
    assert keys_of(request(controlled, "/is_paused")) == {"is_paused": False}
    assert keys_of(request(controlled, "/is_sleeping")) == {"is_sleeping": False}
    assert keys_of(request(controlled, "/weight_info")) == {"weight_version": 0}
    assert keys_of(post(controlled, "/reset_prefix_cache")) == {}
    config = keys_of(request(controlled, "/server_info?config_format=json"))["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["lora_config"] is config["weight_transfer_config"] is None
    assert isinstance(keys_of(request(controlled, "/server_info"))["vllm_config"], str)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause?mode=stop", None, "mode"),
        ("/pause?clear_cache=2", None, "clear_cache"),
        ("/sleep?level=3", None, "level"),
        ("/abort_requests", {"request_ids": [1]}, "request_ids"),
        ("/abort_requests", {"request_ids": "a"}, "request_ids"),
        ("/update_weights", {}, "weight_dir"),
        ("/update_weights", {"weight_dir": 1}, "weight_dir"),
        ("/update_weights", {"weight_dir": None, "weight_version": 1.5}, "weight_version"),
        ("/update_weights", {"update_info": {"names": ["a"], "shapes": [[1]]}}, "update_info.weight_dir"),
        ("/update_weights", {"update_info": {"weight_dir": []}}, "update_info.weight_dir"),
        ("/update_weight_version", {}, "new_version"),
        ("/update_weight_version", {"new_version": True}, "new_version"),
        ("/update_weight_version", {"new_version": "a" * 257}, "new_version"),
        ("/finish_weight_update", None, None),
        ("/init_weight_transfer_engine", {"init_info": {"master_port": 1}}, "init_info"),
    ],
)
def test_what_is_refused(controlled, path, body, param):
    reply = post(controlled, path, body)
    assert reply.status == 400 and reply.json["error"]["param"] == param
    if "weight" in path and "version" not in path:
        assert "weight" in reply.json["error"]["message"]
    assert request(controlled, "/weight_info").json["weight_version"] == 0
    assert not request(controlled, "/is_paused").json["is_paused"]


def test_a_page_cannot_send_a_post_without_a_body(controlled):
    for header in ("origin", "sec-fetch-site"):
        headers = {"content-type": None, header: "http://127.0.0.1:1"}
        assert request(controlled, "/pause", b"", "POST", headers).status == 400
    headers = {"content-type": None, "transfer-encoding": "chunked"}
    assert request(controlled, "/pause", b"0\r\n\r\n", "POST", headers).status == 400
    assert not request(controlled, "/is_paused").json["is_paused"]


def test_answers_of_new_weights_are_those_of_a_server_started_on_them(controlled, trained, tokenizer):
    old = answer_of(controlled)
    assert old["weight_version"] == 0
    assert keys_of(post(controlled, "/update_weights", {"weight_dir": str(trained)}))["weight_version"] == 1
    new = answer_of(controlled)
    engine = Engine(load_model(trained), tokenizer, EngineConfig(max_num_seqs=4))
    with running(engine, tokenizer) as other:
        expected = answer_of(other)
    assert new["choices"] == expected["choices"] and new["choices"] != old["choices"]
    # Neither has it the cached blocks of the old ones, with a salt or without.
    assert new["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert new["weight_version"] == 1
    chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2, "seed": 1}
    assert post(controlled, "/v1/chat/completions", chat).json["weight_version"] == 1
    assert keys_of(post(controlled, "/update_weights", {"weight_dir": None}))["weight_version"] == 2
    assert answer_of(controlled)["choices"] == old["choices"]


def test_an_update_resets_the_cache_of_all_salts(controlled, trained):
    prompt = list(range(2, 40))
    bodies = [{"prompt": prompt, "max_tokens": 1, "cache_salt": salt} for salt in ("", "a")]

    def cached():
        return [answer_of(controlled, b)["usage"]["prompt_tokens_details"]["cached_tokens"] for b in bodies]

    cached()
    assert cached() == [32, 32]
    post(controlled, "/update_weights", {"weight_dir": str(trained)})
    assert cached() == [0, 0] and cached() == [32, 32]
    post(controlled, "/reset_prefix_cache")
    assert cached() == [0, 0] and cached() == [32, 32]
    for flag, expected in (("false", [32, 32]), ("true", [0, 0])):
        post(controlled, f"/pause?mode=keep&clear_cache={flag}")
        post(controlled, "/resume")
        assert cached() == expected


def test_versions(controlled, trained):
    def version():
        return request(controlled, "/weight_info").json["weight_version"]

    given = {"weight_dir": str(trained)}
    for name, successor in ((7, 8), ("41", "42"), ("step-009", "step-010"), ("final", "final+1"), ("", "+1")):
        post(controlled, "/update_weights", given | {"weight_version": name})
        assert version() == name == answer_of(controlled)["weight_version"]
        post(controlled, "/update_weights", {"update_info": given})
        assert version() == successor
    old = text_of(controlled)
    assert keys_of(post(controlled, "/update_weight_version", {"new_version": "other"}))["new_version"] == "other"
    assert version() == "other" and text_of(controlled) == old


def test_start_and_finish(controlled, trained):
    old = text_of(controlled)
    post(controlled, "/start_weight_update", {"is_checkpoint_format": True})
    assert keys_of(post(controlled, "/update_weights", {"update_info": {"weight_dir": str(trained)}}))
    # They wait for the end of the update.
    assert text_of(controlled) == old
    assert keys_of(post(controlled, "/finish_weight_update", {"weight_version": "a"}))["weight_version"] == "a"
    new = text_of(controlled)
    assert new != old
    # A new start forgets what was not finished, and a refused update leaves nothing to finish.
    post(controlled, "/start_weight_update")
    post(controlled, "/update_weights", {"weight_dir": None})
    post(controlled, "/start_weight_update")
    for name in ("none", "", "a" * 5000, "a\x00b", "~no user/a"):
        assert post(controlled, "/update_weights", {"weight_dir": name}).status == 400
    assert post(controlled, "/finish_weight_update").status == 400
    assert request(controlled, "/weight_info").json["weight_version"] == "a" and text_of(controlled) == new


def other_shape(folder):
    shutil.copytree(MODELS / "qwen3_tied", folder, dirs_exist_ok=True)


def no_shard(folder):
    next(iter(folder.glob("model-*.safetensors"))).unlink()


def cut_shard(folder):
    path = sorted(folder.glob("model-*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(folder):
    path = sorted(folder.glob("model-*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:20])


def cut_config(folder):
    path = folder / "config.json"
    path.write_text(path.read_text()[:100])


def cut_index(folder):
    path = folder / weights.INDEX
    path.write_text(path.read_text()[:200])


def index_of_more(folder):
    index = json.loads((folder / weights.INDEX).read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = last
    (folder / weights.INDEX).write_text(json.dumps(index))


def without_a_tensor(folder):
    index = json.loads((folder / weights.INDEX).read_text())
    index["weight_map"].pop("model.norm.weight")
    (folder / weights.INDEX).write_text(json.dumps(index))


def of_another_rope(folder):
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_theta"] = raw["rope_parameters"]["rope_theta"] = 20000.0
    (folder / "config.json").write_text(json.dumps(raw))


def in_16_bits(folder):
    model = load_model(MODEL)
    save_model(model, folder, dtype="bfloat16")


def an_adapter(folder):
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text("{}")


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def removed(folder):
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (removed, "no such folder"),
        (emptied, "no model.safetensors"),
        (other_shape, "is "),
        (no_shard, "No such file"),
        (cut_shard, "truncated or damaged"),
        (cut_header, "truncated or damaged"),
        (cut_config, "config.json"),
        (cut_index, "index.json"),
        (index_of_more, "is not in this file"),
        (without_a_tensor, "missing tensors: model.norm.weight"),
        (of_another_rope, "rope_theta is 20000.0, but 10000.0"),
        (in_16_bits, "has dtype BF16"),
        (an_adapter, "adapter"),
    ],
)
def test_a_folder_that_is_no_such_model_is_refused(controlled, trained, damage, message, tmp_path, monkeypatch):
    """The old weights are served, to the bit."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 40_000)
    folder = tmp_path / "new"
    save_model(load_model(trained), folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    damage(folder)
    live = controlled.engine_loop.engine.model.weights.flat
    before, old = device.to_host(live).copy(), answer_of(controlled)
    reply = post(controlled, "/update_weights", {"weight_dir": str(folder)})
    assert reply.status == 400 and message in reply.json["error"]["message"], reply.json
    assert str(folder) in reply.json["error"]["message"] and "\n" not in reply.json["error"]["message"]
    assert (device.to_host(live) == before).all()
    new = answer_of(controlled)
    assert new["choices"] == old["choices"] and new["weight_version"] == old["weight_version"] == 0


@pytest.mark.parametrize("late", ["longer", "shorter", "gone", "rewritten"])
def test_a_folder_that_is_written_to_while_it_is_read_is_refused(controlled, trained, tmp_path, monkeypatch, late):
    shutil.copytree(trained, tmp_path / "new")
    path, read = tmp_path / "new" / "model.safetensors", np.fromfile

    def write_and_read(file, dtype):
        content = path.read_bytes()
        if late == "gone":
            values = read(file, dtype)
            path.unlink()
            return values
        path.write_bytes({"longer": content + b"0", "shorter": content[:-9], "rewritten": content}[late])
        return read(file, dtype)

    monkeypatch.setattr(new_weights.np, "fromfile", write_and_read)
    old = text_of(controlled)
    reply = post(controlled, "/update_weights", {"weight_dir": str(tmp_path / "new")})
    assert reply.status == 400 and "written to while it was read" in reply.json["error"]["message"]
    assert text_of(controlled) == old


def test_weights_alone_are_taken(controlled, trained, tmp_path):
    """Trainers write the tensors without a config."""
    shutil.copy(trained / "model.safetensors", tmp_path)
    (tmp_path / "STABLE").touch()
    old = text_of(controlled)
    assert post(controlled, "/update_weights", {"weight_dir": str(tmp_path)}).status == 200
    assert text_of(controlled) != old


def test_ends_are_those_of_the_new_folder(controlled, trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    body = {"prompt": "ab", "max_tokens": 50, "temperature": 0, "return_token_ids": True}
    post(controlled, "/update_weights", {"weight_dir": str(tmp_path)})
    ids = answer_of(controlled, body | {"ignore_eos": True})["choices"][0]["token_ids"]
    raw = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(raw | {"eos_token_id": [ids[3]]}))
    post(controlled, "/update_weights", {"weight_dir": str(tmp_path)})
    choice = answer_of(controlled, body)["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["token_ids"] == ids[: ids.index(ids[3]) + 1]


def test_keep_stops_a_stream_where_it_is(controlled, gate):
    stream = gate.begin()
    assert keys_of(post(controlled, "/pause?mode=keep")) == {"status": "paused"}
    gate.open()
    assert keys_of(request(controlled, "/is_paused")) == {"is_paused": True}
    drawn = controlled.service.metrics.generation_tokens
    assert request(controlled, "/health").status == 200
    waiting = Later(answer_of, controlled)
    wait_until(lambda: controlled.engine_loop.state.num_waiting == 1)
    assert controlled.service.metrics.generation_tokens == drawn and waiting.reply is None
    assert keys_of(post(controlled, "/resume")) == {"status": "resumed"}
    events = stream.rest()
    assert joined(events) == text_of(controlled, LONG) and events[-1]["choices"][0]["finish_reason"] == "length"
    assert waiting.result()["choices"][0]["text"] == text_of(controlled)


def test_abort_ends_all_with_the_tokens_that_they_have(controlled, gate):
    body = LONG | {"n": 2, "logprobs": 1, "prompt_logprobs": 1, "echo": True}
    running = Later(answer_of, controlled, body)
    stream = gate.begin()
    queued = Later(answer_of, controlled, body | {"n": 3})
    wait_until(lambda: controlled.engine_loop.engine.num_unfinished == 6)
    assert keys_of(post(controlled, "/pause")) == {"status": "paused"}
    choices = [*running.result()["choices"], *queued.result()["choices"], stream.rest()[-1]["choices"][0]]
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 6
    wait_until(lambda: is_idle(controlled))
    gate.open()
    waiting = Later(answer_of, controlled)
    wait_until(lambda: controlled.engine_loop.state.num_waiting == 1)
    post(controlled, "/resume")
    assert waiting.result()["choices"][0]["finish_reason"] == "length"
    assert text_of(controlled, body).startswith(choices[0]["text"])


def test_requests_are_aborted_by_their_ids(controlled, gate):
    stream, other = gate.begin(), gate.begin()
    ids = {"request_ids": [stream.first[0]["id"], "none"]}
    assert keys_of(post(controlled, "/abort_requests", ids)) == {"status": "aborted", "aborted": 1}
    events = stream.rest()
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    # Without its prefix an id is that of the request's header.
    third = gate.begin()
    ids = {"request_ids": [third.first[0]["id"].removeprefix("cmpl-")]}
    assert post(controlled, "/abort_requests", ids).json["aborted"] == 1
    assert third.rest()[-1]["choices"][0]["finish_reason"] == "abort"
    fourth = gate.begin()
    gate.open()
    whole = joined(other.rest())
    assert whole == joined(fourth.rest()) and whole.startswith(joined(events)) and len(joined(events)) < len(whole)
    assert post(controlled, "/abort_requests").json["aborted"] == 0


def test_wait_lets_what_has_begun_end_first(controlled, gate):
    stream = gate.begin()
    paused = Later(post, controlled, "/pause?mode=wait")
    wait_until(lambda: request(controlled, "/is_paused").json["is_paused"])
    waiting = Later(answer_of, controlled)
    wait_until(lambda: controlled.engine_loop.control.held)
    # One that waits can be aborted.
    named = Later(request, controlled, "/v1/completions", SHORT, "POST", {"x-request-id": "mine"})
    wait_until(lambda: len(controlled.engine_loop.control.held) == 2)
    assert post(controlled, "/abort_requests", {"request_ids": ["mine"]}).json["aborted"] == 1
    assert named.result().json["choices"][0]["finish_reason"] == "abort" and paused.reply is None
    gate.open()
    assert stream.rest()[-1]["choices"][0]["finish_reason"] == "length"
    assert keys_of(paused.result()) == {"status": "paused"}
    wait_until(lambda: controlled.engine_loop.state.num_waiting == 1)
    assert waiting.reply is None
    post(controlled, "/resume")
    assert waiting.result()["choices"][0]["text"] == text_of(controlled)


@pytest.mark.parametrize("path", ["/resume", "/pause?mode=keep"])
def test_a_pause_that_waits_can_be_overtaken(controlled, gate, path):
    stream, held = gate.begin(), controlled.engine_loop.control.held
    paused = Later(post, controlled, "/pause?mode=wait")
    wait_until(lambda: request(controlled, "/is_paused").json["is_paused"])
    # A client that goes away while its request waits is noticed.
    gone = connect(controlled)
    gone.request("POST", "/v1/completions", json.dumps(LONG | {"stream": True}), {"content-type": "application/json"})
    wait_until(lambda: held)
    gone.close()
    wait_until(lambda: not held)
    assert post(controlled, path).status == 200
    assert paused.result().status == 409
    gate.open()
    post(controlled, "/resume")
    assert stream.rest()[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("pauses", [True, False])
def test_a_rollout_goes_on_with_new_weights(controlled, trained, gate, pauses):
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 60, "temperature": 0, "ignore_eos": True}}
    stream = gate.begin("/inference/v1/generate", body)
    if pauses:
        post(controlled, "/pause?mode=keep")
    post(controlled, "/update_weights", {"weight_dir": str(trained), "weight_version": "new"})
    gate.open()
    post(controlled, "/resume")
    events = stream.rest()
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    old, new = events[-1]["choices"][0]["weight_versions"]
    assert (old["version"], new["version"]) == (0, "new") and old["start"] == 0 and new["end"] == len(ids) == 60
    assert old["end"] == new["start"] >= 1
    assert events[0]["weight_version"] == 0 and events[-1]["weight_version"] == "new"

    def alone(token_ids, max_tokens):
        params = body["sampling_params"] | {"max_tokens": max_tokens}
        reply = post(controlled, "/inference/v1/generate", {"token_ids": token_ids, "sampling_params": params})
        return reply.json["choices"][0]["token_ids"]

    # What comes after is what the new model alone makes of the tokens before.
    assert alone([5, 6, 7, *ids[: new["start"]]], 60 - new["start"]) == ids[new["start"] :]
    post(controlled, "/update_weights", SERVED)
    assert alone([5, 6, 7], new["start"]) == ids[: new["start"]]


def test_a_stream_has_the_version_of_its_last_token(controlled, trained, gate):
    stream = gate.begin()
    post(controlled, "/update_weights", {"weight_dir": str(trained)})
    gate.open()
    versions = [event["weight_version"] for event in stream.rest()]
    assert versions == sorted(versions) and set(versions) == {0, 1}


def test_weights_that_hold_nan_fail_the_requests_alone(controlled, tmp_path, gate):
    model = load_model(MODEL)
    model.weights.norm[0] = np.nan
    save_model(model, tmp_path)
    old, stream = gate.begin(), gate.begin()
    post(controlled, "/abort_requests", {"request_ids": [old.first[0]["id"]]})
    assert old.rest()[-1]["choices"][0]["finish_reason"] == "abort"
    assert post(controlled, "/update_weights", {"weight_dir": str(tmp_path)}).status == 200
    gate.open()
    assert "not finite" in stream.rest()[-1]["error"]["message"]
    assert post(controlled, "/v1/completions", SHORT).status == 400
    assert post(controlled, "/update_weights", SERVED).status == 200
    assert text_of(controlled)


def test_tokens_of_old_weights_are_not_drawn_again(controlled, trained, gate, monkeypatch):
    """A damaged prompt lets the engine begin again with all others, which is no more possible for these."""
    damaged, other = gate.begin(), gate.begin()
    engine, step = controlled.engine_loop.engine, controlled.engine_loop.engine.step
    post(controlled, "/update_weights", {"weight_dir": str(trained)})
    new = Later(answer_of, controlled)
    wait_until(lambda: engine.num_unfinished == 3)
    number = min(engine.requests)

    def fails():
        monkeypatch.setattr(engine, "step", step)
        raise PromptError(number, "damaged", (number,))

    monkeypatch.setattr(engine, "step", fails)
    gate.open()
    assert damaged.rest()[-1]["error"]["message"] == "damaged"
    error = other.rest()[-1]["error"]
    assert (error["type"], error["code"]) == ("conflict_error", "weights_replaced")
    assert new.result()["choices"][0]["text"] == text_of(controlled)


def test_sleep(controlled, gate):
    stream = gate.begin()
    assert keys_of(post(controlled, "/sleep?level=1")) == {"status": "sleeping"}
    assert stream.rest()[-1]["choices"][0]["finish_reason"] == "abort"
    assert keys_of(request(controlled, "/is_sleeping")) == {"is_sleeping": True}
    assert keys_of(request(controlled, "/is_paused")) == {"is_paused": False}
    waiting = Later(answer_of, controlled)
    wait_until(lambda: controlled.engine_loop.state.num_waiting == 1)
    assert controlled.engine_loop.engine.is_asleep and request(controlled, "/health").status == 200
    gate.open()
    assert post(controlled, "/wake_up?tags=weight").json["error"]["param"] == "tags"
    # The weights are awake; what draws with them waits for the cache.
    assert keys_of(post(controlled, "/wake_up?tags=weights")) == {"status": "awake"}
    assert request(controlled, "/is_sleeping").json["is_sleeping"] and controlled.engine_loop.engine.is_asleep
    assert keys_of(post(controlled, "/wake_up?tags=weights&tags=kv_cache")) == {"status": "awake"}
    assert waiting.result()["choices"][0]["text"] == text_of(controlled)


def test_what_sleep_keeps_goes_on(controlled, gate):
    stream = gate.begin()
    post(controlled, "/pause?mode=keep")
    post(controlled, "/sleep?mode=keep")
    gate.open()
    post(controlled, "/wake_up")
    assert request(controlled, "/is_paused").json["is_paused"]
    post(controlled, "/resume")
    assert joined(stream.rest()) == text_of(controlled, LONG)


def test_a_paused_server_ends_what_waits(tokenizer):
    engine = Engine(load_model(MODEL), tokenizer, EngineConfig(max_num_seqs=2))
    with running(engine, tokenizer, dev_endpoints=True, drain_timeout=60.0) as process:
        post(process, "/pause?mode=keep")
        waiting = Later(answer_of, process)
        wait_until(lambda: process.engine_loop.state.num_waiting == 1)
    assert waiting.result()["choices"][0]["finish_reason"] == "length"


def test_the_key_is_needed(tokenizer):
    engine = Engine(load_model(MODEL), tokenizer, EngineConfig(max_num_seqs=2))
    with running(engine, tokenizer, dev_endpoints=True, api_key="s3cret") as process:
        for path in (*GETS, *POSTS):
            for method in ("GET", "POST"):
                assert request(process, path, b"{}", method).status == 401
        key = {"authorization": "Bearer s3cret"}
        assert request(process, "/pause", b"", "POST", key | {"content-type": None}).status == 200
