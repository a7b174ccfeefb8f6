"""Speculative decoding: texts equal those of decode whatever the drafts are, and it goes on only where it pays."""

import dataclasses

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine import LLM, Engine, SamplingParams, speculation
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.engine.ngram import NgramIndex
from rlnumba.engine.scheduler import SchedulerOutput
from rlnumba.engine.speculation import MAX_NUM_SEQS, RETRY_STEPS, SpeculationPolicy, Speculator
from rlnumba.engine.steps.shapes import StepShape, pad_step, row_bucket_of
from rlnumba.errors import ConfigError
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device
from tests.engine.test_core import TINY, check_blocks, check_idle, run
from tests.engine.test_llm import TwoCharacterTokens, make_model
from tests.engine.test_run_ahead import (
    engine_of,
    random_requests,
    result,
    results,
    run_all,
    run_with_events,
    texts_of_steps_that_wait,
)
from tests.model.test_lora import MODEL, saved_adapters

VOCABULARY = TINY["vocab_size"]


@pytest.fixture(scope="module")
def model():
    return make_model(**TINY)


def use_known_texts(monkeypatch, expected, rng):
    """Draw drafts from completions {key: result}: right, cut short, wrong at one place, too many, or none at all."""
    accepted = []

    def drafts(speculator, table, rows):
        found = []
        for row in rows.tolist():
            sequence = table.sequences[row]
            done = int(table.length[row]) - len(sequence.prompt)
            ids = list(expected[sequence.request_id, sequence.index][0][done : done + speculator.num_drafts])
            kind = rng.integers(5)
            if kind == 0 and ids:
                ids = ids[: rng.integers(len(ids))]
            elif kind == 1 and ids:
                ids[rng.integers(len(ids))] = int(rng.integers(VOCABULARY))
            elif kind == 2:
                ids += rng.integers(0, VOCABULARY, speculator.num_drafts - len(ids)).tolist()
            found.append(ids)
        return found

    update = Engine._record

    def record(engine, step, *computed):
        output = update(engine, step, *computed)
        if step.has_drafts:
            accepted.append(len(output.token_ids) - len(step.rows))
        return output

    monkeypatch.setattr(Speculator, "drafts", drafts)
    monkeypatch.setattr(Engine, "_record", record)
    return accepted


