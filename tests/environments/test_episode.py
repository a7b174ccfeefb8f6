"""Episodes of scripted turns: contexts, masks, ends, what becomes of calls, and environments."""

import copy
import json
import pathlib

import numpy as np
import pytest

from rlnumba.data.prompts import Prompt
from rlnumba.engine.sequence import Completion, SamplingParams
from rlnumba.environments.episode import with_observation
from rlnumba.environments.pool import EnvironmentFailure
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.rewards.calling import Scores
from rlnumba.sampling.samples import as_generation, tool_metrics
from tests.environments.golden import FOLDER, tokenizer_with
from tests.environments.scripted import agents_with, play
from tests.environments.test_turns import with_special

MODEL = pathlib.Path(__file__).parents[2] / "examples" / "tools" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(MODEL)


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


async def fail(text: str) -> str:
    """Fail.

    Args:
        text: The error's.
    """
    raise ValueError(text)


def call(name="multiply", arguments='{"a": 3, "b": 4}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def episode_of(agents, columns=None, content="3*4"):
    prompt = [{"role": "user", "content": content}]
    ids = agents.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tools=agents.toolsets[None].schemas)
    return agents.episode(Prompt(prompt, ids, columns or {}, "rows.jsonl:1"), 0, SamplingParams())


def played(tokenizer, texts, functions=(multiply, fail), limits=None, **given):
    """(Completion, its Transcript, contexts) of scripted turns."""
    agents = agents_with(tokenizer, functions, **given)
    completion, contexts = play(tokenizer, episode_of(agents), texts, **limits or {})
    agents.close()
    return completion, completion.episode.value, contexts


def assistant(content, *calls):
    message = {"role": "assistant", "content": content}
    listed = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return message | ({"tool_calls": listed} if calls else {})


def tool(name, content):
    return {"role": "tool", "name": name, "content": content}


TWELVE = ("multiply", {"a": 3, "b": 4})


def test_a_call_and_its_result(tokenizer):
    completion, transcript, contexts = played(tokenizer, ["so" + call(), "12"])
    assert transcript.completion == [assistant("so", TWELVE), tool("multiply", "12"), assistant("12")]
    assert (transcript.ended, transcript.turns, transcript.failures, completion.finish_reason) == ("stop", 2, 0, "stop")
    drawn, suffix = tokenizer.encode("so" + call()) + [0], tokenizer.encode("<tool>12<end><assistant>")
    end = tokenizer.encode("12") + [0]
    assert list(completion.token_ids) == drawn + suffix + end
    assert completion.mask.tolist() == [True] * len(drawn) + [False] * len(suffix) + [True] * len(end)
    assert contexts[1] == contexts[0] + drawn + suffix
    assert np.array_equal(completion.array("logprobs"), np.where(completion.mask, np.float32(-0.5), np.float32(0)))


def test_calls_of_a_turn_have_their_results_in_order(tokenizer):
    turn = (
        call("fail", '{"text": "no"}')
        + call()
        + call("nothing", "{}")
        + call("multiply", "[1]")
        + call("multiply", "null")
    )
    _, transcript, _ = played(tokenizer, [turn, "done"], limits={"max_tokens": 600, "max_model_len": 900})
    contents = [message["content"] for message in transcript.completion if message["role"] == "tool"]
    assert contents == [
        "{'error': 'no'}",
        "12",
        "{'error': 'Tool nothing not found.'}",
        "{'error': 'arguments must be an object, got list'}",
        "{'error': \"multiply() missing 2 required positional arguments: 'a' and 'b'\"}",
    ]
    assert [record.name for record in transcript.calls] == ["fail", "multiply", "nothing", "multiply", "multiply"]
    assert transcript.failures == 4 and [record.unknown for record in transcript.calls].count(True) == 1
    assert transcript.calls_of_turns == [5]


def test_a_turn_without_calls_ends_it(tokenizer):
    completion, transcript, _ = played(tokenizer, ["12"])
    assert completion.mask is None and transcript.completion == [assistant("12")] and transcript.turns == 1
    _, transcript, _ = played(tokenizer, ["12~"])
    assert transcript.ended == "length"


def test_iterations_end_it(tokenizer):
    _, transcript, _ = played(tokenizer, [call(), call()], iterations=1)
    assert transcript.ended == "iterations" and transcript.turns == 2 and len(transcript.calls) == 1
    assert transcript.completion[-1] == assistant("", TWELVE)
    # As in TRL's loop, whose body 0 never enters: the calls of the first turn do not run.
    completion, transcript, contexts = played(tokenizer, [call()], iterations=0)
    assert transcript.ended == "iterations" and transcript.turns == len(contexts) == 1 and not transcript.calls
    assert transcript.completion == [assistant("", TWELVE)] and completion.mask is None


