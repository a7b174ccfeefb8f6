"""Engine: requests added and aborted at any time, policy versions, streaming, and what is returned to the cache."""

import weakref
from collections import Counter, defaultdict
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnumba.config import EngineConfig
from rlnumba.engine import Engine, PromptError, SamplingParams
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.transformer import pack, score
from rlnumba.runtime import device, memory
from tests.engine.test_llm import EOS, make_model

TINY = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}


@pytest.fixture(scope="module")
def model():
    return make_model(**TINY)


def make_engine(model, **config):
    """An engine whose steps follow from its requests alone: whether steps have drafts depends on the time they take."""
    config = {"num_gpu_blocks_override": config.pop("blocks", 60), "speculative_method": "none"} | config
    return Engine(model, None, EngineConfig(**config))


def result(completion):
    return completion.token_ids, completion.logprobs, completion.finish_reason


def run(engine, outputs=None):
    """Step to the end: {(request_id, index): completion}."""
    outputs = {} if outputs is None else outputs
    while engine.has_unfinished:
        for request_id, index, completion in engine.step().finished:
            outputs[request_id, index] = completion
    return outputs


class Alone:
    """Completions of requests, each run alone in an engine; the same request is run once."""

    def __init__(self, model):
        self.model, self.found = model, {}

    def __call__(self, prompt, params):
        key = tuple(prompt), params
        if key not in self.found:
            engine = make_engine(self.model)
            engine.add_request(0, prompt, params)
            completions = run(engine)
            self.found[key] = [result(completions[0, index]) for index in range(params.n)]
        return self.found[key]


@pytest.fixture(scope="module")
def alone(model):
    return Alone(model)


def request_pool(rng, count):
    """(prompt, params) of `count` requests; many prompts begin with the same blocks."""
    stems = [rng.integers(0, 40, 3 * BLOCK_SIZE).tolist() for _ in range(3)]
    pool = []
    for _ in range(count):
        stem = stems[rng.integers(3)][: rng.integers(0, 3 * BLOCK_SIZE + 1)]
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.8, 1.0])),
            max_tokens=int(rng.choice([1, 2, 4, 8, 40])),
            n=int(rng.choice([1, 1, 1, 2, 3])),
            seed=int(rng.integers(3)),
            ignore_eos=bool(rng.random() < 0.6),
            stop_token_ids=tuple(rng.integers(6, 40, rng.choice([0, 0, 0, 3])).tolist()),
        )
        pool.append((stem + rng.integers(0, 40, rng.integers(1, 6)).tolist(), params))
    return pool


def check_blocks(engine):
    """Every block is free or has as many references as block tables of running sequences and retained ones refer to it.

    At most half are retained.
    """
    scheduler, blocks = engine.scheduler, engine.blocks
    table, running = scheduler.table, scheduler.running.tolist()
    references = Counter()
    for row in running:
        references.update(table.block_tables[row, : table.num_blocks[row]].tolist())
        assert table.sequences[row].row == row
    for retained in scheduler.row_blocks.retained.of_request.values():
        references.update(retained)
    assert len({*chain(*scheduler.row_blocks.retained.of_request.values())}) <= blocks.num_blocks // 2
    assert blocks.ref_count == [references[block] for block in range(blocks.num_blocks)]
    assert sorted(blocks.free) == [block for block in range(blocks.num_blocks) if not references[block]]
    assert {value: block for block, value in blocks.hash_of_block.items()} == blocks.block_of_hash
    assert sorted([*running, *scheduler.free_rows]) == list(range(table.num_rows))
    unfinished = [s for sequences in engine.requests.values() for s in sequences.values()]
    waiting = [s for waiters in (scheduler.waiting, *scheduler.waiting_on_prefix.values()) for s in waiters]
    assert len(unfinished) == len(waiting) + len(running)
    assert Counter(s.prompt_key for s in unfinished if s.is_prefix_leader) == Counter(
        scheduler.waiting_on_prefix.keys()
    )


def check_idle(engine):
    """No request is left, and every block is free."""
    check_blocks(engine)
    assert not engine.has_unfinished
    assert engine.blocks.num_free == engine.blocks.num_blocks and engine.cache_size.blocks_wanted == 0


