"""Ranks that draw, score and evaluate together: what one process has, whichever rank computes it."""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba import cli
from rlnumba.config import DeployConfig, EngineConfig
from rlnumba.engine.core import PromptError
from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import CommunicationError, ConfigError, SharedError, UserError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Checkpoint, Transformer, load_model
from rlnumba.model.weights import Weights
from rlnumba.reporting import stderr
from rlnumba.rewards import Rewards
from rlnumba.runs.eval import evaluate, run_eval
from rlnumba.runs.row_loop import RowError
from rlnumba.sampling import offline, ranks
from tests.parallel import in_threads
from tests.trainers.runs import (
    MODEL,
    PAIR_ROWS,
    PREFERENCE_ROWS,
    SFT_ROWS,
    grpo_run,
    preference_run,
    reward_run,
    sft_run,
)

# Of very different lengths, so that ranks run out of work while others have some.
PROMPTS = [[5 + i, 7, 9, 11] * (1 + i % 3) for i in range(5)]
PARAMS = [
    SamplingParams(n=n, max_tokens=tokens, seed=3, ignore_eos=True, first_index=first)
    for n, tokens, first in ((5, 30, 0), (1, 4, 0), (4, 3, 2), (2, 2, 0), (1, 1, 0))
]


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL), Tokenizer.from_folder(MODEL)