BROKEN = '<tool_call>\n{"name": \n</tool_call>'


def test_malformed_calls_stop(tokenizer):
    completion, transcript, _ = played(tokenizer, [call() + BROKEN])
    assert transcript.ended == "malformed" and transcript.malformed and not transcript.calls
    assert transcript.completion == [assistant(call() + BROKEN)]


def test_malformed_calls_get_an_error_as_feedback(tokenizer):
    limits = {"max_tokens": 300, "max_model_len": 400}
    _, transcript, _ = played(tokenizer, [BROKEN + call(), "12"], malformed_calls="feedback", limits=limits)
    first, error, result, last = transcript.completion
    assert first == assistant("", TWELVE) and result == tool("multiply", "12") and last == assistant("12")
    assert error["role"] == "tool" and "cannot be read" in error["content"]
    assert transcript.malformed and len(transcript.calls) == 1 and transcript.ended == "stop"


def test_what_ends_a_turn_is_not_in_its_text(tokenizer):
    agents = agents_with(tokenizer, [multiply])
    other = next(i for i in tokenizer.special_ids.values() if i != tokenizer.eos_token_id)
    for reason, end, content in (("stop", other, "12"), ("length", other, f"12{tokenizer.decode([other], False)}")):
        ids = [*tokenizer.encode("12"), end]
        turn = Completion(ids, [-0.5] * len(ids), reason, "12", [3] * len(ids))
        assert episode_of(agents)._parse(turn, [5, *ids]).content == content
    agents.close()


@pytest.mark.parametrize(
    "text, stop, content",
    [
        ("one two one", "one", "one two "),  # the first one was within min_tokens
        (f"{call()} END", "END", ""),
        ("say foo<tools>bar", "foobar", "say foo<tools>bar"),  # the engine's text has no special tokens
    ],
)
def test_a_stop_string_is_cut_where_it_has_ended_the_turn(tokenizer, text, stop, content):
    agents = agents_with(tokenizer, [multiply])
    ids = tokenizer.encode(text, add_special_tokens=False)
    turn = Completion(ids, [-0.5] * len(ids), "stop", "", [3] * len(ids), stop_reason=stop)
    parsed = episode_of(agents)._parse(turn, [5, *ids])
    assert parsed.content == content and len(parsed.calls) == text.count("multiply")
    agents.close()


def test_a_tokenizer_whose_turns_have_no_end(tokenizer):
    other = copy.copy(tokenizer)
    other.special_tokens = tokenizer.special_tokens | {"eos_token": "1"}
    with pytest.raises(UserError, match="eos_token '1' is not a special token"):
        agents_with(other, [multiply])