def test_many_requests_at_random_times_with_random_aborts(model, alone):
    rng = np.random.default_rng(4)
    pool = request_pool(rng, 60)
    engine = make_engine(model, blocks=16, max_num_seqs=32, max_num_batched_tokens=100)
    added, aborted, outputs = {}, set(), {}
    while len(added) < 800 or engine.has_unfinished:
        for _ in range(min(rng.poisson(8), 800 - len(added))):
            prompt, params = pool[rng.integers(len(pool))]
            engine.add_request(len(added), prompt, params)
            added[len(added)] = prompt, params
        if rng.random() < 0.3:
            # Some of these have finished, and nothing happens.
            request_id = int(rng.integers(len(added) + 1)) if rng.random() < 0.5 else max(engine.requests, default=0)
            aborted |= {request_id} & engine.requests.keys()
            engine.abort(request_id)
        if rng.random() < 0.01:
            # The weights are the same, so that the tokens are.
            engine.update_weights(engine.policy_version + 1)
        for request_id, index, completion in engine.step().finished:
            assert request_id not in aborted and (request_id, index) not in outputs
            outputs[request_id, index] = completion
        if rng.random() < 0.05:
            check_blocks(engine)
    check_idle(engine)
    assert engine.num_preemptions > 2 and len(aborted) > 50, (engine.num_preemptions, len(aborted))
    versions = set()
    for (request_id, index), completion in outputs.items():
        assert result(completion) == alone(*added[request_id])[index]
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert len(completion.policy_versions) == len(completion.token_ids)
        versions |= set(completion.policy_versions)
    assert len(versions) > 3
    finished = Counter(request_id for request_id, _ in outputs)
    assert all(finished[i] == params.n for i, (_, params) in added.items() if i not in aborted)


OPERATIONS = ["add", "step", "step", "step", "abort", "update", "update, keep the cache", "interrupt", "sleep"]
OPERATIONS = st.lists(st.sampled_from(OPERATIONS), max_size=40)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS, st.integers(0, 2**32 - 1), st.integers(6, 14), st.integers(1, 5), st.booleans())
def test_any_order_of_calls_returns_all_blocks_and_gives_the_same_text(operations, seed, blocks, rows, caching):
    rng = np.random.default_rng(seed)
    pool = request_pool(np.random.default_rng(4), 60)
    engine = make_engine(
        SHARED.model, blocks=blocks, max_num_seqs=rows, max_num_batched_tokens=20, enable_prefix_caching=caching
    )
    added, outputs = {}, {}
    for operation in operations:
        if operation == "add":
            number = len(added)
            added[number] = pool[rng.integers(len(pool))]
            engine.add_request(number, *added[number])
        elif operation == "abort" and engine.requests:
            engine.abort(list(engine.requests)[rng.integers(len(engine.requests))])
        elif operation.startswith("update"):
            engine.update_weights(engine.policy_version + 1, operation != "update")
        elif operation == "interrupt" and engine.requests:
            number = list(engine.requests)[rng.integers(len(engine.requests))]
            begun, computed = engine.interrupt(number)
            assert number not in engine.requests
            assert not any(sequence.request_id == number for output in engine.outputs for sequence in output.sequences)
            outputs |= {(request_id, index): done for each in computed for request_id, index, done in each.finished}
            engine.move_in(begun)
        elif operation == "sleep":
            engine.sleep()
        else:
            outputs |= {(request_id, index): done for request_id, index, done in engine.step().finished}
        check_blocks(engine)
    for (request_id, index), completion in run(engine, outputs).items():
        assert result(completion) == SHARED(*added[request_id])[index]
        assert len(completion.policy_versions) == len(completion.token_ids)
        assert completion.policy_versions == sorted(completion.policy_versions)
    check_idle(engine)


SHARED = Alone(make_model(**TINY))


def test_new_tokens_concatenate_to_the_completions(model):
    engine = make_engine(model, blocks=12, max_num_batched_tokens=300)
    pool = request_pool(np.random.default_rng(1), 12)
    pool += [([i], SamplingParams(max_tokens=60, ignore_eos=True)) for i in range(4)]
    for number, request in enumerate(pool):
        engine.add_request(f"request {number}", *request)
    streamed, outputs = defaultdict(list), {}
    while engine.has_unfinished:
        output = engine.step()
        tokens = output.new_tokens
        assert len({(token.request_id, token.index) for token in tokens}) == len(tokens) == len(output.token_ids)
        for token in tokens:
            assert (token.request_id, token.index) not in outputs
            streamed[token.request_id, token.index].append((token.token_id, token.logprob))
        outputs |= {(request_id, index): completion for request_id, index, completion in output.finished}
    assert engine.num_preemptions > 0
    assert len(outputs) == sum(params.n for _, params in pool)
    for key, completion in outputs.items():
        assert streamed[key] == list(zip(completion.token_ids, completion.logprobs, strict=True))