def drawn(outputs):
    return [[(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in each.completions] for each in outputs]


def on_rank(communicator, model, max_num_seqs=256, num_blocks=None):
    """(what generate returned, prompts in the order in which they finished, sequences that this rank took over)."""
    config = EngineConfig(max_num_seqs=max_num_seqs, num_gpu_blocks_override=num_blocks)
    together = ranks.LedLLM(LLM(*model, config), communicator)
    own, taken, order = together.own.engine, [], []
    move_in = own.move_in
    own.move_in = lambda sequences: (taken.extend(s for s in sequences if len(s.completion_ids)), move_in(sequences))

    def draw():
        outputs = together.llm.generate(PROMPTS, PARAMS, finished=lambda position, output: order.append(position))
        return drawn(outputs), order

    found, order = together.led(draw)
    assert not own.has_unfinished and not together.llm.engine.has_unfinished
    assert own.blocks.num_free == own.blocks.num_blocks
    return found, order, len(taken)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_text_of_one(model, monkeypatch, world_size):
    """Exchanges after every step, so that ranks take over sequences in the middle of them; few blocks preempt."""
    monkeypatch.setattr(ranks, "ROUND_S", 0.0)
    expected = drawn(LLM(*model).generate(PROMPTS, PARAMS))
    taken = 0
    for options in ((256, None), (2, None), (256, 8)):
        found = in_threads.run(on_rank, world_size, model, *options)
        for own, order, _ in found:
            assert own == expected and order == found[0][1] and sorted(order) == list(range(len(PROMPTS)))
        taken += sum(count for *_, count in found)
    assert (taken > 0) == (world_size > 1)


def test_drafts_go_on_elsewhere(model, monkeypatch):
    """Sequences move between engines whose steps verify drafts."""
    monkeypatch.setattr(ranks, "ROUND_S", 0.0)

    def work(communicator):
        together = ranks.LedLLM(LLM(*model, EngineConfig(speculative_method="ngram")), communicator)
        return together.led(lambda: drawn(together.llm.generate(PROMPTS, PARAMS)))

    expected = drawn(LLM(*model).generate(PROMPTS, PARAMS))
    assert in_threads.run(work, 2) == [expected] * 2


@pytest.mark.parametrize("reason", ["no rank has them", "no rank has drawn a token for 0 s"])
def test_completions_that_do_not_come_end_all_ranks(model, monkeypatch, reason):
    """Rank 1 loses what it was given, or no engine does a step."""
    monkeypatch.setattr(ranks, "LOST_S", 0.2)
    if reason == "no rank has them":
        # One exchange, when rank 0 has drawn its own: each further one would give rank 1 more, which it loses, too.
        monkeypatch.setattr(ranks, "ROUND_S", 1000.0)

    def on_rank(communicator):
        together = ranks.LedLLM(LLM(*model), communicator)
        own, nothing = together.own.engine, together.own.engine.step()
        if reason == "no rank has them":
            own.move_in = own.move_in if communicator.rank == 0 else lambda sequences: None
        else:
            communicator.timeout_s, own.step = 0.2, lambda: nothing
        with pytest.raises(CommunicationError) as raised:
            together.led(lambda: together.llm.generate(PROMPTS, PARAMS))
        return str(raised.value)

    found = in_threads.run(on_rank, 2)
    assert found[0] == found[1] and f" do not come: {reason}" in found[0]
    count = 6 if reason == "no rank has them" else 13
    assert found[0].startswith(f"generate: {count} completions of ")


def test_a_prompt_that_is_too_long_names_its_index(model):
    def work(communicator):
        together, params = ranks.LedLLM(LLM(*model, EngineConfig(max_model_len=8)), communicator), SamplingParams(n=3)
        with pytest.raises(SharedError) as error:
            together.led(lambda: together.llm.generate([[1, 2], [1] * 9], params))
        # The engine has no requests, and goes on.
        (found,) = together.led(lambda: drawn(together.llm.generate([[1, 2]], params)))
        return str(error.value), len(found)

    assert in_threads.run(work, 2) == [("prompt 1: 9 tokens are more than the limit of 8", 3)] * 2


@pytest.mark.parametrize("index, lengths", [(0, (4, 4)), (1, (4, 4)), (1, (1, 4))])
def test_a_prompt_without_log_probs_is_named_whichever_rank_draws_it(index, lengths):
    """Also where the other rank has run out of work by then, and would take over some."""
    # Not tied to the head, which would damage every prompt.
    config = dataclasses.replace(load_model(MODEL).config, tie_word_embeddings=False)
    damaged = Transformer(config, Weights.random(config, "float32", 0))
    damaged.weights.embed_tokens[7] = np.nan
    prompts = [[5, 9], [5, 11]]
    prompts[index] = [5, 7]

    def work(communicator):
        together = ranks.LedLLM(LLM(damaged), communicator)
        params = [SamplingParams(max_tokens=length, n=3) for length in lengths]
        job = offline.GenerationJob(EngineConfig(), prompts, params, ["a.jsonl:1", "a.jsonl:2"])
        with pytest.raises(UserError) as error:
            together.led(lambda: offline.complete(together.llm, job))
        return str(error.value)

    message = f"a.jsonl:{index + 1}: the model's log-probs are not finite"
    found = in_threads.run(work, 2)
    assert found[0] == found[1] and found[0].startswith(message), found


@pytest.mark.parametrize("method", ["move_out", "add_request"])
def test_an_error_between_two_steps_of_a_rank_is_one_of_all(model, monkeypatch, method):
    """As one that is found while it hands sequences over, or where its cache is smaller than that of the others."""
    monkeypatch.setattr(ranks, "ROUND_S", 0.0)

    def fail(*_):
        raise PromptError(3, "damaged")

    def work(communicator):
        together = ranks.LedLLM(LLM(*model), communicator)
        if communicator.rank == 1:
            setattr(together.own.engine, method, fail)
        with pytest.raises(SharedError) as error:
            together.led(lambda: together.llm.generate(PROMPTS, PARAMS))
        return str(error.value)

    assert in_threads.run(work, 2) == ["prompt 3: damaged"] * 2


def test_requests_that_are_dropped_leave_all_ranks(model, monkeypatch):
    """Some were drawn, some not even begun; one of the same name that comes next is another one."""
    monkeypatch.setattr(ranks, "ROUND_S", 0.0)
    expected = drawn(LLM(*model).generate([PROMPTS[4]], PARAMS[4:]))

    def work(communicator):
        together = ranks.LedLLM(LLM(*model), communicator)

        def draw():
            episodes = Episodes(together.llm.engine)
            for number in range(3):
                episodes.submit(GroupRequest(number, PROMPTS[number], PARAMS[0]))
            episodes.abort(2)
            for _ in range(3):
                assert not episodes.step()
            episodes.abort(1)
            episodes.submit(GroupRequest(1, PROMPTS[4], PARAMS[4]))
            complete = []
            while not complete:
                complete = episodes.step()
            # What is left is dropped at the end.
            assert complete[0].number == 1 and 0 in episodes.running
            return [(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in complete[0].completions]

        found, own = together.led(draw), together.own.engine
        assert not own.has_unfinished and own.blocks.num_free == own.blocks.num_blocks
        return found

    assert in_threads.run(work, 2) == expected * 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_episodes_have_the_text_of_one_engine(model, monkeypatch, world_size):
    """Each turn is drawn where the one before it was, whose blocks are retained there; rank 0 has the coroutines."""
    monkeypatch.setattr(ranks, "ROUND_S", 0.0)
    monkeypatch.setattr(ranks, "moves_between", lambda loads, few: [])
    params, lengths = SamplingParams(n=5, max_tokens=120, seed=3, ignore_eos=True), (20, 3, 9)

    async def episode(rollout):
        context, computed = list(rollout.prompt_token_ids), []
        for length in lengths:
            turn = await rollout.complete(context, length + rollout.index)
            computed.append(len(context) - turn.num_cached_tokens)
            context += [*turn.token_ids, 7, 8, 9]
            await rollout.wait(executor.submit(time.sleep, 0.001 * rollout.index))
        return computed

    def work(communicator):
        together = ranks.LedLLM(LLM(*model), communicator)

        def draw():
            episodes, found = Episodes(together.llm.engine), {}
            for number in range(2):
                episodes.submit(GroupRequest(number, PROMPTS[number], params, episode=episode))
            while not episodes.is_idle:
                found |= {request.number: request.completions for request in episodes.step()}
            return [[(c.token_ids, c.logprobs, c.episode.value) for c in found[number]] for number in range(2)]

        found, own = together.led(draw), together.own.engine
        assert own.blocks.num_free == own.blocks.num_blocks and not own.scheduler.row_blocks.retained
        return found

    with ThreadPoolExecutor(4) as executor:
        found = in_threads.run(work, world_size)
        (alone,) = in_threads.run(work, 1)
    for group, expected in zip(found[0], alone, strict=True):
        for (*drawn, computed), (*same, _) in zip(group, expected, strict=True):
            assert drawn == same
            # Three tokens of the environment, and what follows the last full block of those before.
            assert all(count <= 3 + 16 for count in computed[1:])


def test_shares():
    assert ranks.shares([0, 0, 0], 7) == [3, 2, 2]
    assert ranks.shares([5, 0, 2], 4) == [0, 3, 1]
    assert ranks.shares([4], 3) == [3] and ranks.shares([0, 0], 0) == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_moves_even_out(seed):
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, [1, 4, 40, 300][seed % 4] + 1, rng.integers(1, 9)).tolist()
    few = [0, 1, 8][seed % 3]
    moves, after = ranks.moves_between(loads, few), list(loads)
    if max(loads) <= few or 2 * min(loads) > max(loads):
        assert moves == []
        return
    for source, target, count in moves:
        assert count > 0
        after[source] -= count
        after[target] += count
    assert max(after) - min(after) <= 1 and sum(after) == sum(loads)
    sources, targets = ({move[i] for move in moves} for i in (0, 1))
    assert not sources & targets


def test_a_reward_that_fails_is_raised_on_all_ranks():
    def fail(completions, **columns):
        raise ZeroDivisionError("nothing left")

    def work(communicator):
        def score():
            rewards = Rewards([fail])
            rewards.collect([rewards.submit(["p"], ["a"], [[1]], {})])

        with pytest.raises(ranks.SharedRewardError, match="fail raised ZeroDivisionError: nothing left"):
            ranks.led(communicator, score, None)
        return communicator.objects(communicator.rank)

    assert in_threads.run(work, 2) == [[0, 1]] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_scores_of_all_sequences(world_size):
    sequences = [[3 + i % 5] * (1 + i * 7 % 20) for i in range(9)]
    expected = offline.score_all(load_model(MODEL), sequences, 0.5)
    arguments = Checkpoint(MODEL), offline.ScoringJob(sequences, 0.5)
    found, *others = in_threads.run(offline.score_together, world_size, *arguments)
    assert [values.tobytes() for values in found] == [values.tobytes() for values in expected]
    assert others == [None] * (world_size - 1)


def test_generate_names_the_line_of_a_prompt():
    config = EngineConfig(num_gpu_blocks_override=1)
    generation = offline.GenerationJob(config, [[1], [1] * 30], SamplingParams(), ["rows:3", "rows:7"])
    with pytest.raises(UserError, match="rows:7: prompt and completion need 46 tokens of KV cache"):
        in_threads.run(offline.complete_together, 2, Checkpoint(MODEL), generation, None)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("quick_starts")
def test_the_commands_write_the_files_of_one_process(tmp_path, capsys):
    rows = [{"prompt": f"what is {i}? " * (1 + i % 4)} for i in range(6)]
    (tmp_path / "prompts").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = {}
    # Two groups of two processes with a part of the model each are four.
    for count, parts in (("1", []), ("2", []), ("4", ["--tp", "2"])):
        output, scored, source = (tmp_path / f"{name}{count}" for name in ("out", "scored", "rows"))
        options = ["--prompts", str(tmp_path / "prompts"), "--output", str(output), "--n", "2", "--num-gpus", count]
        assert cli.run(["generate", "--model", str(MODEL), *options, *parts]) == 0
        sequences = [
            line["prompt_token_ids"] + completion["token_ids"]
            for line in lines_of(output)
            for completion in line["completions"]
        ]
        source.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in sequences))
        options = ["--input", str(source), "--output", str(scored), "--deploy.num_infer_gpus", count, *parts]
        assert cli.run(["score", "--model", str(MODEL), *options]) == 0
        written[count] = output.read_bytes(), scored.read_bytes()
    assert written["1"] == written["2"] == written["4"]
    for command, source in (("generate", "--prompts"), ("score", "--input")):
        files = [source, str(tmp_path / "prompts"), "--output", str(tmp_path / "out")]
        assert cli.run([command, "--model", str(MODEL), *files, "--tp", "2", "--num-gpus", "3"]) == 2
        assert "--num-gpus (3) must be a multiple of --tp (2)" in capsys.readouterr().err


