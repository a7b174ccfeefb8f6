"""Judges: rewards from a server of this package, from answers as models write them, and from one that is down."""

import json
import socket
import threading
import time
import zlib
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from rlnumba.config import AsyncConfig, DataConfig, GRPOConfig, GRPORun, RewardsConfig, load_run
from rlnumba.config.sections.rewards import JudgeConfig
from rlnumba.config.writing import to_toml
from rlnumba.engine import Engine
from rlnumba.errors import ConfigError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.rewards import judges
from rlnumba.rewards.calling import RewardError
from rlnumba.rewards.loading import load_rewards
from rlnumba.runtime import device
from tests.engine.test_llm import make_model
from tests.serve.conftest import TEMPLATE, running
from tests.serve.test_grammar import FOLDER
from tests.trainers.test_agents import agent_run, completions_of, train
from tests.trainers.test_resume import elsewhere, hash_of, lines_written, start

RUBRIC = "Short answers are better."
PROMPTS = ["How long?"] * 3
TEXTS = ["a", "bb", "ccc"]


@contextmanager
def answering(answer_to):
    """(URL, bodies that came) of a server whose answers are answer_to(content): (status, text)."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body | {"key": self.headers["authorization"], "path": self.path})
            status, text = answer_to(body["messages"][0]["content"])
            usage = {"prompt_tokens": 10, "completion_tokens": 2}
            data = json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/", bodies
        server.shutdown()
        thread.join()


@contextmanager
def rewards_of(url, errors="raise", **table):
    table = {"url": url, "rubric": RUBRIC, "retries": 0} | table
    rewards = load_rewards(RewardsConfig(funcs=["judge:short"], judges={"short": table}, reward_errors=errors))
    # In this process, as where a worker's are not wanted: the same judge.
    rewards.specs = [None]
    yield rewards
    rewards._workers.close()


def scored(rewards, texts=TEXTS, prompts=PROMPTS):
    return rewards.score(list(prompts), list(texts), [[1]] * len(texts), {})


def answer_part(content):
    """The answer that a request of form score is about."""
    return content.split("Answer:\n")[1].split("\n\n")[0]


def test_scores_become_values_and_are_kept_and_counted(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    said = {"a": "Fine.\nScore: **10**", "bb": "Score: 3, no.\n**Score: 5**", "ccc": "I cannot say."}
    prices = {"prompt_price": 1e5, "completion_price": 1e6, "scale": [0, 10]}
    with answering(lambda content: (200, said[answer_part(content)])) as (url, bodies):
        with rewards_of(url, model="m", api_key_env="JUDGE_KEY", **prices) as rewards:
            found = scored(rewards)
            np.testing.assert_array_equal(found.values, [[1.0], [0.5], [np.nan]])
            again = scored(rewards, ["bb", "a", "bb"])
            np.testing.assert_array_equal(again.values, [[0.5], [1.0], [0.5]])
        with rewards_of(url) as rewards:
            # Equal completions of a group are asked about once.
            equal = scored(rewards, ["bb", "bb"], ["How long?"] * 2).metrics
            assert (equal["judge/short/requests"], equal["judge/short/cached"]) == (0.5, 0.5)
            assert bodies.pop()["path"] == "/v1/chat/completions"
    assert len(bodies) == 3 and {body["path"] for body in bodies} == {"/v1/chat/completions"}
    assert {(body["model"], body["key"], body["max_tokens"]) for body in bodies} == {("m", "Bearer secret", 512)}
    content = bodies[0]["messages"][0]["content"]
    assert content.startswith(f"{RUBRIC}\n\nTask:\nHow long?\n\nAnswer:\n") and "from 0 to 10" in content
    counted = {name.removeprefix("judge/short/"): value for name, value in found.metrics.items()}
    counted.pop("latency_s")
    assert counted == {
        **{"requests": 1.0, "cached": 0.0, "unparsed": 1 / 3, "prompt_tokens": 10.0, "completion_tokens": 2.0},
        "cost": pytest.approx(3.0),
    }
    assert again.metrics["judge/short/requests"] == 0 and again.metrics["judge/short/cached"] == 1.0


def test_messages_of_a_prompt_keep_their_roles():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    with answering(lambda content: (200, "Score: 1")) as (url, bodies), rewards_of(url) as rewards:
        scored(rewards, ["a"], [messages])
    assert "Task:\nsystem: s\n\nuser: u\n\nAnswer:\na\n\n" in bodies[0]["messages"][0]["content"]


def test_pairs_are_each_compared_once():
    """The shorter one wins, and a tie is half of a win."""

    def answer(content):
        a, b = (content.split(f"Answer {name}:\n")[1].split("\n\n")[0] for name in "AB")
        return 200, "Better: " + ("A" if len(a) < len(b) else "B" if len(b) < len(a) else "tie")

    with answering(answer) as (url, bodies), rewards_of(url, form="pairwise") as rewards:
        assert scored(rewards, ["bb", "a", "cc", "dddd"], ["p"] * 4).values[:, 0].tolist() == [0.5, 1.0, 0.5, 0.0]
        assert len(bodies) == 6
        # A judge that always prefers the first place: no completion has it each time.
    with answering(lambda content: (200, "Better: A")) as (url, bodies), rewards_of(url, form="pairwise") as rewards:
        assert scored(rewards, TEXTS).values[:, 0].tolist() == [0.5, 0.5, 0.5]
        assert len(bodies) == 3
    with answering(lambda content: (200, "Both.")) as (url, bodies):
        with rewards_of(url, form="pairwise", opponents=1) as rewards:
            assert np.isnan(scored(rewards, [*TEXTS, "d"], ["p"] * 4).values).all() and len(bodies) == 4
    # More opponents than there are: none meets itself.
    with answering(answer) as (url, bodies), rewards_of(url, form="pairwise", opponents=5) as rewards:
        assert scored(rewards).values[:, 0].tolist() == [1.0, 0.5, 0.0] and len(bodies) == 3


def test_a_group_is_one_request():
    with (
        answering(lambda content: (200, "Scores: 1, 10, 5.5")) as (url, bodies),
        rewards_of(url, form="group") as rewards,
    ):
        assert scored(rewards).values[:, 0].tolist() == [0.0, 1.0, 0.5]
        assert "Answer 2:\nbb\n\nAnswer 3:\nccc\n\n" in bodies[0]["messages"][0]["content"] and len(bodies) == 1
        # Two numbers for four answers are none.
        assert np.isnan(scored(rewards, [*TEXTS, "d"], ["p"] * 4).values).all()


def test_a_server_of_this_package_judges():
    """It forces the form of the verdict, whatever its model, in all three forms and from a worker process."""
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(FOLDER)
    tokenizer.templates = {"default": TEMPLATE.read_text()}
    engine = Engine(make_model(vocab_size=500, eos_token_id=[2, 6], max_position_embeddings=2000), tokenizer)
    config = {"structured_outputs": "vllm", "scale": [1, 5], "temperature": 0.0}
    with running(engine, tokenizer) as process:
        for form in ("score", "pairwise", "group"):
            with rewards_of(process.url + "/v1", form=form, **config) as rewards:
                found = scored(rewards, TEXTS[:2], PROMPTS[:2])
                allowed = (0.0, 0.5, 1.0) if form == "pairwise" else (0.0, 0.25, 0.5, 0.75, 1.0)
                assert all(value in allowed for value in found.values[:, 0])
                assert found.metrics["judge/short/prompt_tokens"] > 0
        table = {"url": process.url + "/v1", "rubric": RUBRIC, **config}
        with_workers = load_rewards(RewardsConfig(funcs=["judge:short"], judges={"short": table}))
        assert with_workers.all_in_workers
        assert scored(with_workers, TEXTS[:2], PROMPTS[:2]).values[:, 0].tolist() == pytest.approx(
            scored(with_workers, TEXTS[:2], PROMPTS[:2]).values[:, 0]
        )
        with_workers._workers.close()
    # The server has ended.
    with (
        rewards_of(table["url"], timeout_s=5.0) as rewards,
        pytest.raises(RewardError, match=r"^reward short: judge .*$"),
    ):
        scored(rewards)


def test_an_openai_server_gets_a_response_format():
    with answering(lambda content: (200, '{"score": 10}')) as (url, bodies):
        with rewards_of(url, structured_outputs="openai") as rewards:
            assert scored(rewards, ["a"], ["p"]).values.tolist() == [[1.0]]
    form = bodies[0]["response_format"]
    assert form["type"] == "json_schema" and form["json_schema"]["strict"]
    assert form["json_schema"]["schema"] == {
        "type": "object",
        "properties": {"score": {"type": "integer", "minimum": 1, "maximum": 10}},
        "required": ["score"],
        "additionalProperties": False,
    }


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_judge_that_is_down_or_slow_is_one_line(monkeypatch):
    monkeypatch.setattr(judges, "RETRY_S", 0.01)
    url = f"http://127.0.0.1:{free_port()}/v1"
    with (
        rewards_of(url, retries=1) as rewards,
        pytest.raises(RewardError, match=r"^reward short: judge http.*refused$"),
    ):
        scored(rewards)
    done = threading.Event()
    with answering(lambda content: (done.wait(5), (200, "Score: 1"))[1]) as (url, _):
        with rewards_of(url, timeout_s=0.2) as rewards:
            with pytest.raises(RewardError, match=r"^reward short: judge http\S+: no answer within 0\.2 s$"):
                scored(rewards)
            done.set()
    with answering(lambda content: (401, "no")) as (url, bodies), rewards_of(url, retries=3) as rewards:
        with pytest.raises(RewardError, match="status 401: "):
            scored(rewards, ["a"], ["p"])
        assert len(bodies) == 1


def test_skipped_failures_lose_nothing(monkeypatch):
    """What was answered is not asked again, a failure is tried again, and only its completion has no value."""
    monkeypatch.setattr(judges, "RETRY_S", 0.01)
    asked = []

    def answer(content):
        asked.append(answer_part(content))
        return (500, "") if asked[-1] == "bb" or asked == ["a"] else (200, "Score: 10")

    with answering(answer) as (url, _), rewards_of(url, "skip", concurrency=1, retries=1) as rewards:
        found = scored(rewards)
    np.testing.assert_array_equal(found.values, [[1.0], [np.nan], [1.0]])
    assert found.errors == {"short": 1}
    assert [asked.count(text) for text in TEXTS] == [2, 4, 1]


@pytest.mark.parametrize("form, verdict", [("pairwise", "Better: A"), ("group", "Scores: 10, 1, 10")])
def test_a_group_that_is_compared_is_asked_again_as_a_whole(monkeypatch, form, verdict):
    """A completion alone has no others that it could be compared with."""
    statuses = [500]

    def answer(content):
        return statuses.pop() if statuses else 200, verdict

    with answering(answer) as (url, bodies), rewards_of(url, "skip", form=form, concurrency=1) as rewards:
        found = scored(rewards)
        values = {"pairwise": [0.5, 0.5, 0.5], "group": [1.0, 0.0, 1.0]}[form]
        assert found.values[:, 0].tolist() == values and not found.errors
        assert len(bodies) == {"pairwise": 4, "group": 2}[form]
        statuses += [500] * 8
        failed = scored(rewards, ["other", "texts", "here"])
        assert np.isnan(failed.values).all() and failed.errors == {"short": 3}


def test_failures_in_a_worker_are_tried_twice_and_no_more():
    """A judge that is slow would else cost its time limit for one completion after the other."""
    with answering(lambda content: (500, "")) as (url, bodies):
        table = {"url": url, "rubric": RUBRIC, "retries": 0}
        config = RewardsConfig(funcs=["judge:short"], judges={"short": table}, reward_errors="skip")
        rewards = load_rewards(config)
        try:
            assert scored(rewards).errors == {"short": 3}
        finally:
            rewards._workers.close()
    assert len(bodies) == 6


def test_a_key_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    message = r"^rewards\.judges\.short\.api_key_env: the environment has no variable JUDGE_KEY$"
    with pytest.raises(ConfigError, match=message), rewards_of("http://a", api_key_env="JUDGE_KEY"):
        pass


@pytest.mark.skipif(device.name() != "cpu", reason="small runs of the cpu device")
@pytest.mark.parametrize("options", [None, AsyncConfig(max_staleness=0)])
def test_a_run_that_is_killed_while_it_is_judged_goes_on_with_the_same_weights(options, tmp_path):
    """Requests under way are lost, and sent again."""
    waiting, goes_on = [], threading.Event()

    def answer(content):
        text = answer_part(content)
        if next((tmp_path / "run" / "checkpoints").glob("step-*"), None) and not goes_on.is_set():
            waiting.append(text)
            goes_on.wait(60)
        return 200, f"Score: {1 + zlib.crc32(text.encode()) % 10}"

    with answering(answer) as (url, _):
        judge = {"url": url, "rubric": RUBRIC, "cache": 1, "concurrency": 4}
        keys = {"per_device_train_batch_size": 8, "save_steps": 1, "max_steps": 4, "temperature": 1.5}
        run = agent_run(tmp_path / "run", tools=False, **keys)
        run = replace(run, rewards=RewardsConfig(funcs=["judge:short"], judges={"short": judge}), asynchronous=options)
        process, deadline = start("grpo", run), time.monotonic() + 120
        while len(waiting) < 2:
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.02)
        process.kill()
        process.communicate(timeout=30)
        assert 1 <= lines_written(run) < 4
        goes_on.set()
        train(run, resume=True)
        whole = elsewhere(run, tmp_path / "whole")
        train(whole)
    assert hash_of(run) == hash_of(whole) and completions_of(run) == completions_of(whole)
    assert len({line["short"] for line in completions_of(run)}) > 3


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"url": "http://a/v1"}, r"rewards\.judges\.j\.rubric must be set"),
        ({"rubric": "r"}, r"rewards\.judges\.j\.url must be set"),
        ({"url": "a", "rubric": "r"}, r"rewards\.judges\.j\.url must begin with http:// or https://, got 'a'"),
        ({"url": "http://", "rubric": "r"}, r"rewards\.judges\.j\.url must have a host, and a port .*, got 'http://'"),
        ({"url": "http://a:port/v1", "rubric": "r"}, r"rewards\.judges\.j\.url must have a host, and a port that"),
        ({"url": "http://a:99999/v1", "rubric": "r"}, r"rewards\.judges\.j\.url must have a host, and a port that"),
        ({"url": "http://a", "rubric": "r", "forms": 1}, r"rewards\.judges\.j\.forms is no key of a judge; its keys"),
        ({"url": "http://a", "rubric": "r", "form": "x"}, r"rewards\.judges\.j\.form must be one of score, pairwise"),
        ({"url": "http://a", "rubric": "r", "scale": [5, 1]}, r"rewards\.judges\.j\.scale must be two integers"),
        ({"url": "http://a", "rubric": "r", "timeout_s": 0}, r"rewards\.judges\.j\.timeout_s must be a number above 0"),
        ({"url": "http://a", "rubric": "r", "cache": True}, r"rewards\.judges\.j\.cache must be an integer from 0"),
        (3, r"rewards\.judges\.j must be a table, got 3"),
    ],
)
def test_mistakes_are_named(table, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        RewardsConfig(funcs=["judge:j"], judges={"j": table})


def test_a_judge_without_a_table_is_named():
    with pytest.raises(
        ConfigError, match=r"^rewards\.funcs: judge:k needs the table \[rewards\.judges\.k\]; judges are"
    ):
        RewardsConfig(funcs=["judge:k"], judges={"j": {"url": "http://a", "rubric": "r"}})
    config = JudgeConfig.of("j", {"url": "http://a", "rubric": "r", "scale": [0, 3]})
    assert judges.find_judge(judges.Judge(config).spec, {}).config == config


def test_the_table_is_written_with_the_run(tmp_path):
    table = {"url": "http://a/v1", "rubric": 'Two\n"lines".', "scale": [0, 3], "retries": 0}
    rewards = RewardsConfig(funcs=["judge:j"], judges={"j": table})
    run = GRPORun(
        model="m",
        output_dir="o",
        data=DataConfig(train="t.jsonl"),
        rewards=rewards,
        train=GRPOConfig(num_generations=2),
    )
    (tmp_path / "config.toml").write_text(to_toml(run))
    assert load_run("grpo", [tmp_path / "config.toml"]).rewards == rewards


NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0}


@pytest.mark.parametrize(
    "pattern, text, value",
    [
        (judges.SCORE, "**Score**: 7", "7"),
        (judges.SCORE, "**Score:** 7/10", "7"),
        (judges.SCORES, "**Scores**: 7, 8", "7, 8"),
        (judges.BETTER, "**Better** : **A**", "A"),
    ],
)
def test_a_verdict_may_be_bold(pattern, text, value):
    assert pattern.findall(text) == [value]


def test_answers_of_another_form():
    blocks = [{"type": "text", "text": "Score: 7"}]
    answer = {"choices": [{"message": {"content": blocks}}], "usage": {"prompt_tokens": 3}}
    assert judges.answer_of(json.dumps(answer)) == ("Score: 7", NO_USAGE | {"prompt_tokens": 3})
    choices = [{"message": {"content": "Score: 7"}}]
    for wrong in (
        {"choices": [{"message": {"content": 7}}]},
        {"choices": choices, "usage": [1]},
        {"choices": choices, "usage": {"prompt_tokens": "many"}},
        {"choices": []},
        [1],
    ):
        with pytest.raises(ValueError, match="^an answer that is none of /chat/completions$"):
            judges.answer_of(json.dumps(wrong))
    with pytest.raises(ValueError, match="^an answer that is none of /chat/completions$"):
        judges.answer_of(b"<html>")


@pytest.mark.parametrize("answer", ['{"score": 1' + "0" * 400 + "}", "[" * 5000, '{"score": [1]}', '{"score": NaN}'])
def test_what_is_no_score_is_none(answer):
    table = {"url": "http://127.0.0.1:1/v1", "rubric": RUBRIC, "structured_outputs": "openai"}
    judge = judges.Judge(JudgeConfig.of("short", table))
    assert judge._value(judge._verdict(answer, "score", judges.SCORE)) is None


def test_an_answer_may_have_no_text():
    for message in ({"content": None}, {"content": ""}, {}):
        assert judges.answer_of(json.dumps({"choices": [{"message": message}]})) == ("", NO_USAGE)
    assert judges.conversation([{"role": "user", "content": "u"}]) == "u"
    assert judges.content_text([{"type": "text", "text": text} for text in ("Blue", "berry")]) == "Blueberry"


def test_the_answers_asked_for_last_are_kept():
    judge = judges.Judge(JudgeConfig.of("j", {"url": "http://a", "rubric": "r", "cache": 2}))
    for asked in ("a", "b", "a", "c"):
        judge._keep({asked: asked})
    assert list(judge.answers) == ["a", "c"]