@pytest.mark.parametrize("version", [2, 3])
def test_a_cache_that_is_kept_needs_a_version_that_grows(version):
    """Later blocks of running sequences would be found by requests that begin with the same version."""
    engine = make_engine(SHARED.model)
    engine.update_weights(3)
    with pytest.raises(ValueError, match=f"^update_weights with keep_cache: version {version} must be above 3$"):
        engine.update_weights(version, keep_cache=True)
    engine.update_weights(version)
    engine.update_weights(version + 1, keep_cache=True)
    assert engine.policy_version == version + 1


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_after_new_weights_tokens_are_those_of_a_fresh_engine(steps):
    """The tokens there are keep version 0, and the rest is what the new weights sample after the same prefix."""
    model = make_model(**TINY)
    prompts = [list(range(37)), list(range(37)), [3] * 20, [8]]
    params = [SamplingParams(max_tokens=30, n=3, ignore_eos=True, seed=seed) for seed in range(4)]
    engine, old = make_engine(model, max_num_batched_tokens=50), make_engine(model)
    for request in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(request[0], *request[1])
        old.add_request(request[0], *request[1])
    before = run(old)
    for _ in range(steps):
        assert not engine.step().finished
    engine.synchronize()
    model.weights.flat *= np.float32(0.7)
    engine.update_weights(7)
    assert engine.policy_version == 7
    sequences = {(i, s.index): s for i, of_request in engine.requests.items() for s in of_request.values()}
    kept = {key: len(s.completion_ids) for key, s in sequences.items()}
    assert max(kept.values()) > 0
    fresh = make_engine(model)
    for number, request in enumerate(zip(prompts, params, strict=True)):
        fresh.add_request(number, *request)
        for index, sequence in fresh.requests[number].items():
            sequence.token_ids, sequence.logprobs = (
                getattr(sequences[number, index], name).copy() for name in ("token_ids", "logprobs")
            )
    expected = run(fresh)
    outputs = run(engine)
    scored = score(model, pack([prompts[i] + c.token_ids for (i, _), c in outputs.items()]))
    logprobs = np.split(device.to_host(scored.logprobs), np.cumsum([len(prompts[i]) + 30 for i, _ in outputs])[:-1])
    for ((number, index), completion), of_sequence in zip(outputs.items(), logprobs, strict=True):
        count, first = kept[number, index], before[number, index]
        assert completion.policy_versions == [0] * count + [7] * (30 - count)
        assert completion.token_ids[:count] == first.token_ids[:count]
        assert completion.logprobs[:count] == first.logprobs[:count]
        assert result(completion) == result(expected[number, index])
        assert completion.logprobs[count:] == of_sequence[len(prompts[number]) + count :].tolist()
        assert completion.token_ids[count:] != first.token_ids[count:]
    check_idle(engine)