def eval_run(kind, folder):
    if kind == "grpo":
        run = grpo_run(folder, reward="digits length", num_prompts=5)
        return dataclasses.replace(run, data=dataclasses.replace(run.data, eval=run.data.train))
    if kind == "sft":
        return sft_run(folder, {"eval": str(SFT_ROWS)})
    if kind == "reward":
        return reward_run(folder, {"eval": str(PAIR_ROWS)})
    return preference_run(kind, folder, {"eval": str(PREFERENCE_ROWS[kind])})


@pytest.mark.parametrize("kind", ["grpo", "sft", "dpo", "kto", "reward"])
def test_an_evaluation_has_the_metrics_of_one_process(tmp_path, monkeypatch, kind):
    # Ranks are processes of their own elsewhere.
    monkeypatch.setattr(stderr, "_is_silent", False)
    run = eval_run(kind, tmp_path / "run")
    expected = run_eval(run, output=tmp_path / "out")
    for metrics, rows in in_threads.run(evaluate, 2, run, None, None, ()):
        assert metrics == expected
        if rows:
            written = lines_of(tmp_path / "out" / "completions.jsonl")
            assert [row["completion"] for row in rows] == [row["completion"] for row in written]


@pytest.mark.usefixtures("quick_starts")
def test_an_evaluation_with_a_part_of_the_model_on_each_rank(tmp_path):
    run = eval_run("grpo", tmp_path / "run")
    expected = run_eval(run, output=tmp_path / "one")
    assert run_eval(run, output=tmp_path / "two", tensor_parallel_size=2) == expected
    for name in ("completions.jsonl", "metrics.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    four = dataclasses.replace(run, deploy=DeployConfig(num_train_gpus=4))
    with pytest.raises(ConfigError, match=r"--tp 2 and deploy.num_train_gpus \(4\): one engine draws"):
        run_eval(four, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--tp cuts the model of an engine, which sft evaluates without"):
        run_eval(eval_run("sft", tmp_path), tensor_parallel_size=2)


@pytest.mark.usefixtures("quick_starts")
def test_eval_on_ranks(tmp_path):
    one = eval_run("sft", tmp_path)
    two = dataclasses.replace(one, deploy=DeployConfig(num_train_gpus=2))
    assert run_eval(two) == run_eval(one)
    with pytest.raises(RowError, match="none.jsonl"):
        run_eval(dataclasses.replace(two, data=dataclasses.replace(two.data, eval="none.jsonl")))


def test_sequences_that_move_are_counted_where_they_go():
    """Of five that rank 0 is to give to the others three had ended."""
    arrived = []

    class Engine:
        model = SimpleNamespace(ranks=None)

        def move_out(self, count, least_left):
            assert (count, least_left) == (5, 1)
            return ["a", "b"]

        def move_in(self, sequences):
            arrived.append(sequences)

    loads = [9, 1, 1]
    moves = ranks.moves_between(loads, 1)
    assert [(source, target) for source, target, _ in moves] == [(0, 1), (0, 2)]
    assert sum(count for *_, count in moves) == 5
    communicator = SimpleNamespace(rank=0, objects=lambda own: [own, ([], None), ([], None)])
    alone = {"parts": 1, "index": 0, "has_requests": True}
    rank = SimpleNamespace(has_episodes=False, unfinished={1: 1}, communicator=communicator, loads=loads, **alone)
    rank.engine = Engine()
    ranks.LedEngine._balance(rank)
    (_, _, first), _ = moves
    assert rank.loads == [7, 1 + min(first, 2), 1 + 2 - min(first, 2)] and arrived == []


def test_a_rank_that_has_nothing_to_draw_may_wait_for_long(model, monkeypatch):
    monkeypatch.setattr(ranks, "ROUND_S", 0.0)
    monkeypatch.setattr(ranks.LedEngine, "_waited_s", lambda self, num_tokens: 1e9 * self.index)
    expected = drawn(LLM(*model).generate(PROMPTS[1:2], PARAMS[1:2]))

    def on_rank(communicator):
        together = ranks.LedLLM(LLM(*model), communicator)
        return together.led(lambda: drawn(together.llm.generate(PROMPTS[1:2], PARAMS[1:2])))

    assert in_threads.run(on_rank, 2) == [expected] * 2