def test_a_turn_ends_where_the_template_begins_the_results(tmp_path):
    """GLM's, with a token at which the model stops: nothing is put between it and the results."""
    tokenizer, ids = with_special("glm4moe", tmp_path / "model", "<|user|>", "<|observation|>", "<|assistant|>")
    config = json.loads((MODEL / "config.json").read_text()) | {"vocab_size": 1000, "eos_token_id": [0, *ids[:2]]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    agents = agents_with(tokenizer, [multiply])
    text = "<think></think>\n<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n"
    text += "<arg_key>b</arg_key>\n<arg_value>4</arg_value>\n</tool_call>"
    for end in ("<|observation|>~", "<|user|>~"):
        limits = {"max_tokens": 500, "max_model_len": 4000, "end_ids": ids[:2]}
        completion, contexts = play(tokenizer, episode_of(agents), [text + end, "12<|user|>~"], **limits)
        transcript = completion.episode.value
        assert transcript.completion == [assistant("", TWELVE), tool("multiply", "12"), assistant("12")]
        added = tokenizer.decode(contexts[1][len(contexts[0]) :], skip_special_tokens=False)
        between = "" if end == "<|observation|>~" else "<|observation|>"
        assert added == f"{text}{end[:-1]}{between}\n<tool_response>\n12\n</tool_response><|assistant|>"
    agents.close()


def test_a_stop_that_is_no_eos_is_followed_by_it(tokenizer):
    completion, transcript, _ = played(tokenizer, [call() + "~", "12"])
    suffix = tokenizer.encode("<end><tool>12<end><assistant>")
    begin = len(tokenizer.encode(call()))
    assert list(completion.token_ids)[begin : begin + len(suffix)] == suffix
    assert not completion.mask[begin : begin + len(suffix)].any() and transcript.ended == "stop"


@pytest.mark.parametrize("room, ended, turns", [(1, "length", 2), (0, "overflow", 1), (-1, "overflow", 1)])
def test_results_without_room_are_dropped_whole(tokenizer, room, ended, turns):
    used = len(tokenizer.encode(call())) + 1 + len(tokenizer.encode("<tool>12<end><assistant>"))
    texts = [call(), "12"][:turns]
    completion, transcript, contexts = played(tokenizer, texts, limits={"max_tokens": used + room})
    assert (transcript.ended, transcript.turns) == (ended, turns)
    assert transcript.completion[0] == assistant("", TWELVE) and len(transcript.calls) == 1
    assert completion.num_tokens == (used + 1 if turns == 2 else len(tokenizer.encode(call())) + 1)
    assert len(transcript.completion) == (3 if turns == 2 else 1)
    # The same by the longest sequence.
    limits = {"max_tokens": 99, "max_model_len": len(contexts[0]) + used + room}
    assert played(tokenizer, texts, limits=limits)[1].ended == ended


LOOP = json.loads((FOLDER / "tool_loop.json").read_text())


@pytest.mark.parametrize("record", LOOP["records"], ids=lambda record: "{} {}".format(*next(iter(record.items()))))
def test_limits_are_those_of_trls_loop(record):
    """To the token; but results that leave no room for a further token are dropped here, and kept there."""
    tokenizer, limit = tokenizer_with("qwen3"), record.get("max_completion_length")
    used, roles, ids, mask = LOOP["num_call_and_result"], record["roles"], record["ids"], record["mask"]
    limits = {"max_tokens": limit, "max_model_len": 10_000}
    if limit is None:
        prompt = played(tokenizer, [LOOP["last"]], limits={"max_tokens": 99, "max_model_len": 10_000})[2][0]
        limit = record["max_model_len"]
        limits = {"max_tokens": 9_000, "max_model_len": len(prompt) + limit}
        # The scripted turns of TRL's loop are not cut by the engine.
        ids, mask = ids[:limit], mask[:limit]
    elif limit == used:
        assert len(ids) == used and roles == ["assistant", "tool"]
        end = mask.index(0)
        roles, ids, mask = roles[:1], ids[:end], mask[:end]
    texts = [LOOP["call"], LOOP["last"]] if limit > used else [LOOP["call"]]
    completion, transcript, _ = played(tokenizer, texts, limits=limits)
    drawn = np.ones(len(ids)) if completion.mask is None else completion.mask
    assert list(completion.token_ids) == ids and list(drawn) == mask
    assert [message["role"] for message in transcript.completion] == roles
    assert (transcript.ended == "overflow") == (limit <= used)


class Guess:
    """A number between 1 and 9, known by the seed."""

    made = []

    def __init__(self):
        self.made.append(self)

    def reset(self, seed, **row):
        self.secret, self.row, self.tries = 1 + seed % 9, row, 0
        return f" try {row['hint']}"

    def guess(self, x: int) -> str:
        """Guess.

        Args:
            x: The guess.
        """
        self.tries += 1
        return "yes" if x == self.secret else "no"

    async def get_reward(self):
        return 1.0 / self.tries if self.tries else 0.0


def test_an_environment(tokenizer):
    agents = agents_with(tokenizer, factories={None: Guess}, rewards=())
    assert agents.tool_names == ["guess"] and agents.reward_classes == ["Guess"]
    prompt = [{"role": "user", "content": "go"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tools=agents.toolsets[None].schemas)
    episode = agents.episode(Prompt(prompt, ids, {"hint": 5}, ""), 0, SamplingParams(seed=1))
    secret = 1 + episode.row.seed % 9
    texts = [call("guess", '{"x": 0}'), call("guess", f'{{"x": {secret}}}'), "ok"]
    completion, _ = play(tokenizer, episode, texts, max_tokens=200, max_model_len=300)
    transcript = completion.episode.value
    assert transcript.prompt == [{"role": "user", "content": "go try 5"}]
    expected = tokenizer.apply_chat_template(
        transcript.prompt, add_generation_prompt=True, tools=agents.toolsets[None].schemas
    )
    assert completion.episode.prompt_token_ids == expected
    assert [m["content"] for m in transcript.completion if m["role"] == "tool"] == ["no", "yes"]
    assert (transcript.environment, transcript.class_name, transcript.reward) == ("Guess", "Guess", 0.5)
    assert transcript.reset_s >= 0 and transcript.reward_s >= 0
    # It is used again: the second rollout of the group has the same secret, and no new instance is made.
    assert Guess.made[-1].row == {"hint": 5, "prompt": prompt}
    count = len(Guess.made)
    again, _ = play(tokenizer, episode, [call("guess", f'{{"x": {secret}}}'), "ok"], index=1, max_tokens=100)
    assert again.episode.value.reward == 1.0 and len(Guess.made) == count
    agents.close()


@pytest.mark.parametrize(
    "content, observation, expected",
    [
        ("a", "b", "ab"),
        ("a", [{"type": "text", "text": "b"}], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        ([{"type": "text", "text": "a"}], "b", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        (None, "b", "b"),
        ("a", "b\udcff", "ab\ufffd"),
        (
            [{"type": "text", "text": "a"}],
            "\ud83d",
            [{"type": "text", "text": "a"}, {"type": "text", "text": "\ufffd"}],
        ),
        ("", [{"type": "text", "text": "\ud83d"}], [{"type": "text", "text": ""}, {"type": "text", "text": "\ufffd"}]),
    ],
)
def test_observations_go_behind_the_last_message(content, observation, expected):
    first = {"role": "system", "content": "s"}
    prompt = [first, {"role": "user", "content": content}]
    assert with_observation(prompt, observation) == [first, {"role": "user", "content": expected}]
    assert prompt[1]["content"] == content


class Echo:
    """Another one, without a reward."""

    def reset(self):
        return None

    def echo(self, text: str) -> str:
        """Echo.

        Args:
            text: What comes back.
        """
        return text


def test_rows_choose_among_environments(tokenizer):
    agents = agents_with(tokenizer, [multiply], {"guess": Guess, "echo": Echo}, rewards=())
    schemas = [schema["function"]["name"] for schema in agents.prompt_tools.schemas_of({"environment": "echo"}, "r:1")]
    assert schemas == ["multiply", "echo"] and agents.tool_names == ["multiply", "guess", "echo"]
    with pytest.raises(UserError, match="r:2: environment.factories needs a column 'environment'"):
        agents.prompt_tools.schemas_of({"question": 1}, "r:2")
    with pytest.raises(UserError, match="r:3: 'environment' is 'gess', and environment.factories has guess, echo"):
        agents.prompt_tools.schemas_of({"environment": "gess"}, "r:3")
    prompt = [{"role": "user", "content": "go"}]
    row = Prompt(prompt, tokenizer.encode("<user>go<end><assistant>"), {"environment": "echo"}, "")
    completion, _ = play(
        tokenizer, agents.episode(row, 0, SamplingParams()), [call("echo", '{"text": "<end>x"}'), "ok"], max_tokens=110
    )
    transcript = completion.episode.value
    assert (transcript.environment, transcript.class_name, transcript.reward) == ("echo", "Echo", None)
    # What a tool returns cannot end its message: the special token is written with the tokens of its characters.
    assert np.array(completion.token_ids)[~completion.mask].tolist().count(0) == 1
    agents.close()


def test_there_is_nothing_to_give_back_without_an_environment(tokenizer):
    """Where a reward function of a run with tools alone takes environments, which are None then."""
    agents = agents_with(tokenizer, [multiply])
    agents.rewards_read_environments = True
    completion, _ = play(tokenizer, episode_of(agents), [call(), "12"])
    transcript = completion.episode.value
    assert transcript.instance is None and transcript.give_back is None
    agents.release([transcript])
    agents.close()


class NoReset:
    pass


class NeedsRow:
    def reset(self, level, seed, episode_id, **row):
        pass


class BadReward:
    def reset(self):
        pass

    def get_reward(self, scale):
        return scale


class Twice(Guess):
    def multiply(self, a: int) -> int:
        """The name of a tool.

        Args:
            a: A number.
        """
        return a


class FailsToReset(Echo):
    def reset(self):
        raise ValueError("no task")


class WrongObservation(Echo):
    def reset(self):
        return 3


def breaks():
    raise OSError("no server")


@pytest.mark.parametrize(
    "functions, factory, rewards, error",
    [
        ([], NoReset, ["f"], "environment.factory: NoReset has no method reset"),
        ([], BadReward, ["f"], r"BadReward.get_reward\(\) is called without arguments, and needs scale"),
        ([multiply], Twice, ["f"], "tools: 2 tools have the name 'multiply'"),
        ([multiply, multiply], None, ["f"], "tools: 2 tools have the name 'multiply'"),
        ([], Echo, [], "rewards.funcs must name at least one reward function, or the environment's class must have"),
        ([], breaks, ["f"], r"environment: breaks\(\) raised OSError: no server"),
        ([lambda: 1], None, ["f"], "no docstring"),
    ],
)
def test_errors_before_anything_is_loaded(tokenizer, functions, factory, rewards, error):
    with pytest.raises(UserError, match=error):
        agents_with(tokenizer, functions, {None: factory} if factory else None, rewards=rewards)


def test_reset_needs_columns(tokenizer):
    agents = agents_with(tokenizer, [multiply], {None: NeedsRow})
    agents.prompt_tools.schemas_of({"level": 1}, "r:1")
    with pytest.raises(UserError, match=r"r:2: NeedsRow.reset\(\) needs level, and the row has no such column"):
        agents.prompt_tools.schemas_of({"question": "q"}, "r:2")
    agents.close()


@pytest.mark.parametrize(
    "factory, error",
    [
        (FailsToReset, r"rows.jsonl:1: environment: FailsToReset.reset\(\) raised ValueError: no task"),
        (WrongObservation, r"rows.jsonl:1: .*WrongObservation.reset\(\) must return a string, .* got 3"),
    ],
)
def test_a_reset_that_fails_names_the_row(tokenizer, factory, error):
    agents = agents_with(tokenizer, factories={None: factory})
    with pytest.raises(EnvironmentFailure, match=error):
        play(tokenizer, episode_of(agents), ["x"])
    agents.close()


def test_a_template_without_tools_is_refused(tokenizer, monkeypatch):
    monkeypatch.setitem(tokenizer.templates, "default", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="the chat template drops the tools' schemas"):
        agents_with(tokenizer, [multiply])
    assert issubclass(ConfigError, UserError)


class Remote:
    """A client of a game elsewhere, whose connection is lost where the row says so."""

    def reset(self, lost_at=None):
        self.lost_at = lost_at
        return self._answer("reset", "begun")

    def step(self, x: int) -> str:
        """Go on.

        Args:
            x: How far.
        """
        return self._answer("step", "gone on")

    def get_reward(self):
        return self._answer("get_reward", 1.0)

    def _answer(self, method, value):
        if self.lost_at == method:
            raise ConnectionResetError("no route")
        return value


def test_a_server_that_is_away_for_a_while_costs_its_rollouts_alone(tokenizer):
    class Connecting(Remote):
        away = False

        def __init__(self):
            if Connecting.away:
                raise ConnectionRefusedError("no server")

    agents = agents_with(tokenizer, factories={None: Connecting})
    lost_one, _ = play(tokenizer, episode_of(agents, {"lost_at": "reset"}, ""), ["x"])
    Connecting.away = True
    # The next rollout needs a new instance.
    unmade, _ = play(tokenizer, episode_of(agents, {}, ""), ["x"])
    Connecting.away = False
    other, _ = play(tokenizer, episode_of(agents, {}, ""), ["end"])
    lost, back = unmade.episode.value, other.episode.value
    assert lost_one.episode.value.is_lost and lost.is_lost and lost.reward is None and lost.turns == 1
    assert not back.is_lost and back.reward == 1.0
    agents.close()


@pytest.mark.parametrize(
    "lost_at, texts, turns",
    [
        ("reset", ["x"], 1),
        ("step", [call("step", '{"x": 1}')], 1),
        ("get_reward", [call("step", '{"x": 1}'), "end"], 2),
    ],
)
def test_a_lost_connection_costs_one_rollout(tokenizer, lost_at, texts, turns):
    """It has no reward by any function, and the next rollout has another instance."""
    agents = agents_with(tokenizer, factories={None: Remote})
    completion, _ = play(tokenizer, episode_of(agents, {"lost_at": lost_at}, ""), texts)
    lost = completion.episode.value
    assert lost.is_lost and lost.reward is None and lost.reward_error is None and lost.turns == turns
    other, _ = play(tokenizer, episode_of(agents, {}, ""), ["end"])
    assert not other.episode.value.is_lost and other.episode.value.reward == 1.0
    scores = Scores(np.array([[0.5, np.nan], [0.5, 1.0]]))
    chosen = [Prompt([{"role": "user", "content": ""}], [1], {}, "")]
    generation = as_generation(chosen, [[completion, other]], scores, np.ones(2), tokenizer)
    assert np.isnan(generation.samples[0].reward) and generation.samples[1].reward == 1.5
    assert np.isnan(generation.samples[0].values).all()
    assert tool_metrics(generation.groups, [])["env/lost_frac"] == 0.5
    agents.close()