def test_after_new_weights_a_prompt_is_computed_once_for_its_completions(model):
    engine, prompt = make_engine(model, async_scheduling=False), list(range(35))
    computed, compute = [], engine.runner.compute
    engine.runner.compute = lambda arrays, *sizes: computed.append(len(arrays["input_ids"])) or compute(arrays, *sizes)
    engine.add_request(0, prompt, SamplingParams(max_tokens=9, n=4, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert computed == [35 + 3 * 3, 4, 4, 4]
    engine.update_weights(1)
    run(engine)
    # One sequence computes its prompt and 4 tokens, the others what follows the two full blocks.
    assert computed[4] == 35 + 4 + 3 * (3 + 4)


def start_prefix(model):
    """An engine after the first of two chunks of a prompt; request 0 is the prefix leader of 1 and 2."""
    engine, prompt = make_engine(model, max_num_batched_tokens=20, max_num_seqs=8), list(range(39))
    engine.add_request(0, prompt, SamplingParams(max_tokens=6))
    for number in (1, 2):
        engine.add_request(number, prompt, SamplingParams(max_tokens=6, n=2, seed=number))
    engine.step()
    return engine, prompt


@pytest.mark.parametrize("queued", [False, True])
def test_after_the_abort_of_a_prefix_leader_the_next_one_leads(model, alone, queued):
    engine, prompt = start_prefix(model)
    leader = engine.requests[0][0]
    if queued:
        engine.update_weights(1)
        assert engine.scheduler.waiting[0] is leader
    assert leader.is_prefix_leader and list(engine.scheduler.waiting_on_prefix) == [leader.prompt_key]
    engine.abort(0)
    assert not engine.scheduler.waiting_on_prefix
    check_blocks(engine)
    computed, compute = [], engine.runner.run
    engine.runner.run = lambda step, table: computed.append(step.num_tokens) or compute(step, table)
    outputs = run(engine)
    # What the aborted sequence has computed is still in the cache, unless the weights are new.
    cached = 0 if queued else BLOCK_SIZE
    assert computed[0] == min(20, 39 - cached)
    for number in (1, 2):
        expected = alone(prompt, SamplingParams(max_tokens=6, n=2, seed=number))
        assert [result(outputs[number, index]) for index in range(2)] == expected
    check_idle(engine)


def test_abort_of_those_that_wait_for_a_prefix(model, alone):
    engine, prompt = start_prefix(model)
    compute = engine.runner.run

    def compute_and_abort(step, table):
        # The leader computes the rest of the prompt in this step.
        assert list(map(len, engine.scheduler.waiting_on_prefix.values())) == [4]
        engine.abort(1)
        engine.abort(2)
        engine.runner.run = compute
        return compute(step, table)

    engine.runner.run = compute_and_abort
    outputs = run(engine)
    assert list(outputs) == [(0, 0)]
    assert [result(outputs[0, 0])] == alone(prompt, SamplingParams(max_tokens=6))
    check_idle(engine)


def test_two_engines_step_by_step_have_the_bits_of_each_alone(model):
    other = make_model(seed=1, **TINY)
    pools = [request_pool(np.random.default_rng(seed), 15) for seed in (2, 3)]

    def started():
        engines = (
            make_engine(model, blocks=20),
            make_engine(other, blocks=20, max_num_batched_tokens=30, max_num_seqs=9),
        )
        for engine, pool in zip(engines, pools, strict=True):
            for number, request in enumerate(pool):
                engine.add_request(number, *request)
        return engines

    expected = [{key: result(c) for key, c in run(engine).items()} for engine in started()]
    engines, found = started(), ({}, {})
    while any(engine.has_unfinished for engine in engines):
        for engine, outputs in zip(engines, found, strict=True):
            outputs |= {(i, index): result(c) for i, index, c in engine.step().finished}
    assert list(found) == expected
    if device.name() == "cuda":
        assert engines[0].context.stream.ptr != engines[1].context.stream.ptr


def test_the_cpu_cache_grows_while_requests_run(model, alone):
    if device.name() == "cuda":
        pytest.skip("the size of a GPU's cache is fixed")
    engine = Engine(model)
    engine.add_request("short", [1, 2, 3], SamplingParams(max_tokens=20))
    engine.step()
    engine.step()
    small, kept = engine.blocks.num_blocks, engine.runner.cache.arrays[0][:, 0, :3].copy()
    engine.add_request("long", [5] * 100, SamplingParams(max_tokens=50, n=3))
    engine.step()
    assert small < engine.blocks.num_blocks == engine.runner.cache.num_blocks == 3 * 11 + 3
    assert kept.any() and (engine.runner.cache.arrays[0][:, 0, :3] == kept).all()
    outputs = run(engine)
    assert [result(outputs["short", 0])] == alone([1, 2, 3], SamplingParams(max_tokens=20))
    expected = alone([5] * 100, SamplingParams(max_tokens=50, n=3))
    assert [result(outputs["long", index]) for index in range(3)] == expected
    check_idle(engine)


@pytest.mark.parametrize("enable_sleep_mode", [True, None, False])
def test_sleep_keeps_requests(model, alone, enable_sleep_mode):
    engine, params = make_engine(model, enable_sleep_mode=enable_sleep_mode), SamplingParams(max_tokens=20, n=2)
    engine.add_request(0, list(range(20)), params)
    for _ in range(5):
        engine.step()
    engine.sleep()
    assert (engine.runner.cache.arrays is None) == bool(enable_sleep_mode)
    engine.add_request(1, [7], params)
    outputs = run(engine)
    for number, prompt in enumerate([list(range(20)), [7]]):
        assert [result(outputs[number, index]) for index in range(2)] == alone(prompt, params)
    check_idle(engine)


def test_what_is_refused_is_not_queued(model):
    engine = make_engine(model, blocks=3)
    engine.add_request("a", [1], SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match="'a' is unfinished"):
        engine.add_request("a", [2])
    with pytest.raises(PromptError, match="prompt b: empty prompt") as error:
        engine.add_request("b", [])
    assert error.value.request_id == "b"
    with pytest.raises(PromptError, match="prompt b: text needs a tokenizer"):
        engine.add_request("b", "text")
    with pytest.raises(PromptError, match="prompt b: prompt and completion need 50 tokens .* holds 48"):
        engine.add_request("b", [1], SamplingParams(max_tokens=49))
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        engine.add_request("b", [1], SamplingParams(stop="x"))
    engine.abort("b")
    assert list(run(engine)) == [("a", 0)]
    output = engine.step()
    assert output.finished == output.new_tokens == [] and len(output.token_ids) == len(output.sequences) == 0
    engine.add_request("a", [1])
    engine.abort("a")
    check_idle(engine)


def test_stop_ids_of_any_number(model, alone):
    engine = make_engine(model)
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    token_ids = alone([9, 8], free)[0][0]
    engine.add_request(0, [9, 8], free)
    engine.step()
    absent = [i for i in range(40) if i not in token_ids]
    engine.add_request(1, [9, 8], SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=absent))
    engine.step()
    engine.add_request(
        2, [9, 8], SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[*absent, token_ids[4]])
    )
    outputs = run(engine)
    end = token_ids.index(token_ids[4]) + 1
    assert outputs[0, 0].token_ids == outputs[1, 0].token_ids == token_ids and EOS < 40
    assert outputs[2, 0].token_ids == token_ids[:end] and outputs[2, 0].finish_reason == "stop"


