"""Episodes of several turns: their draws, what each turn computes, their blocks, and coroutines that wait for tools."""

import pickle
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from rlnumba.engine import PromptError, SamplingParams
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.model.transformer import pack, score
from rlnumba.runtime import device
from tests.close import assert_same_bits
from tests.counts import EPISODES
from tests.engine.test_core import TINY, check_blocks, check_idle, make_engine, result
from tests.engine.test_llm import make_model

PROMPT = list(range(5, 25))
SUFFIX = [7, 8, 9, 10, 11]
PARAMS = SamplingParams(n=4, max_tokens=60, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return make_model(**TINY)


@pytest.fixture(scope="module")
def tools():
    with ThreadPoolExecutor(8) as executor:
        yield executor


def suffix_of(turn):
    """A tool's result, which depends on what was drawn."""
    return SUFFIX[: 1 + sum(turn.token_ids) % len(SUFFIX)]


def scripted(lengths, waits=None, suffix_of=suffix_of):
    """An episode with turns of these lengths. waits(rollout, turn, result): the Future of a turn's result, or none."""

    async def episode(rollout):
        context, reasons = list(rollout.prompt_token_ids), []
        for number, length in enumerate(lengths):
            turn = await rollout.complete(context, length)
            reasons.append(turn.finish_reason)
            if number + 1 < len(lengths):
                suffix = suffix_of(turn)
                if waits is not None:
                    suffix = await rollout.wait(waits(rollout, number, suffix))
                context += turn.token_ids + suffix
        return reasons

    return episode


def request_of(episode, number=0, params=PARAMS, prompt=PROMPT, version=0):
    return GroupRequest(number, prompt, params, version, episode=episode)


def run(episodes, found=None):
    """{number: completions} of all groups of an Episodes."""
    found = {} if found is None else found
    while not episodes.is_idle:
        found |= {request.number: request.completions for request in episodes.step()}
    return found


def draw(model, *requests, **config):
    """{number: completions} of GroupRequests, in an engine of their own."""
    episodes = Episodes(make_engine(model, **config))
    for request in requests:
        episodes.submit(request)
    found = run(episodes)
    check_idle(episodes.engine)
    return found


def test_turns_list_alternatives_of_what_they_drew(model):
    """Of each turn those that a request with its context as the prompt lists; none of the environment's tokens."""
    params = replace(PARAMS, n=1, logprobs=2, prompt_logprobs=1, max_tokens=30)
    (whole,) = draw(model, request_of(scripted([5, 4, 6]), params=params))[0]
    tokens, logprobs, drawn = whole.token_ids, whole.array("logprobs"), whole.mask.tolist()
    assert len(whole.logprobs) == len(tokens) and False in drawn
    for token, logprob, listed, is_drawn in zip(tokens, logprobs, whole.logprobs, drawn, strict=True):
        if is_drawn:
            assert 2 <= len(listed) <= 3 and np.float32(listed[token].logprob) == logprob
            assert {each.rank for each in listed.values()} >= {1, 2}
        else:
            assert listed is None
    (plain,) = draw(model, request_of(None, params=replace(params, max_tokens=5)))[0]
    assert whole.logprobs[:5] == plain.logprobs and whole.prompt_logprobs == plain.prompt_logprobs
    assert len(whole.prompt_logprobs) == len(PROMPT)
    sent = pickle.loads(pickle.dumps(whole))
    assert (sent.logprobs, sent.prompt_logprobs) == (whole.logprobs, whole.prompt_logprobs)


def results(completions):
    return [(*result(each), each.policy_versions) for each in completions]


def after(seconds, executor):
    """scripted's `waits`: results that take a random time of up to so many seconds."""
    rng = np.random.default_rng()
    return lambda rollout, turn, value: executor.submit(lambda: time.sleep(rng.uniform(0, seconds)) or value)


def test_one_turn_is_the_completion_without_an_episode(model):
    expected = draw(model, replace(request_of(None), params=replace(PARAMS, ignore_eos=False)))[0]
    found = draw(model, request_of(scripted([None]), params=replace(PARAMS, ignore_eos=False)))[0]
    assert results(found) == results(expected)
    for index, each in enumerate(found):
        assert each.mask is None and each.index == index and each.num_drawn == each.num_tokens
        assert (each.episode.num_turns, each.episode.prompt_token_ids) == (1, PROMPT)
        assert each.episode.value == [each.finish_reason]
        assert expected[index].episode is None


def test_the_noise_is_that_of_first_prompt_index_and_position(model):
    """Turns without anything between them draw what one turn does; the first prompt may be another than the group's."""
    params = replace(PARAMS, first_index=8)
    expected = draw(model, replace(request_of(None), params=params))[0]
    parts = scripted([1, 2, 30, 16, 11], suffix_of=lambda turn: [])
    assert results(draw(model, request_of(parts, params=params))[0]) == results(expected)

    async def with_observation(rollout):
        turn = await rollout.complete(PROMPT, 20)
        await rollout.complete([*PROMPT, *turn.token_ids])

    found = draw(model, request_of(with_observation, params=params, prompt=PROMPT[:7]))[0]
    assert results(found) == results(expected) and found[0].episode.prompt_token_ids == PROMPT


def test_rollouts_that_were_equal_in_a_turn_differ_in_the_next(model):
    params = replace(PARAMS, n=8, top_k=2)
    found = draw(model, request_of(scripted([1, 12], suffix_of=lambda turn: SUFFIX), params=params))[0]
    first = Counter(each.token_ids[0] for each in found)
    assert len(first) <= 2 and max(first.values()) >= 4
    assert len({tuple(each.token_ids) for each in found}) == 8


def test_masks_and_columns(model):
    """Of drawn tokens and those of the environment; log-probs are those that the trainer computes, to the bit."""
    lengths = [3, 9, 17, 2]
    params = replace(PARAMS, logit_thresholds=True, top_k=5)
    for each in draw(model, request_of(scripted(lengths), params=params))[0]:
        suffixes, begin, mask = [], 0, []
        for number, length in enumerate(lengths):
            mask += [True] * length
            if number < 3:
                drawn = each.token_ids[begin : begin + length]
                suffixes.append(SUFFIX[: 1 + sum(drawn) % 5])
                assert each.token_ids[begin + length :][: len(suffixes[-1])] == suffixes[-1]
                begin += length + len(suffixes[-1])
                mask += [False] * len(suffixes[-1])
        assert each.mask.tolist() == mask and each.num_drawn == sum(lengths) < each.num_tokens == len(mask)
        assert each.finish_reason == "length" and each.episode.num_turns == 4
        starts = np.flatnonzero(np.diff([0, *mask]) == 1)
        assert each.episode.num_context_tokens == sum(len(PROMPT) + start for start in starts)
        logprobs, thresholds = each.array("logprobs"), each.thresholds
        assert (logprobs[~each.mask] == 0).all() and (logprobs[each.mask] < 0).all()
        assert np.isneginf(thresholds[~each.mask]).all() and np.isfinite(thresholds[each.mask]).all()
        again = pickle.loads(pickle.dumps(each))
        assert results([again]) == results([each]) and again.mask.tolist() == mask and again.episode == each.episode
    (plain,) = draw(model, request_of(scripted(lengths), params=replace(PARAMS, n=1)))[0]
    scored = score(model, pack([PROMPT + plain.token_ids]))
    expected = device.to_host(scored.logprobs)[len(PROMPT) :][plain.mask]
    assert_same_bits(plain.array("logprobs")[plain.mask], expected)


def test_episodes_without_log_probs_or_seed(model):
    """One seed for all turns of a rollout, also when it is drawn afresh."""
    for logprobs, expected in ((None, None), (False, [])):
        params = replace(PARAMS, n=2, logprobs=logprobs)
        assert [each.logprobs for each in draw(model, request_of(scripted([2, 3]), params=params))[0]] == [expected] * 2
    seeds = {}

    async def episode(rollout):
        seeds.setdefault(rollout.params.seed, []).append(rollout.index)
        return await scripted([2, 3])(rollout)

    draw(model, request_of(episode, params=replace(PARAMS, seed=None)))
    assert None not in seeds and sum(map(len, seeds.values())) == 4


def test_a_turn_computes_what_follows_the_blocks_that_are_there(model):
    """suffix + (L - 1) mod 16 + 1 tokens; also where every rollout waits while others fill the cache."""
    lengths, computed = [5, 20, 16, 1], Counter()
    episodes = Episodes(make_engine(model, blocks=200))
    scheduler, update = episodes.engine.scheduler, None
    update = scheduler.update

    def counting(step, *values):
        computed[0] += int(step.counts.sum())
        return update(step, *values)

    scheduler.update = counting
    contexts = []

    async def episode(rollout):
        context = list(rollout.prompt_token_ids)
        for length in lengths:
            turn = await rollout.complete(context, length)
            contexts.append((rollout.index, len(context), length, turn.num_cached_tokens))
            context = context + turn.token_ids + suffix_of(turn)

    episodes.submit(request_of(episode))
    completions = run(episodes)[0]
    assert {index for index, *_ in contexts} == {0, 1, 2, 3} and len(contexts) == 16
    wanted = len(PROMPT) + 3 * ((len(PROMPT) - 1) % BLOCK_SIZE + 1)
    for index in range(4):
        turns = [each[1:] for each in contexts if each[0] == index]
        for (before, drawn, _), (length, _, num_cached) in zip(turns, turns[1:], strict=False):
            end = before + drawn
            assert length - num_cached == (length - end) + (end - 1) % BLOCK_SIZE + 1
            wanted += length - num_cached
        wanted += sum(lengths) - len(lengths)
        assert completions[index].num_cached_tokens == sum(num_cached for *_, num_cached in turns)
    assert computed[0] == wanted
    check_idle(episodes.engine)


def test_equal_rollouts_retain_the_blocks_that_can_be_matched(model):
    """Greedy ones have one text and copies of each block; that of the first one is registered, and it ends first."""
    gates, lengths = [Future() for _ in range(4)], [30, 8]
    episodes = Episodes(make_engine(model, blocks=30))
    waits = lambda rollout, turn, value: gates[rollout.index]  # noqa: E731
    episodes.submit(request_of(scripted(lengths, waits), params=replace(PARAMS, temperature=0.0)))
    for _ in range(1000):
        if len(episodes.engine.scheduler.row_blocks.retained) < 4:
            episodes.step(0.0)
    assert len(episodes.engine.scheduler.row_blocks.retained) == 4 and not episodes.engine.has_unfinished
    check_blocks(episodes.engine)
    gates[0].set_result([30])
    # Its blocks are free, and used by others.
    episodes.submit(request_of(None, 1, replace(PARAMS, n=1, max_tokens=170), prompt=[30, 31]))
    found = {}
    while 1 not in found:
        found |= {request.number: request.completions for request in episodes.step()}
    episodes.submit(request_of(None, 2, replace(PARAMS, max_tokens=60), prompt=[32, 33]))
    while 2 not in found:
        found |= {request.number: request.completions for request in episodes.step()}
    for index in (1, 2, 3):
        gates[index].set_result([30 + index])
    completions = run(episodes)[0]
    assert len({tuple(each.token_ids[:30]) for each in completions}) == 1
    # Of 50 tokens 3 blocks; the first turn of those after the leader has one.
    assert sorted(each.num_cached_tokens for each in completions) == [48, 64, 64, 64]
    check_idle(episodes.engine)


def test_random_delays_change_no_draw(model, tools):
    lengths = [3, 9, 17, 2]
    requests = [request_of(None, number, prompt=PROMPT[number:]) for number in range(4)]
    expected = draw(model, *(replace(each, episode=scripted(lengths)) for each in requests))
    delayed = scripted(lengths, after(0.02, tools))
    for config in (
        {},
        {"max_num_seqs": 3},
        {"blocks": 14},
        {"async_scheduling": False},
        {"speculative_method": "ngram"},
    ):
        found = draw(model, *(replace(each, episode=delayed) for each in requests), **config)
        assert {number: results(each) for number, each in found.items()} == {
            number: results(each) for number, each in expected.items()
        }


def test_a_rollout_that_waits_leaves_the_engine_to_others(model):
    gate = Future()
    episodes = Episodes(make_engine(model, max_num_seqs=2))
    episodes.submit(request_of(scripted([3, 4], lambda *_: gate), 0, replace(PARAMS, n=2)))
    episodes.submit(request_of(None, 1))
    found = {}
    while 1 not in found:
        found |= {request.number: request.completions for request in episodes.step()}
    assert results(found[1]) == results(draw(model, request_of(None, 1))[1])
    while episodes.engine.has_unfinished:
        assert episodes.step() == []
    # Then nothing is computed, and a step waits for the tool: it neither spins nor returns early.
    began = time.perf_counter()
    assert episodes.step(0.05) == [] and 0.05 <= time.perf_counter() - began < 5
    assert episodes.step(0.0) == [] and not episodes.is_idle and 0.05 <= episodes.waited_s < 5
    timer = threading.Timer(0.05, gate.set_result, [[3]])
    timer.start()
    began = time.perf_counter()
    episodes.step(60.0)
    assert time.perf_counter() - began < 30
    assert [each.token_ids[3] for each in run(episodes)[0]] == [3, 3]


def test_a_further_turn_comes_before_what_has_not_begun(model):
    """Behind those that were begun before it; its blocks are there until then."""
    episodes = Episodes(make_engine(model, max_num_seqs=2))
    episodes.submit(request_of(scripted([3, 4, 5]), 0, replace(PARAMS, n=3)))
    episodes.step()
    episodes.submit(request_of(None, 1, replace(PARAMS, n=6)))
    scheduler, order = episodes.engine.scheduler, []
    while 0 in episodes.running:
        episodes.step()
        waiting = [(each.continues, each.index) for each in scheduler.waiting]
        assert waiting == sorted(waiting, key=lambda each: not each[0])
        order += [each.index for each in scheduler.waiting if each.continues and each.index not in order]
    assert not episodes.running[1].done and order
    assert run(episodes).keys() == {1}


def test_what_a_future_raises_is_raised_where_it_is_awaited(model):
    async def episode(rollout):
        turn = await rollout.complete(rollout.prompt_token_ids, 2)
        pending, caught = Future(), []
        threading.Timer(0.01, pending.set_exception, [ValueError("of the tool")]).start()
        cancelled = Future()
        cancelled.cancel()
        for future, error in ((pending, ValueError), (cancelled, CancelledError)):
            try:
                await rollout.wait(future)
            except error as raised:
                caught.append(str(raised))
        await rollout.complete([*rollout.prompt_token_ids, *turn.token_ids, 3], 2)
        return caught

    for each in draw(model, request_of(episode))[0]:
        assert each.episode.value == ["of the tool", ""]


def test_limits(model):
    """max_tokens counts the environment's tokens too; the engine's limit is that of the whole context."""
    left = {}

    def overflowing(added):
        async def episode(rollout):
            turn = await rollout.complete(rollout.prompt_token_ids, 10)
            left[added] = rollout.room(added)
            if left[added]:
                await rollout.complete([*rollout.prompt_token_ids, *turn.token_ids, *[6] * added])
                assert rollout.room() == 0
            return len(rollout.turns)

        return episode

    for limit, config in ((40, {}), (180, {"max_model_len": len(PROMPT) + 40})):
        params = replace(PARAMS, n=1, max_tokens=limit)
        for added, room in ((0, 30), (28, 2), (29, 1), (30, 0), (31, 0), (500, 0)):
            (found,) = draw(model, request_of(overflowing(added), params=params), **config)[0]
            assert left[added] == room and found.episode.value == (2 if room else 1)
            assert found.num_tokens == (40 if room else 10) and found.finish_reason == "length"

    async def first_alone(rollout):
        assert rollout.room(len(PROMPT)) == 0
        await rollout.complete(rollout.prompt_token_ids)

    # A prompt as long as the limit has one token, as without an episode.
    (found,) = draw(model, request_of(first_alone, params=replace(PARAMS, n=1)), max_model_len=len(PROMPT))[0]
    assert found.num_tokens == 1
    episodes = Episodes(make_engine(model, max_model_len=len(PROMPT) - 1))
    episodes.submit(request_of(first_alone, 5))
    with pytest.raises(PromptError, match="prompt 5: 20 tokens are more than the limit of 19"):
        episodes.step()
    episodes.reset()
    check_idle(episodes.engine)


def test_min_tokens_hold_for_each_turn_as_far_as_there_is_room(model):
    params = replace(PARAMS, min_tokens=4, max_tokens=16, ignore_eos=False, stop_token_ids=tuple(range(30)))

    async def episode(rollout):
        context, lengths = list(rollout.prompt_token_ids), []
        while rollout.room(2):
            turn = await rollout.complete(context)
            lengths.append(turn.num_tokens)
            context += [*turn.token_ids, 3, 4]
        return lengths

    for each in draw(model, request_of(episode, params=params))[0]:
        *lengths, last = each.episode.value
        assert min(lengths) >= 4 and last >= min(4, 16 - sum(lengths) - 2 * len(lengths))


@pytest.mark.parametrize(
    ("episode", "error", "message"),
    [
        ("changes", ValueError, "does not begin with the tokens of the rollout so far"),
        ("overflows", ValueError, "a context of 80 tokens leaves no room for a turn"),
        ("silent", ValueError, "rollout 0 of group 0 has ended without a turn"),
        ("foreign", TypeError, "awaits complete and wait of its rollout alone, got int"),
        ("outside", PromptError, "prompt 0: token id 99 is outside of the vocabulary of 40"),
    ],
)
def test_mistakes_of_an_episode_are_named(model, episode, error, message):
    class Foreign:
        def __await__(self):
            yield 1

    async def written(rollout):
        ids = list(rollout.prompt_token_ids)
        if episode == "silent":
            return
        if episode == "foreign":
            await Foreign()
        turn = await rollout.complete([99] if episode == "outside" else ids, 4)
        drawn = [(turn.token_ids[0] + 1) % 40, *turn.token_ids[1:]] if episode == "changes" else turn.token_ids
        await rollout.complete([*ids, *drawn, *[2] * (56 if episode == "overflows" else 1)])

    episodes = Episodes(make_engine(model))
    episodes.submit(request_of(written))
    with pytest.raises(error, match=message):
        run(episodes)
    episodes.reset()
    assert episodes.is_idle
    check_idle(episodes.engine)
    assert draw(model, request_of(scripted([2, 2]))).keys() == {0}


def closing(lengths, closed, waits):
    async def episode(rollout):
        try:
            return await scripted(lengths, waits)(rollout)
        finally:
            closed.append((rollout.number, rollout.index))

    return episode


@pytest.mark.parametrize("steps", [0, 1, 4, 8, 13])
@pytest.mark.parametrize("leave", ["abort", "interrupt", "reset"])
def test_episodes_that_are_dropped_end_and_keep_no_block(model, tools, steps, leave):
    """An interrupted group begins again elsewhere, with the same draws; what was done of it is not drawn again."""
    lengths, closed, pending = [3, 4, 5], [], []

    def waits(rollout, turn, value):
        # The tool of the first rollout answers at once, that of the last never.
        pending.append(Future())
        if rollout.number or rollout.index < 3 or not turn:
            pending[-1].set_result(value)
        return pending[-1]

    expected = draw(model, request_of(scripted(lengths)), request_of(scripted(lengths), 1, prompt=PROMPT[3:]))
    episodes = Episodes(make_engine(model))
    for number in (0, 1):
        episodes.submit(request_of(closing(lengths, closed, waits), number, prompt=PROMPT[3 * number :]))
    found = {}
    for _ in range(steps):
        found |= {request.number: request.completions for request in episodes.step(0.0)}
    check_blocks(episodes.engine)
    request = None
    if leave == "reset":
        episodes.reset()
    elif leave == "abort":
        episodes.abort(0)
        assert 0 not in found
    else:
        request = episodes.interrupt(0)
        assert request.begun == [] and episodes.interrupt(0) is None
        assert steps < 13 or {*request.done} == {0, 1, 2}
    begun = {(0, index) for index in range(4)} if steps else set()
    assert begun <= {*closed} and (not pending or all(future.done() for future in pending))
    if leave != "reset":
        run(episodes, found)
        assert results(found[1]) == results(expected[1])
    check_idle(episodes.engine)
    assert not episodes.engine.scheduler.row_blocks.retained and len(closed) == len({*closed})
    if request is not None:
        again = Episodes(make_engine(model))
        again.submit(replace(request, episode=scripted(lengths)))
        assert results(run(again)[0]) == results(expected[0])


def test_a_future_that_is_done_after_its_episode_was_dropped_is_ignored(model):
    gates = [Future(), Future()]
    for gate in gates:
        gate.set_running_or_notify_cancel()
    waits = iter(gates)
    episodes = Episodes(make_engine(model))
    for _ in range(2):
        episodes.submit(request_of(scripted([2, 2], lambda *_: next(waits)), params=replace(PARAMS, n=1)))
        for _ in range(20):
            episodes.step(0.0)
        if not gates[0].done():
            episodes.abort(0)
            gates[0].set_result([1])
    gates[1].set_result([2])
    (found,) = run(episodes)[0]
    assert found.token_ids[2] == 2


def test_an_abort_of_what_is_computed_and_not_returned(model):
    """`synchronize` may have finished a group that `step` has not returned yet."""
    episodes = Episodes(make_engine(model))
    for number in (0, 1):
        episodes.submit(request_of(None, number, replace(PARAMS, max_tokens=3)))
    while not episodes.engine.outputs:
        episodes.step()
        episodes.engine.synchronize()
    while episodes.engine.requests:
        episodes.engine.outputs.append(episodes.engine.step())
    episodes.abort(0)
    assert run(episodes).keys() == {1}
    check_idle(episodes.engine)


@pytest.mark.parametrize("keep_cache", [True, False])
def test_an_episode_lives_over_a_change_of_weights(keep_cache):
    """Turns that are drawn afterwards are those of the new weights, also where blocks of the old ones were retained."""
    lengths, model, gate = [20, 30], make_model(**TINY), Future()
    episodes = Episodes(make_engine(model, blocks=200))
    episodes.update_weights(3)
    params = replace(PARAMS, n=2)
    waits = lambda rollout, turn, value: gate if rollout.index else answered(value)  # noqa: E731
    episodes.submit(request_of(scripted(lengths, waits, lambda turn: SUFFIX), params=params))
    for _ in range(25):
        episodes.step(0.0)
    episodes.engine.synchronize()
    assert len(episodes.engine.scheduler.row_blocks.retained) == 1
    model.weights.flat *= np.float32(0.7)
    episodes.update_weights(4, keep_cache)
    assert not episodes.engine.scheduler.row_blocks.retained
    check_blocks(episodes.engine)
    gate.set_result(SUFFIX)
    running, waiting = run(episodes)[0]
    assert waiting.policy_versions == [3] * 25 + [4] * 30
    count = running.policy_versions.index(4)
    assert running.policy_versions == [3] * count + [4] * (55 - count) and count > 25
    # Of the second turn no more than a block of the prompt, which the other rollout has computed with the new weights.
    assert waiting.num_cached_tokens <= 32
    scored = score(model, pack([PROMPT + waiting.token_ids]))
    assert_same_bits(waiting.array("logprobs")[25:], device.to_host(scored.logprobs)[len(PROMPT) :][25:])
    check_idle(episodes.engine)


def answered(value):
    future = Future()
    future.set_result(value)
    return future


def test_episodes_wait_for_their_weights_and_have_begun_with_their_first_turn(model):
    gate = Future()
    episodes = Episodes(make_engine(model, max_num_seqs=4))
    episodes.submit(request_of(scripted([1, 2], lambda *_: gate), 0))
    episodes.submit(request_of(scripted([1, 2]), 1, version=1))
    assert episodes.take_begun() == []
    for _ in range(3):
        episodes.step(0.0)
    assert episodes.take_begun() == [0] and episodes.take_begun() == []
    assert not episodes.may_change_weights
    gate.set_result([3])
    assert run(episodes).keys() == {0} and episodes.may_change_weights
    episodes.update_weights(1)
    assert run(episodes).keys() == {1} and episodes.num_finished == 8 and episodes.num_tokens == 24


def test_others_go_on_after_a_prompt_without_log_probs(monkeypatch):
    """Those that wait for a tool, those that are in a turn, and single completions; nothing that was done is lost."""
    gate, model = Future(), make_model(**TINY)
    requests = [
        request_of(scripted([3, 6], lambda *_: gate), 0, replace(PARAMS, n=2)),
        request_of(scripted([5, 6]), 1, replace(PARAMS, n=2)),
        request_of(None, 2, replace(PARAMS, n=2, max_tokens=9)),
        request_of(scripted([2, 2]), 3, replace(PARAMS, n=2)),
    ]
    expected = {
        0: draw(model, replace(requests[0], episode=scripted([3, 6], lambda *_: answered(SUFFIX))))[0],
        1: draw(model, requests[1])[1],
        2: draw(model, requests[2])[2],
    }
    episodes = Episodes(make_engine(model))
    for request in requests:
        episodes.submit(request)
    update, damaged = episodes.engine._record, []

    def record(step, token_ids, logprobs, *values):
        rows = episodes.engine.scheduler.table.sequences[step.sampled_rows]
        bad = [getattr(each.request_id, "number", None) == 3 and len(each.prompt) > len(PROMPT) for each in rows]
        damaged.append(any(bad))
        return update(step, token_ids, np.where(bad, np.nan, logprobs), *values)

    monkeypatch.setattr(episodes.engine, "_record", record)
    with pytest.raises(PromptError) as raised:
        run(episodes)
    assert raised.value.request_ids == (3,) and damaged[-1]
    episodes.begin_again(raised.value.request_ids)
    gate.set_result(SUFFIX)
    found = run(episodes)
    assert {number: results(each) for number, each in found.items()} == {
        number: results(each) for number, each in expected.items()
    }
    check_idle(episodes.engine)


@pytest.mark.parametrize("length", [2, 180])
def test_retained_blocks_are_released_before_any_is_preempted(model, length):
    """At most half of the cache, the oldest first; the whole cache is there for a sequence that needs it, at its
    admission or as it grows."""
    gates, order = [Future() for _ in range(4)], []
    waits = lambda rollout, turn, value: order.append(rollout.index) or gates[rollout.index]  # noqa: E731
    lengths = [33, 8]
    episodes = Episodes(make_engine(model, blocks=13))
    engine, params = episodes.engine, replace(PARAMS, n=4)
    retained = engine.scheduler.row_blocks.retained
    episodes.submit(request_of(scripted(lengths, waits), params=params))
    while engine.has_unfinished or len(order) < 4:
        episodes.step(0.0)
        check_blocks(engine)
    # Each has 3 full blocks of 52 computed tokens, the first of which is shared.
    assert [each.index for each in retained.of_request] == order[2:] or len(retained.counts) == 5
    assert len(retained.counts) <= 6
    preempted = engine.num_preemptions
    long = SamplingParams(max_tokens=182 - length, ignore_eos=True)
    episodes.submit(request_of(None, 1, long, prompt=[30, 31] * (length // 2)))
    found = {}
    while 1 not in found:
        found |= {request.number: request.completions for request in episodes.step(0.0)}
        check_blocks(engine)
    assert engine.num_preemptions == preempted and not retained
    for gate in gates:
        gate.set_result(SUFFIX)
    alone = scripted(lengths, lambda *_: answered(SUFFIX))
    assert results(run(episodes)[0]) == results(draw(model, request_of(alone))[0])
    check_idle(engine)


def test_episodes_with_aborts_return_every_block(model):
    """In a cache that is too small for them, with results that come in any order."""
    rng = np.random.default_rng(0)
    episodes = Episodes(make_engine(model, blocks=24, max_num_seqs=6))
    engine, pending, found, aborted, number = episodes.engine, [], {}, set(), 0
    turns = [tuple(rng.integers(1, 9, rng.integers(1, 4)).tolist()) for _ in range(8)]
    shapes = [(rng.integers(0, 40, rng.integers(1, 40)).tolist(), turns[i % 8]) for i in range(12)]

    def waits(rollout, turn, value):
        pending.append((Future(), value))
        return pending[-1][0]

    preempted = 0
    while number < EPISODES or not episodes.is_idle:
        if number < EPISODES and len(episodes.running) < 5:
            prompt, lengths = shapes[number % 12]
            params = replace(PARAMS, n=1 + number % 3)
            episodes.submit(request_of(scripted(lengths, waits), number, params, prompt))
            number += 1
        for request in episodes.step(0.0):
            found[request.number] = request.completions
        if pending and (rng.random() < 0.4 or not engine.has_unfinished):
            future, value = pending.pop(rng.integers(len(pending)))
            if future.set_running_or_notify_cancel():
                future.set_result(value)
        if episodes.running and rng.random() < 0.02:
            aborted.add(int(rng.choice(list(episodes.running))))
            episodes.abort(max(aborted, key=lambda each: each in episodes.running))
        check_blocks(engine)
        preempted = max(preempted, engine.num_preemptions)
    check_idle(engine)
    assert not engine.scheduler.row_blocks.retained and not engine.scheduler.row_blocks.retained.counts
    assert len(aborted) > EPISODES / 15 and len(found) > EPISODES / 1.5
    for group in range(12, 24):
        prompt, lengths = shapes[group % 12]
        params = replace(PARAMS, n=1 + group % 3)
        if group in found:
            alone = draw(model, request_of(scripted(lengths), group, params, prompt))[group]
            assert results(found[group]) == results(alone)
