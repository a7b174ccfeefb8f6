"""Decode that runs ahead of the host: the texts of steps that wait, what is in flight, and what ends it."""

import dataclasses
import functools
import gc
import weakref

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine import Engine, SamplingParams, run_ahead
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.engine.runner import MAX_IN_FLIGHT, RESERVED_TOKENS
from rlnumba.runtime import device
from tests.engine.test_core import TINY, check_blocks, check_idle, make_engine, run
from tests.engine.test_llm import TwoCharacterTokens, make_model

# Of the requests of a test, which are run with and without running ahead.
NUM_REQUESTS = 30
VOCABULARY = TINY["vocab_size"]


@pytest.fixture(scope="module")
def model():
    return make_model(**TINY)


def random_params(rng):
    def maybe(value, otherwise, share=0.3):
        return value if rng.random() < share else otherwise

    max_tokens = int(rng.choice([1, 2, 5, 20, 70]))
    strings = ["".join(rng.choice(list("abcd"), rng.integers(1, 3))) for _ in range(rng.choice([0, 0, 1, 2]))]
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.8, 1.0])),
        top_k=maybe(int(rng.integers(1, 9)), 0),
        top_p=maybe(0.8, 1.0),
        repetition_penalty=maybe(1.3, 1.0),
        presence_penalty=maybe(0.7, 0.0),
        frequency_penalty=maybe(-0.2, 0.0),
        max_tokens=max_tokens,
        min_tokens=maybe(int(rng.integers(0, max_tokens + 1)), 0),
        stop=tuple(strings),
        stop_token_ids=tuple(rng.integers(6, VOCABULARY, rng.choice([0, 0, 2])).tolist()),
        ignore_eos=bool(rng.random() < 0.5),
        seed=int(rng.integers(3)),
        n=int(rng.choice([1, 1, 2, 4])),
        logit_thresholds=bool(rng.random() < 0.2),
    )


def random_requests(rng, plain=False):
    """(prompt, params) of NUM_REQUESTS requests, some of which begin with the same blocks."""
    stem, requests = rng.integers(0, VOCABULARY, 3 * BLOCK_SIZE).tolist(), []
    for _ in range(NUM_REQUESTS):
        prompt = stem[: rng.integers(0, len(stem))] + rng.integers(0, VOCABULARY, rng.integers(1, 8)).tolist()
        params = random_params(rng)
        if plain:
            params = SamplingParams(max_tokens=params.max_tokens, n=params.n, ignore_eos=params.ignore_eos)
        requests.append((prompt, params))
    return requests


def engine_of(model, **config):
    return Engine(model, TwoCharacterTokens(), EngineConfig(**{"num_gpu_blocks_override": 200} | config))


def result(completion):
    thresholds = None if completion.thresholds is None else completion.thresholds.tolist()
    return completion.token_ids, completion.logprobs, thresholds, completion.finish_reason, completion.text


def results(outputs):
    return {key: result(completion) for key, completion in outputs.items()}


def run_all(engine, requests):
    for number, request in enumerate(requests):
        engine.add_request(number, *request)
    return results(run(engine))


@functools.cache
def texts_of_steps_that_wait(model, seed, **options):
    """run_all of the random_requests of a seed, by an engine of which each step waits for the one before."""
    requests = random_requests(np.random.default_rng(seed))
    return run_all(engine_of(model, async_scheduling=False, **options), requests)


