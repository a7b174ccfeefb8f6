"""A teacher that a server has: the run of a loaded one, to the bit, and a server that is down."""

import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from rlnumba.config import EngineConfig, TeacherConfig
from rlnumba.engine.core import Engine
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.reporting import stderr
from rlnumba.runs.planning.plan import Planner
from rlnumba.runtime import device
from rlnumba.trainers.distill import run_distill
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.rloo import run_rloo
from rlnumba.trainers.rollout import Rollouts
from rlnumba.trainers.served_teacher import ServedTeacher
from tests.parallel import in_threads
from tests.serve.conftest import running
from tests.trainers.runs import distill_run, grpo_run, metrics_of, rloo_run, with_column
from tests.trainers.test_resume import hash_of
from tests.trainers.test_teacher import taught_run, write_teacher

SIZES = {"max_steps": 2, "global_batch_size": 16, "gradient_accumulation_steps": 1}
pytestmark = pytest.mark.skipif(device.name() != "cpu", reason="what a run does with a server, not its kernels")


@pytest.fixture(autouse=True)
def _console(monkeypatch):
    """A rank in a thread silences its process."""
    monkeypatch.setattr(stderr, "_is_silent", False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder} of two teachers."""
    folder = tmp_path_factory.mktemp("teachers")
    return {name: write_teacher(folder / name, seed) for seed, name in enumerate(("math", "code"))}


@pytest.fixture(scope="module")
def url(folders):
    """The URL of a server that has the teacher `math`."""
    tokenizer = Tokenizer.from_folder(folders["math"])
    with running(Engine(load_model(folders["math"]), tokenizer, EngineConfig()), tokenizer) as process:
        yield f"{process.url}/v1"


class Stub(BaseHTTPRequestHandler):
    """A server that scores every token with minus its id over 100, and lists those after it as less likely. left:
    requests that it answers before it is down."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids = body["prompt"]
        with self.server.lock:
            self.server.left -= 1
            is_up = self.server.left >= 0
        listed = [None, *({str(i): {"logprob": -i / 100}, "7777": {"logprob": -9.0}} for i in ids[1:])]
        if count := min(body["prompt_logprobs"], self.server.most):
            # The token itself comes first, whether it is one of the likeliest or not.
            listed[1:] = [{str(i): {"logprob": -7.0}} | self.likeliest(i, count) for i in ids[1:]]
        answer = json.dumps({"choices": [{"prompt_logprobs": listed}]}) if is_up else "no memory\nis left"
        self.send_response(200 if is_up else self.server.status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def likeliest(self, token, count):
        return {str((token + j) % 40 + 1): {"logprob": -1.5 - j} for j in range(count)}

    def log_message(self, *_):
        """Nothing."""


class StubServer(ThreadingHTTPServer):
    request_queue_size = 64


@pytest.fixture
def stub():
    with StubServer(("127.0.0.1", 0), Stub) as server:
        server.lock, server.left, server.status, server.most = threading.Lock(), 10**6, 503, 20
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def on_two_ranks(run, folder):
    return dataclasses.replace(run, output_dir=str(folder), deploy=dataclasses.replace(run.deploy, num_train_gpus=2))


def test_a_run_has_the_bits_of_one_with_the_teacher_loaded(tmp_path, folders, url):
    """One served teacher, also on two ranks, and one of two."""
    runs = [
        taught_run(tmp_path / name, {"model": folders["math"]} | keys, **SIZES)
        for name, keys in (("loaded", {}), ("served", {"url": url}))
    ]
    for run in runs:
        run_grpo(run)
    assert [row["teacher_kl"] for row in metrics_of(runs[0])] == [row["teacher_kl"] for row in metrics_of(runs[1])]
    both = on_two_ranks(runs[1], tmp_path / "two")
    in_threads.run(lambda communicator: run_grpo(both, communicator=communicator), 2)
    assert hash_of(runs[0]) == hash_of(runs[1]) == hash_of(both)
    # A loaded teacher takes memory, a served one none.
    assert "teacher" in Planner(runs[0], False, 1 << 34).plan().regions
    assert "teacher" not in Planner(runs[1], False, 1 << 34).plan().regions
    hashes = []
    for name, keys in (("two-loaded", {}), ("two-served", {"urls": {"math": url}})):
        teacher = {"models": folders} | keys
        run = taught_run(tmp_path / name, teacher, column=("math", "code"), max_steps=2)
        run_grpo(run)
        hashes.append(hash_of(run))
    assert hashes[0] == hashes[1]


TOP = {"loss_top_k": 4, "loss_top_k_of": "teacher"}


@pytest.mark.parametrize("beta, add_tail", [(0.0, True), (0.5, True), (1.0, False)])
def test_distillation_is_that_from_a_loaded_teacher(tmp_path, folders, url, beta, add_tail):
    """Over the same tokens; the rounding of the tail differs."""
    settings = TOP | SIZES | {"beta": beta, "loss_add_tail": add_tail}
    losses = []
    for name, keys in (("loaded", {}), ("served", {"url": url})):
        run = distill_run(tmp_path / name, {"model": folders["math"]} | keys, **settings)
        run_distill(run)
        losses.append([row["loss"] for row in metrics_of(run)])
    assert min(losses[0]) > 1e-3
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_distillation_from_two_teachers_one_of_which_is_served(tmp_path, folders, url):
    """The loss of two that are loaded, and the bits of one rank on two."""
    settings, losses = TOP | SIZES | {"per_device_train_batch_size": 4}, []
    for name, keys in (("loaded", {}), ("served", {"urls": {"math": url}})):
        run = distill_run(tmp_path / name, {"models": folders} | keys, **settings)
        run = with_column(run, "teacher", lambda row: ("math", "code")[int(row["answer"]) % 2])
        run_distill(run)
        losses.append([row["loss"] for row in metrics_of(run)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    both = on_two_ranks(run, tmp_path / "two").resolved()
    in_threads.run(lambda communicator: run_distill(both, communicator=communicator), 2)
    assert hash_of(both) == hash_of(run)


def test_a_served_teacher_sees_its_own_prompt(tmp_path, folders, url):
    """The loss is that of a loaded one, which sees a demonstration, too."""
    losses = []
    for name, keys in (("loaded", {}), ("served", {"url": url})):
        teacher = {"model": folders["math"], "prompt_column": "shown"} | keys
        run = distill_run(tmp_path / name, teacher, **TOP | SIZES | {"max_steps": 1})
        run = with_column(run, "shown", lambda row: f"7777777 {row['prompt']}")
        run_distill(run)
        losses += [row["loss"] for row in metrics_of(run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_listings_of_turns(stub):
    """Of each target the likeliest tokens in its place, without the token itself unless it is one of them."""
    rollouts = Rollouts(
        token_ids=np.int32([1, 2, 3, 4, 5]), prompt_lengths=np.int32([2]), completion_lengths=np.int32([3]),
        loss_mask=np.ones(2, np.float32), rollout_logprobs=np.zeros(2, np.float32),
        advantages=np.zeros(2, np.float32), old_logprobs=np.zeros(0, np.float32),
        ref_logprobs=np.zeros(0, np.float32), drawn=np.array([1, 0, 1], bool), target_lengths=np.int32([2]),
    )  # fmt: skip
    (found,) = ServedTeacher(stub.url, 5.0).listings([rollouts], 3)
    assert found["token_id"].tolist() == [[4, 5, 6], [6, 7, 8]]
    np.testing.assert_array_equal(found["logprob"], np.float32([[-1.5, -2.5, -3.5]] * 2))


def assert_resumed_where_the_server_was_lost(stub, train, whole, folder):
    """A run of three steps that loses its server in the third ends with one line and goes on to the hash of `whole`."""
    train(whole)
    asked, run = 10**6 - stub.left, dataclasses.replace(whole, output_dir=str(folder))
    stub.left, stub.status = 1 + (asked - 1) * 2 // 3 + 2, 410
    with pytest.raises(UserError, match=rf"^teacher {stub.url}: status 410: no memory is left$"):
        train(run)
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "step-2"
    stub.left = 10**6
    train(run, resume=True)
    assert hash_of(run) == hash_of(whole)


def test_a_server_that_stays_down_ends_distillation_with_one_line(tmp_path, folders, stub):
    """The last complete step is kept, and the run goes on from it with the same bits."""
    keys = {"model": folders["math"], "url": stub.url, "timeout_s": 300.0}
    whole = distill_run(tmp_path / "whole", keys, max_steps=3, save_steps=1, **TOP)
    assert_resumed_where_the_server_was_lost(stub, run_distill, whole, tmp_path / "run")


def test_what_distillation_refuses_of_a_server(tmp_path, folders, stub):
    config = {"model": folders["math"], "url": stub.url}
    for train, message in (
        ({"seq_kd": True, "lmbda": 0.5}, r"teacher\.url: .* leave out train\.seq_kd"),
        ({}, r"teacher\.url: a server lists its likeliest tokens, never all: set train\.loss_top_k"),
        (
            {"loss_top_k": 4},
            r"teacher\.url: .* train\.loss_top_k_of must be 'teacher' where train\.beta is above 0 \(1\)",
        ),
        ({"loss_top_k": 4, "loss_top_k_of": "student", "beta": 0.0}, r"teacher\.url: a server lists its own likeliest"),
        (TOP | {"temperature": 0.7}, "a server scores at temperature 1, and train.temperature is 0.7"),
    ):
        with pytest.raises(ConfigError, match=message):
            distill_run(tmp_path / "run", config, **train)
    run = distill_run(tmp_path / "run", config, **TOP)
    # A server that lists fewer, before a step is taken.
    stub.most = 2
    config = {"timeout_s": 1.0}
    with pytest.raises(UserError, match=rf"^teacher {stub.url}: .*no prompt_logprobs of the 4 likeliest tokens$"):
        run_distill(dataclasses.replace(run, teacher=dataclasses.replace(run.teacher, **config)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not metrics_of(run)


def test_targets_of_conversations_and_of_turns(stub):
    """Tokens after the first context that were drawn, of each conversation by itself."""
    rollouts = Rollouts(
        token_ids=np.int32([1, 2, 3, 4, 5, 6, 7, 8]), prompt_lengths=np.int32([2]), completion_lengths=np.int32([6]),
        loss_mask=np.ones(4, np.float32), rollout_logprobs=np.zeros(4, np.float32),
        advantages=np.zeros(4, np.float32), old_logprobs=np.zeros(0, np.float32),
        ref_logprobs=np.zeros(0, np.float32), drawn=np.array([1, 0, 1, 0, 1, 1], bool),
        target_lengths=np.int32([4]), num_rows=np.int32([2]), row_lengths=np.int32([5, 3]),
    )  # fmt: skip
    (found,) = ServedTeacher(stub.url, 5.0).logprobs([rollouts])
    np.testing.assert_array_equal(found, np.float32([-0.03, -0.05, -0.07, -0.08]))


def test_a_server_that_is_down_for_a_moment_costs_nothing_else(stub):
    stub.left = 0
    timer = threading.Timer(0.3, lambda: setattr(stub, "left", 100))
    timer.start()
    ServedTeacher(stub.url, 30.0).start(50)
    timer.join()
    assert stub.left == 99
    stub.left = 0
    with pytest.raises(UserError, match=rf"^teacher {stub.url}: status 503: no memory is left$"):
        ServedTeacher(stub.url, 1.5).start(50)
    assert stub.left <= -2


def test_a_server_that_stays_down_ends_the_run_with_one_line(tmp_path, folders, stub):
    """The last complete step is kept, and the run goes on from it with the same bits."""
    keys = {"model": folders["math"], "url": stub.url, "timeout_s": 300.0}
    whole = taught_run(tmp_path / "whole", keys, max_steps=3)
    assert_resumed_where_the_server_was_lost(stub, run_grpo, whole, tmp_path / "run")


def test_what_is_refused(tmp_path, folders, stub):
    config = {"model": folders["math"], "url": stub.url}
    for keys, message in (
        ({"url": stub.url}, "teacher.url needs teacher.model"),
        (config | {"url": "http://:8000/v1"}, "^teacher.url must have a host, and a port that is a number up to 65535"),
        (config | {"url": "localhost:8000"}, "^teacher.url must begin with http:// or https://, got 'localhost:8000'"),
        ({"models": folders, "urls": {"maths": stub.url}}, "^teacher.urls: maths is none of teacher.models "),
    ):
        with pytest.raises(ConfigError, match=message):
            taught_run(tmp_path / "run", keys)
    for make, message in (
        (lambda: grpo_run(tmp_path / "run", temperature=0.7), "scores at temperature 1, and train.temperature is 0.7"),
        (lambda: rloo_run(tmp_path / "run", vllm_structured_outputs_regex="[a-z]+"), "without the grammar of train."),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(make(), teacher=TeacherConfig(**config))
    # Before a step is taken.
    stub.left, stub.status = 0, 404
    run = dataclasses.replace(rloo_run(tmp_path / "run"), teacher=TeacherConfig(**config))
    with pytest.raises(UserError, match=rf"^teacher {stub.url}: status 404: no memory is left$"):
        run_rloo(run)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not metrics_of(run)