def test_a_prompt_without_numbers_is_named():
    model = make_model(**TINY, tie_word_embeddings=False)
    model.weights.embed_tokens[7] = np.nan
    engine = make_engine(model)
    for name, prompt in (("a", [5, 6]), ("b", [5, 7]), ("c", [6, 5])):
        engine.add_request(name, prompt, SamplingParams(max_tokens=3))
    with pytest.raises(PromptError, match="prompt b: the model's log-probs are not finite") as error:
        run(engine)
    assert error.value.request_id == "b"


def test_after_an_exception_the_engine_is_usable(alone):
    model = make_model(**TINY)
    engine, params = make_engine(model), SamplingParams(max_tokens=6)
    engine.add_request(0, list(range(20)), params)
    engine.step()
    weights = model.weights.flat.copy()
    model.weights.flat[...] = np.nan
    with pytest.raises(UserError, match="not finite"):
        engine.step()
    model.weights.flat[...] = weights
    engine.reset()
    check_idle(engine)
    engine.add_request(0, list(range(20)), params)
    assert [result(run(engine)[0, 0])] == alone(list(range(20)), params)


def test_an_engine_that_is_dropped_frees_its_cache_at_once(model):
    def kv_bytes():
        memory.reset_peaks()
        return memory.report().get("kv", 0)

    before = kv_bytes()
    engine = make_engine(model)
    engine.add_request(0, [1, 2])
    run(engine)
    reference = weakref.ref(engine)
    assert kv_bytes() > before
    del engine
    assert reference() is None and kv_bytes() == before


@pytest.mark.gpu
def test_steps_come_after_weights_that_another_stream_writes():
    import cupy

    model = make_model("bfloat16", head_dim=64)
    engine, params = make_engine(model, blocks=400), SamplingParams(max_tokens=8, ignore_eos=True)
    engine.add_request(0, list(range(20)), params)
    run(engine)
    new = model.weights.flat * model.weights.flat.dtype.type(0.7)
    cupy.cuda.Device().synchronize()
    large = cupy.ones((8192, 8192), cupy.float32)
    with cupy.cuda.Stream(non_blocking=True):
        # Takes much longer than the host needs to the first step.
        for _ in range(20):
            large = large @ large
        model.weights.flat[...] = new
        engine.update_weights(1)
    engine.add_request(0, list(range(20)), params)
    found = result(run(engine)[0, 0])
    cupy.cuda.Device().synchronize()
    fresh = make_engine(model, blocks=400)
    fresh.add_request(0, list(range(20)), params)
    assert found == result(run(fresh)[0, 0])


def test_sequences_that_are_about_to_end_are_not_moved(model):
    first, second = make_engine(model), make_engine(model)
    limits = [6, 40, 12]
    for number, max_tokens in enumerate(limits):
        first.add_request(number, [number + 3] * 5, SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True))
    for _ in range(4):
        first.step()
    # What is in flight is computed before they are moved.
    moved = first.move_out(3, least_left=5)
    assert {sequence.request_id for sequence in moved} == {1, 2} and first.num_unfinished == 1
    second.move_in(moved)
    outputs = run(first) | run(second)
    assert [len(outputs[number, 0].token_ids) for number in range(3)] == limits