def run_with_events(engine, requests, rng):
    """Add the requests between steps, and abort, change the version, sleep at random: ({key: completion}, aborted)."""
    outputs, streamed, aborted, added = {}, {}, set(), 0
    while added < len(requests) or engine.has_unfinished:
        while added < len(requests) and rng.random() < 0.4:
            engine.add_request(added, *requests[added])
            added += 1
        if engine.requests and rng.random() < 0.05:
            number = list(engine.requests)[rng.integers(len(engine.requests))]
            engine.abort(number)
            aborted.add(number)
        event = rng.random()
        if event < 0.03:
            engine.update_weights(engine.policy_version + 1)
        elif event < 0.05:
            engine.sleep()
        elif event < 0.1:
            engine.synchronize()
        if not engine.has_unfinished:
            assert not engine.run_ahead.in_flight
        output = engine.step()
        for token in output.new_tokens:
            assert token.request_id not in aborted
            streamed.setdefault((token.request_id, token.index), []).append(token.token_id)
        for request_id, index, completion in output.finished:
            assert request_id not in aborted
            outputs[request_id, index] = completion
        check_blocks(engine)
    for key, completion in outputs.items():
        assert streamed[key] == completion.token_ids
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert len(completion.policy_versions) == len(completion.token_ids)
    return outputs, aborted


CONFIGS = [
    {},
    {"enable_prefix_caching": False},
    {"max_num_seqs": 5, "max_num_batched_tokens": 30},
    {"num_gpu_blocks_override": 14},
    {"num_gpu_blocks_override": 30, "max_num_seqs": 12, "enable_prefix_caching": False},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ",".join(config) or "default")
def test_texts_are_those_of_steps_that_wait(model, config, seed, monkeypatch):
    # Rows of many that have ended stay, as in graphs.
    monkeypatch.setattr(run_ahead, "MAX_ENDED_SHARE", (1 / 16, 0.5, 1)[seed])
    rng = np.random.default_rng(seed)
    requests = random_requests(rng)
    expected = texts_of_steps_that_wait(model, seed)
    assert {reason for *_, reason, _ in expected.values()} == {"stop", "length"}
    engine = engine_of(model, **config)
    # And sequences are admitted several at once.
    monkeypatch.setattr(run_ahead, "ADMIT_BYTES", 2 * engine.runner.step_bytes(100))
    engine.run_ahead.admits_always = seed != 1
    assert run_all(engine, requests) == expected
    check_idle(engine)
    outputs, aborted = run_with_events(engine, requests, rng)
    check_idle(engine)
    wanted = {key for key in expected if key[0] not in aborted}
    assert wanted <= outputs.keys()
    assert results(outputs) == {key: expected[key] for key in outputs}


def test_too_few_blocks_still_preempt(model):
    engine = make_engine(model, blocks=14)
    requests = random_requests(np.random.default_rng(1), plain=True)
    assert run_all(engine, requests) == run_all(make_engine(model, async_scheduling=False), requests)
    assert engine.num_preemptions > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_contexts_that_outgrow_their_bucket(enabled):
    """Decode over a power of two, where the arrays are made again."""
    model, limit = make_model(**TINY, max_position_embeddings=700), 300
    engine = make_engine(model, blocks=80, async_scheduling=enabled)
    params = SamplingParams(max_tokens=limit, ignore_eos=True, repetition_penalty=1.1, n=2)
    engine.add_request(0, [1, 2, 3], params)
    lengths, begin = [], engine.runner.begin
    engine.runner.begin = lambda step, table: lengths.append(int(step.starts.max())) or begin(step, table)
    outputs = run(engine)
    assert len({len(c.token_ids) for c in outputs.values()} | {limit}) == 1
    if enabled:
        assert lengths == [3, 256]
    else:
        assert lengths == list(range(3, 3 + limit - 1))


def spy_on(engine):
    """Lists of the steps in flight after each launch, and of the rows of each computed step."""
    runner, flight, computed = engine.runner, [], []
    launch, compute = runner.launch, runner.compute

    def launched(*part):
        launch(*part)
        flight.append(1 + len(engine.run_ahead.in_flight))

    def compute_and_count(arrays, *sizes):
        computed.append(len(arrays["input_ids"]))
        compute(arrays, *sizes)

    runner.launch, runner.compute = launched, compute_and_count
    return flight, computed