CONFIGS = [
    {"max_num_seqs": 8},
    {"max_num_seqs": 6, "enable_prefix_caching": False},
    {"max_num_seqs": 5, "max_num_batched_tokens": 30, "num_speculative_tokens": 3},
    {"num_gpu_blocks_override": 14, "max_num_seqs": 8},
    {"num_gpu_blocks_override": 9, "max_num_seqs": 3, "enable_prefix_caching": False},
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("config", CONFIGS, ids=",".join)
@pytest.mark.parametrize("known", [True, False], ids=["known texts", "n-grams"])
def test_texts_are_those_without_drafts(model, monkeypatch, config, seed, known):
    """With stop strings and ids, min_tokens, penalties, filters, thresholds, groups, aborts, versions, preemption."""
    rng = np.random.default_rng(seed)
    requests = random_requests(rng)
    expected = texts_of_steps_that_wait(model, seed, speculative_method="none")
    accepted = use_known_texts(monkeypatch, expected, rng) if known else None
    engine = engine_of(model, speculative_method="ngram", **config)
    assert run_all(engine, requests) == expected
    check_idle(engine)
    assert accepted is None or sum(accepted) > 20
    outputs, aborted = run_with_events(engine, requests, rng)
    check_idle(engine)
    assert {key for key in expected if key[0] not in aborted} <= outputs.keys()
    assert results(outputs) == {key: expected[key] for key in outputs}
    assert not engine.speculator.requests and not engine.speculator.finished


def test_speculation_that_begins_and_ends_at_any_time_changes_no_text(model, monkeypatch):
    rng = np.random.default_rng(5)
    requests = random_requests(rng)
    expected = run_all(engine_of(model, speculative_method="none"), requests)
    use_known_texts(monkeypatch, expected, rng)
    monkeypatch.setattr(SpeculationPolicy, "decide", lambda *_: bool(rng.random() < 0.5))
    engine = engine_of(model, speculative_method="auto", max_num_seqs=8)
    engine.speculator.is_enabled = True
    for _ in range(3):
        assert run_all(engine, requests) == expected
        check_idle(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_drafts_save_steps(model, monkeypatch, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=65, ignore_eos=True, n=2)
    request = [([3, 4, 5], params)]
    expected = run_all(engine_of(model, speculative_method="none"), request)

    def drafts(speculator, table, rows):
        found = []
        for row in rows.tolist():
            ids = expected[0, table.sequences[row].index][0]
            found.append(ids[table.length[row] - 3 :][: speculator.num_drafts])
        return found

    monkeypatch.setattr(Speculator, "drafts", drafts)
    engine, num_steps, outputs = engine_of(model, speculative_method="ngram"), 0, {}
    engine.add_request(0, *request[0])
    while engine.has_unfinished:
        output = engine.step()
        num_steps += 1
        for _, index, completion in output.finished:
            outputs[0, index] = result(completion)
    assert outputs == expected
    # The prompt, the second sequence's, a step of decode, and 63 tokens of at most 8 a step.
    assert num_steps <= 3 + 8


def test_a_stop_inside_of_accepted_drafts_cuts_the_text_there(model, monkeypatch):
    free = SamplingParams(max_tokens=60, ignore_eos=True, logit_thresholds=True, top_k=20)
    expected = run_all(engine_of(model, speculative_method="none"), [([7, 8], free)])
    ids, _, _, _, text = expected[0, 0]
    monkeypatch.setattr(
        Speculator, "drafts", lambda s, table, rows: [ids[int(table.length[row]) - 2 :][: s.num_drafts] for row in rows]
    )
    ends = set()
    for end in range(3, 40, 2):
        if ids.index(ids[end]) == end:
            stop = dataclasses.replace(free, stop_token_ids=(ids[end],), min_tokens=end // 2)
            engine = engine_of(model, speculative_method="ngram")
            (stopped,) = run_all(engine, [([7, 8], stop)]).values()
            assert stopped[0] == ids[: end + 1] and stopped[3] == "stop"
            assert stopped == run_all(engine_of(model, speculative_method="none"), [([7, 8], stop)])[0, 0]
            check_idle(engine)
            ends.add(end)
        string = text[2 * end + 1 : 2 * end + 4]
        stop = dataclasses.replace(free, stop=(string,))
        (stopped,) = run_all(engine_of(model, speculative_method="ngram"), [([7, 8], stop)]).values()
        assert stopped == run_all(engine_of(model, speculative_method="none"), [([7, 8], stop)])[0, 0]
        assert stopped[4] == text[: text.index(string)]
    assert len(ends) > 4


def test_greedy_texts_that_repeat_take_fewer_steps():
    """N-grams find the period of a model's text without any help; so do those of a group at temperature 0."""
    folder = MODEL
    model = load_model(folder)
    engine = Engine(model, None, EngineConfig(speculative_method="ngram"))
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, n=2)
    engine.add_request(0, [5, 6, 7], params)
    num_steps = 0
    while engine.has_unfinished:
        num_steps += 1
        engine.step()
    assert num_steps < 70


def test_adapters_keep_their_texts(tmp_path):
    folders = saved_adapters(tmp_path)
    names = ["all", None, "one", "wide"]
    prompts = [[3 + (5 * i) % 40 for i in range(20 + 3 * j)] for j in range(len(names))]
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.3)
    completions = []
    for method in ("none", "ngram"):
        llm = LLM(load_model(MODEL), None, EngineConfig(speculative_method=method), adapters=folders)
        outputs = llm.generate(prompts, params, adapters=names)
        completions.append([(c.token_ids, c.logprobs) for output in outputs for c in output.completions])
    assert completions[0] == completions[1]


def test_padding_changes_no_bits(model):
    """The arrays of a step with drafts that a graph reads, of more sequences and tokens than the step has."""
    if device.name() != "cpu":
        pytest.skip("computes the arrays of a graph without one")
    rng = np.random.default_rng(2)
    requests = [
        (rng.integers(0, VOCABULARY, 5 + i).tolist(), SamplingParams(max_tokens=30, ignore_eos=True, seed=i, **penalty))
        for i, penalty in enumerate([{}, {"repetition_penalty": 1.2}, {"min_tokens": 9, "stop_token_ids": (3,)}])
    ]
    expected = run_all(engine_of(model, speculative_method="none"), requests)
    engine, padded = engine_of(model, speculative_method="ngram"), []
    runner = engine.runner

    def replay(graph, arrays, shape):
        assert shape.rows == row_bucket_of(3) == 4
        assert shape.sampled == 4 * shape.max_seqlen_q == len(arrays["input_ids"])
        assert arrays["cu_seqlens"][-1] <= shape.sampled and len(arrays["context_lens"]) == 4
        padded.append(arrays["cu_seqlens"][-1])
        runner.compute(arrays, shape)

    run_eagerly, runner._replay = runner.run, replay

    def run_padded(step, table):
        runner.eager = not (step.has_drafts and len(step.rows) == 3)
        try:
            return run_eagerly(step, table)
        finally:
            runner.eager = True

    runner.run = run_padded
    engine.speculator.drafts = lambda table, rows: [[1, 2, 3, 4][: 1 + row] for row in rows.tolist()]
    # No sequence's are the tokens behind the last one: whatever memory holds goes through the model there.
    with np.errstate(all="ignore"):
        assert run_all(engine, requests) == expected
    assert len(padded) > 5


def test_steps_with_drafts_of_one_size_have_arrays_of_one_size():
    arrays = {
        "input_ids": np.array([5, 6, 7], np.int32),
        "slot_mapping": np.array([1, 2, 3], np.int32),
        "block_tables": np.array([[4], [8]], np.int32),
        "cu_seqlens": np.array([0, 2, 3], np.int32),
        "context_lens": np.array([9, 3], np.int32),
        "temperature": np.ones(3, np.float32),
    }
    padded = pad_step(arrays, StepShape(3, 3, 3, 2, 200).of_drafts(8), BLOCK_SIZE)
    assert padded["cu_seqlens"].tolist() == [0, 2, 3, 4, 5]
    assert padded["context_lens"].tolist() == [9, 3, 0, 0]
    assert padded["input_ids"].tolist() == [5, 6, 7] + 29 * [0]
    assert padded["slot_mapping"].tolist() == [1, 2, 3] + 29 * [-1]
    assert padded["block_tables"].shape == (4, 16) and padded["block_tables"][:2, 0].tolist() == [4, 8]
    assert padded["temperature"].shape == (32,)


def test_a_large_batch_has_no_drafts(model):
    engine = engine_of(model, speculative_method="ngram")
    for number in range(MAX_NUM_SEQS + 1):
        engine.add_request(number, [1, 2, 1, 2, 1, 2], SamplingParams(max_tokens=6 + 4 * number, ignore_eos=True))
    engine.speculator.drafts = lambda table, rows: [[1]] * len(rows)
    with_drafts, run_step = [], engine.runner.run

    def run_and_note(step, table):
        with_drafts.append((step.has_drafts, len(step.rows)))
        return run_step(step, table)

    engine.runner.run = run_and_note
    run(engine)
    assert {rows for has, rows in with_drafts if has} == set(range(1, MAX_NUM_SEQS + 1))


def test_finished_completions_enter_the_index_bit_by_bit(model, monkeypatch):
    """Those of the group that ended while the batch was large, a limited number of tokens in a step."""
    monkeypatch.setattr(speculation, "TOKENS_AT_ONCE", 20)
    engine = engine_of(model, speculative_method="ngram")
    params = SamplingParams(max_tokens=150, ignore_eos=True, n=12, stop_token_ids=(7,))
    engine.add_request(0, [1, 2, 3], params)
    entered, extend = [0], NgramIndex.extend

    def extended(index, completion, token_ids):
        entered[-1] += len(token_ids)
        extend(index, completion, token_ids)

    monkeypatch.setattr(NgramIndex, "extend", extended)
    outputs = {}
    while engine.has_unfinished:
        for _, index, completion in engine.step().finished:
            outputs[index] = completion
        request = engine.speculator.requests.get(0)
        entered.append(0)
        if request is not None:
            last = {index: text[3:] for index, text in request.index.texts.items()}
    assert max(entered) == 20 and sum(entered) > 200
    assert len(last) == 12
    for index, ids in last.items():
        assert outputs[index].token_ids[: len(ids)] == ids
    assert sum(len(ids) == len(outputs[index].token_ids) for index, ids in last.items()) > 8


def is_of_drafts(shape):
    return shape.tokens == shape.sampled and shape.max_seqlen_q > 1


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 128), (9, 3, 64), (8, 1, 64)])
def test_graphs_of_steps_with_drafts_give_the_text_of_decode(heads, kv_heads, head_dim):
    """One to eight sequences in bfloat16, contexts over the end of a segment, and no memory after the first time."""
    model = make_model(
        "bfloat16", hidden_size=heads * head_dim, intermediate_size=1024, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=2048,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    pool = device.xp().get_default_memory_pool()
    plain = Engine(model, None, EngineConfig(num_gpu_blocks_override=1100, speculative_method="none"))
    engine = Engine(model, None, EngineConfig(num_gpu_blocks_override=1100, speculative_method="ngram"))
    rows = set()
    for sequences in (1, 2, 3, 5, 8):
        requests = []
        for number in range(sequences):
            prompt = rng.integers(0, 97, (1000, 20, 3)[number % 3]).tolist()
            filters = {"top_k": 20} if number % 2 else {"temperature": 0.5, "logit_thresholds": number == 2}
            requests.append((prompt, SamplingParams(max_tokens=60, ignore_eos=True, seed=number, **filters)))
        expected = run_all(plain, requests)
        with pytest.MonkeyPatch.context() as patch:
            accepted = use_known_texts(patch, expected, rng)
            assert run_all(engine, requests) == expected
            assert sum(accepted) > 20 * sequences
        # The first time prompts are not in the cache, and graphs are captured.
        for _ in range(3):
            used = pool.used_bytes(), pool.total_bytes()
            assert run_all(engine, requests) == expected
        assert (pool.used_bytes(), pool.total_bytes()) == used
        # A larger batch may move the buffers, and then all graphs are captured again.
        rows |= {key.shape.rows for key in engine.runner.graphs if is_of_drafts(key.shape)}
    assert rows == {1, 2, 4, 8}
    check_idle(engine)


def stage(policy, size, decode_s, verify_s, tokens_per_step, num_tokens):
    """Seconds of a policy for num_tokens of a sequence, when steps take so long and give so many."""
    seconds = tokens = 0.0
    while tokens < num_tokens:
        verified = policy.decide(size, tokens_per_step)
        step_s = verify_s if verified else decode_s
        policy.record(size, verified, step_s)
        seconds += step_s
        tokens += tokens_per_step if verified else 1
    return seconds


@pytest.mark.parametrize("slowdown", [1.1, 1.6, 2.5, 4.0])
@pytest.mark.parametrize("tokens_per_step", [1.0, 1.3, 1.7, 2.2, 3.0, 6.0])
def test_speculation_is_never_3_percent_slower(slowdown, tokens_per_step):
    policy, alone = SpeculationPolicy(), 1e-3 * 3000
    seconds = stage(policy, 4, 1e-3, slowdown * 1e-3, tokens_per_step, 3000)
    assert seconds < 1.03 * alone
    if tokens_per_step > 1.15 * max(slowdown, 1.5):
        assert seconds < alone * 1.15 * slowdown / tokens_per_step


def test_speculation_follows_the_text():
    """It ends when drafts become useless and begins again when they are good, with what it has measured."""
    policy = SpeculationPolicy()
    stage(policy, 1, 1e-3, 1.4e-3, 3.0, 500)
    assert policy.speculates
    stage(policy, 1, 1e-3, 1.4e-3, 1.1, 50)
    assert not policy.speculates
    stage(policy, 1, 1e-3, 1.4e-3, 2.0, 50)
    assert policy.speculates
    # Another size is measured first.
    assert not policy.decide(2, 3.0)


def test_what_was_measured_is_tried_again_after_so_many_steps_of_decode():
    """Drafts that are good enough for the first guess, where steps with drafts were slower than that."""
    policy = SpeculationPolicy()
    for verified, seconds in ((False, 1e-3), (True, 4e-3)) * 3:
        policy.record(1, verified, seconds)
    policy.num_decode = 0
    for _ in range(RETRY_STEPS):
        assert not policy.decide(1, 2.0)
        policy.record(1, False, 1e-3)
    assert policy.decide(1, 2.0)


def test_a_pause_of_the_caller_is_no_reason():
    policy = SpeculationPolicy()
    for seconds in (5.0, 1e-3, 1e-3, 1e-3, 7.0, 1e-6, 1e-3, 1e-3, 1e-3, 1e-3):
        policy.record(1, False, seconds)
    assert 0.9e-3 < policy.decode[1].value < 1.1e-3


def test_drafts_are_compared_while_nothing_is_speculated(model):
    """tokens_per_step of texts that repeat a prompt, without a step with drafts."""
    engine = engine_of(model, speculative_method="auto")
    engine.speculator.is_enabled = True
    policy = engine.speculator.policy
    policy.decide = lambda *_: False
    # One token alone: its text repeats itself from the start.
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine.add_request(0, [4] * 8, params)
    found = []
    while engine.has_unfinished:
        engine.step()
        found.append(engine.speculator.tokens_per_step)
    ids = run_all(engine_of(model, speculative_method="none"), [([4] * 8, params)])[0, 0][0]
    repeats = len(set(ids[-20:])) < 6
    assert (max(found) > 2) == repeats


def test_a_step_with_drafts_is_not_a_decode_step():
    rows = np.arange(2)
    step = SchedulerOutput(rows, rows, np.array([3, 1]), np.ones(2, bool), has_drafts=True)
    assert not step.is_decode and step.num_tokens == 4 and step.sampled_rows.tolist() == [0, 0, 0, 1]


def test_lengths_of_ngrams_are_checked():
    with pytest.raises(ConfigError, match="engine.prompt_lookup_min must be at most prompt_lookup_max .4., got 5"):
        EngineConfig(prompt_lookup_min=5)
    with pytest.raises(ConfigError, match="engine.speculative_method must be one of auto, ngram, none, got 'draft'"):
        EngineConfig(speculative_method="draft")


def test_blocks_are_accounted_for_between_steps(model):
    engine = Engine(model, TwoCharacterTokens(), EngineConfig(num_gpu_blocks_override=12, speculative_method="ngram"))
    for number in range(6):
        engine.add_request(number, [number, 1, 2] * 4, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        check_blocks(engine)
    assert engine.num_preemptions > 0
    check_idle(engine)