def test_two_steps_are_in_flight_and_none_that_is_not_needed(model):
    engine = make_engine(model)
    flight, computed = spy_on(engine)
    engine.add_request(0, [1, 2], SamplingParams(max_tokens=10, ignore_eos=True))
    outputs = run(engine)
    assert len(outputs[0, 0].token_ids) == 10
    # The prompt gives the first token; nine steps are launched, all but the first while another is in flight.
    assert flight == [1] + [2] * 8
    if device.name() == "cpu":
        assert computed == [2] + [1] * 9
    check_idle(engine)


def test_steps_wait_without_async_scheduling(model):
    engine = make_engine(model, async_scheduling=False)
    flight, _ = spy_on(engine)
    engine.add_request(0, [1, 2], SamplingParams(max_tokens=10, ignore_eos=True))
    run(engine)
    assert flight == [1] * 9


def test_a_steady_step_uploads_nothing(model):
    """One upload for hundreds of steps, and blocks for as many tokens at a time as RESERVED_TOKENS."""
    engine = make_engine(model, blocks=200)
    sent, edited = [], []
    send, repeat = engine.runner.upload.send, engine.runner.repeat
    engine.runner.upload.send = lambda arrays: sent.append(len(arrays["input_ids"])) or send(arrays)
    engine.runner.repeat = lambda edits=None: edited.append(edits is not None) or repeat(edits)
    for number in range(4):
        engine.add_request(number, [number] * (3 + 5 * number), SamplingParams(max_tokens=150, ignore_eos=True))
    run(engine)
    assert len(sent) == 2 and sum(edited) <= 4 * -(-150 // RESERVED_TOKENS) and len(edited) == 149


def test_synchronize_keeps_what_was_computed(model):
    params = SamplingParams(max_tokens=30, ignore_eos=True, n=2)
    expected = run_all(make_engine(model), [([3, 4], params)])
    engine, outputs = make_engine(model), {}
    engine.add_request(0, [3, 4], params)
    for _ in range(6):
        engine.step()
    assert len(engine.run_ahead.in_flight) == 1
    engine.synchronize()
    assert not engine.run_ahead.in_flight and len(engine.outputs) == 1
    engine.update_weights(3)
    assert engine.step().policy_version == 0
    assert engine.step().policy_version == 3
    outputs = run(engine)
    assert results(outputs) == expected
    versions = [completion.policy_versions for completion in outputs.values()]
    assert versions == [[0] * 7 + [3] * 23] * 2


def test_what_ended_before_synchronize_is_returned_after_it(model):
    engine = make_engine(model)
    for number in range(2):
        engine.add_request(number, [3, 4], SamplingParams(max_tokens=4, ignore_eos=True, seed=number))
    for _ in range(3):
        assert not engine.step().finished
    engine.sleep()
    assert not engine.requests and engine.has_unfinished
    assert [completion.request_id for completion in engine.step().finished] == [0, 1]
    assert not engine.has_unfinished
    engine.add_request(0, [3, 4], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.add_request(1, [3, 5], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.synchronize()
    engine.abort(1)
    output = engine.step()
    assert [token.request_id for token in output.new_tokens] == [0]
    assert [completion.request_id for completion in output.finished] == [0]
    check_idle(engine)


def test_nothing_is_in_flight_once_all_have_ended(model):
    engine = make_engine(model)
    free = SamplingParams(max_tokens=40, ignore_eos=True)
    token_ids = run_all(engine, [([7, 8], free)])[0, 0][0]
    end = next(i for i in range(4, 40) if token_ids.index(token_ids[i]) == i)
    # It ends by a token that the host has not foreseen: the step after it is in flight.
    engine.add_request(0, [7, 8], dataclasses.replace(free, stop_token_ids=(token_ids[end],)))
    flight, _ = spy_on(engine)
    assert run(engine)[0, 0].token_ids == token_ids[: end + 1]
    assert flight[-1] == 2 and len(flight) == end + 1 and not engine.run_ahead.in_flight
    engine.add_request(0, [7, 8], free)
    engine.step(), engine.step(), engine.step()
    assert engine.run_ahead.in_flight
    engine.abort(0)
    assert not engine.run_ahead.in_flight and not engine.has_unfinished
    check_idle(engine)


def test_a_request_that_fits_is_admitted_when_what_is_in_flight_has_been_read(model):
    engine = make_engine(model, max_num_seqs=2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.add_request(0, [1], params)
    for _ in range(4):
        engine.step()
    engine.add_request(1, [2], params)
    assert [token.request_id for token in engine.step().new_tokens] == [0]
    assert [token.request_id for token in engine.step().new_tokens] == [0, 1]
    # There is no row for a third one, which ends nothing.
    engine.step()
    engine.add_request(2, [3], params)
    engine.step()
    assert len(engine.run_ahead.in_flight) == 1 and not engine.run_ahead.has_ended
    outputs = run(engine)
    expected = run_all(make_engine(model), [([i], params) for i in (1, 2, 3)])
    assert {key: result(c) for key, c in outputs.items()} == expected


def test_blocks_reserved_ahead_are_given_back_to_admit(model):
    """A cache for two sequences of which the first has reserved blocks that the second one needs."""
    engine = make_engine(model, blocks=8, enable_prefix_caching=False)
    engine.add_request(0, [1], SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(17):
        engine.step()
    assert engine.scheduler.table.num_blocks[engine.scheduler.running[0]] == 4
    engine.add_request(1, [2] * (5 * BLOCK_SIZE), SamplingParams(max_tokens=1))
    engine.step(), engine.step()
    assert 1 not in engine.requests
    run(engine)
    assert engine.num_preemptions == 0
    check_idle(engine)


def rows_of_begun_steps(engine):
    """A list of how many rows each uploaded decode step has."""
    rows, begin = [], engine.runner.begin
    engine.runner.begin = lambda step, table: rows.append(len(step.rows)) or begin(step, table)
    return rows


def test_rows_that_ended_stay_until_they_are_many(model):
    """Without graphs: of 32 rows one may have ended; then the others are put together again."""
    engine = make_engine(model, blocks=200, enforce_eager=True)
    for number in range(32):
        params = SamplingParams(max_tokens=20 + 10 * (number >= 1) + 10 * (number >= 4), ignore_eos=True)
        engine.add_request(number, [number], params)
    rows = rows_of_begun_steps(engine)
    outputs = run(engine)
    assert [len(outputs[number, 0].token_ids) for number in (0, 1, 31)] == [20, 30, 40]
    assert rows == [32, 28]


@pytest.mark.gpu
def test_rows_that_ended_stay_in_a_graph_until_a_smaller_one_pays(model, monkeypatch):
    requests = [
        ([i], SamplingParams(max_tokens=20 + 10 * (i >= 8) + 10 * (i >= 20), ignore_eos=True)) for i in range(32)
    ]
    engine = make_engine(model, blocks=200)
    rows = rows_of_begun_steps(engine)
    expected = run_all(make_engine(model, blocks=200, async_scheduling=False), requests)
    assert run_all(engine, requests) == expected and rows == [32]
    engine.reset()
    monkeypatch.setattr(run_ahead, "REPACK_BYTES", 0)
    rows.clear()
    assert run_all(engine, requests) == expected and rows == [32, 12]


def admitted_together(engine, requests):
    """(results, how many sequences each step admits beside running ones while others wait)."""
    admitted, run_step = [], engine.runner.run

    def noted(step, table):
        new = int((step.starts < table.prompt_length[step.rows]).sum())
        if engine.scheduler.waiting and new < len(step.rows):
            admitted.append(new)
        return run_step(step, table)

    engine.runner.run = noted
    for number, request in enumerate(requests):
        engine.add_request(number, *request)
    return results(run(engine)), admitted


def test_rows_stay_free_until_several_are_admitted(model, monkeypatch):
    """As with graphs: while 84 wait for 16 rows, of which one is free after each step, a few are admitted at once."""
    requests = [([i % 40, i // 40], SamplingParams(max_tokens=8 + i % 16, ignore_eos=True)) for i in range(100)]
    expected = run_all(engine_of(model), requests)
    config = {"max_num_seqs": 16, "enable_prefix_caching": False}
    engine = engine_of(model, **config)
    assert run_all(engine, requests) == expected
    step_bytes, found = engine.runner.step_bytes(16 * 12), {}
    for cost in (0, step_bytes, 1 << 60):
        monkeypatch.setattr(run_ahead, "ADMIT_BYTES", cost)
        engine = engine_of(model, **config)
        engine.run_ahead.admits_always = False
        outputs, found[cost] = admitted_together(engine, requests)
        assert outputs == expected
        check_idle(engine)
    assert 1 in found[0] and np.mean(found[0]) < 2.5
    # With a row more free after each step, the free rows of five steps cost one step of 16.
    assert np.mean(found[step_bytes]) >= 4
    # Never beside others, until all that wait have a row.
    assert not found[1 << 60]


def test_sequences_are_admitted_beside_steps_with_drafts(model, monkeypatch):
    """Steps with drafts do not run ahead; rows that are free in them count as well."""
    requests = [([i % 40, i // 40], SamplingParams(max_tokens=40 + i % 16, ignore_eos=True)) for i in range(40)]
    expected = run_all(engine_of(model), requests)
    engine = engine_of(model, max_num_seqs=8, speculative_method="ngram")
    monkeypatch.setattr(run_ahead, "ADMIT_BYTES", engine.runner.step_bytes(8 * 30))
    engine.run_ahead.admits_always = False
    outputs, admitted = admitted_together(engine, requests)
    assert outputs == expected and admitted


def test_an_interrupt_anywhere_leaves_an_engine_that_reset_repairs(model):
    params = SamplingParams(max_tokens=25, n=3, ignore_eos=True)
    expected = run_all(make_engine(model), [([5, 6], params)])
    for name in ("begin", "repeat", "launch", "wait"):
        for nth in (1, 2, 3):
            engine, calls = make_engine(model), []
            call = getattr(engine.runner, name)

            def interrupted(*arguments, call=call, calls=calls, nth=nth):
                calls.append(1)
                if len(calls) == 2 * nth:
                    raise KeyboardInterrupt
                found = call(*arguments)
                if len(calls) == 2 * nth + 1:
                    raise KeyboardInterrupt
                return found

            setattr(engine.runner, name, interrupted)
            engine.add_request(0, [5, 6], params)
            for _ in range(2):
                try:
                    run(engine)
                except KeyboardInterrupt:
                    engine.reset()
                    check_idle(engine)
                    assert not engine.run_ahead.in_flight
                    engine.add_request(0, [5, 6], params)
            engine.reset()
            setattr(engine.runner, name, call)
            assert run_all(engine, [([5, 6], params)]) == expected


def test_eager_decode_runs_ahead_too(model):
    requests = random_requests(np.random.default_rng(8))
    engine = engine_of(model, enforce_eager=True)
    flight, _ = spy_on(engine)
    assert run_all(engine, requests) == run_all(engine_of(model, async_scheduling=False), requests)
    assert max(flight) == 2 < MAX_IN_FLIGHT


@pytest.mark.slow
@pytest.mark.sim
def test_kernels_run_ahead():
    """The kernels that advance a step and change it, in an engine of which a request is aborted."""
    model = make_model(**TINY | {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8})
    requests = [
        ([1, 2, 3], SamplingParams(max_tokens=5, repetition_penalty=1.2, min_tokens=2)),
        ([4], SamplingParams(max_tokens=9, ignore_eos=True)),
        (list(range(14)), SamplingParams(max_tokens=6, ignore_eos=True, top_k=3, logit_thresholds=True)),
    ]
    found = []
    for enabled in (False, True):
        engine = make_engine(model, blocks=6, async_scheduling=enabled)
        for number, request in enumerate(requests):
            engine.add_request(number, *request)
        for _ in range(3):
            engine.step()
        engine.abort(1)
        found.append(results(run(engine)))
        check_idle(engine)
    assert found[0] == found[1]


def pool_counters():
    """Bytes that CuPy's pools have taken and given out."""
    import cupy

    gc.collect()
    pool, pinned = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
    return pool.used_bytes(), pool.total_bytes(), pinned.n_free_blocks()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ",".join(config) or "default")
def test_texts_are_those_of_steps_that_wait_on_the_gpu(dtype, config):
    model = make_model(dtype, vocab_size=VOCABULARY, head_dim=64)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        requests = random_requests(rng)
        expected = run_all(engine_of(model, async_scheduling=False, enforce_eager=True), requests)
        engine = engine_of(model, **config)
        assert run_all(engine, requests) == expected
        assert engine.runner.graphs and {"history", "banned"} <= {n for k in engine.runner.graphs for n, *_ in k.arrays}
        # Now all graphs are there, and they hold other requests' values.
        assert run_all(engine, requests) == expected
        outputs, _ = run_with_events(engine, requests, rng)
        assert results(outputs) == {key: expected[key] for key in outputs}
        check_idle(engine)


@pytest.mark.gpu
def test_a_thousand_steps_allocate_nothing():
    model = make_model("bfloat16", vocab_size=VOCABULARY, head_dim=64, max_position_embeddings=4096)
    engine = make_engine(model, blocks=2000)
    params = SamplingParams(max_tokens=1500, ignore_eos=True, n=8)
    run_all(engine, [([1, 2, 3], params)])
    engine.add_request(0, [1, 2, 3], dataclasses.replace(params, seed=1))
    flight, _ = spy_on(engine)
    for _ in range(300):
        engine.step()
    before = pool_counters()
    for _ in range(1000):
        engine.step()
    assert pool_counters() == before
    assert flight.count(2) > 1200
    run(engine)
    assert pool_counters() == before


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_step_that_it_has_launched():
    """While the host is kept from reading, both steps in flight are computed."""
    import cupy

    model = make_model("bfloat16", vocab_size=VOCABULARY, head_dim=64)
    engine = make_engine(model, blocks=100)
    engine.add_request(0, [1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(10):
        engine.step()
    engine.run_ahead.launch()
    assert len(engine.run_ahead.in_flight) == 2
    cupy.cuda.Device().synchronize()
    assert all(engine.runner.events[number % MAX_IN_FLIGHT].done for number in engine.run_ahead.in_flight)
    assert int(engine.runner.decode.arrays["num_steps"][0]) == engine.runner.num_launched
    run(engine)


@pytest.mark.gpu
def test_prefix_groups_run_ahead():
    """Groups stay as they are while their sequences run ahead, also when some of a group have ended."""
    model = make_model("bfloat16", vocab_size=VOCABULARY, head_dim=64, max_position_embeddings=4096)
    rng = np.random.default_rng(2)
    requests = [
        (rng.integers(0, VOCABULARY, length).tolist(), SamplingParams(max_tokens=80, n=12, seed=length))
        for length in (2100, 1500, 1025, 300)
    ]
    expected = run_all(make_engine(model, blocks=4000, async_scheduling=False, enable_prefix_caching=False), requests)
    engine = make_engine(model, blocks=4000)
    assert run_all(engine, requests) == expected
    check_idle(engine)


def test_an_engine_is_freed_with_its_last_reference(model):
    """Without the garbage collector: the next engine is to have the memory of its cache."""
    engine = make_engine(model)
    engine.add_request(0, [1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    run(engine)
    freed = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert freed() is None
    finally:
        gc.enable()
