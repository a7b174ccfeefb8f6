"""The engine with a cache whose layers with a window keep the blocks of their windows alone."""

import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnumba.config import EngineConfig
from rlnumba.engine.blocks.block_manager import BlockManager, blocks_needed
from rlnumba.engine.blocks.row_windows import RowWindows
from rlnumba.engine.blocks.window_blocks import WindowBlocks, places_for
from rlnumba.engine.cache import BlockSizes, KVCache
from rlnumba.engine.llm import LLM
from rlnumba.engine.scheduler import Scheduler
from rlnumba.engine.sequence import SamplingParams, Sequence, SequenceTable
from rlnumba.engine.steps.arrays import step_arrays
from rlnumba.engine.steps.shapes import StepShape, pad_step
from rlnumba.kernels.attention.sequences import first_kept_key
from rlnumba.model.config import ModelConfig
from rlnumba.model.transformer import load_model, pack, score
from rlnumba.runtime import device
from tests.close import assert_same_bits

FOLDER = pathlib.Path(__file__).parent.parent / "golden" / "gemma3"
BLOCK = 16


class WindowModel:
    """Keeps the tokens up to each slot of the windows' cache as one number, and checks what a step's queries read."""

    def __init__(self, num_places, window):
        self.cache, self.window = np.zeros(num_places * BLOCK, np.uint64), window

    def run(self, step, table):
        arrays, end = step_arrays(step, table, BLOCK), 0
        for i, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
            # The product of odd numbers, one of each token and position, is as good as a hash.
            factors = table.token_ids[row, : start + count].astype(np.uint64) * 2 + 3
            found = np.cumprod(factors + np.arange(start + count, dtype=np.uint64) * 1000)
            self.cache[arrays["window_slots"][end : end + count]] = found[start:]
            end += count
            read = np.arange(first_kept_key(start, self.window), start + count)
            slots = arrays["window_tables"][i, read // BLOCK] * BLOCK + read % BLOCK
            assert (self.cache[slots] == found[read]).all()
        ends = np.cumsum(step.counts)
        last = arrays["input_ids"] if step.has_drafts else arrays["input_ids"][ends[step.samples] - 1]
        sampled = (last * 7 + table.sample_index[step.sampled_rows]) % 50
        return sampled.astype(np.int32), np.zeros(len(sampled), np.float32)


def scheduler_of(rows, budget, num_blocks, window):
    """(a Scheduler whose table has RowWindows with as many places as these rows may hold, its WindowModel)."""
    table = SequenceTable(rows, BLOCK)
    places = min(num_blocks, rows * places_for(window, BLOCK, 80) + -(-budget // BLOCK))
    table.windows = RowWindows(WindowBlocks(places, num_blocks, BLOCK, window), table)
    return Scheduler(table, BlockManager(num_blocks, BLOCK), budget), WindowModel(places, window)


def sequence_of(number, index, prompt, max_tokens):
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(number, index, prompt, params, (0, 0), len(prompt) + max_tokens, ())


def test_a_long_sequence_holds_its_window_and_a_chunk():
    """8,192 tokens of a prompt, 512 a step, then 100 more: at most the blocks of 511 keys, their tile and the step."""
    scheduler, model = scheduler_of(2, 512, 600, 512)
    windows = scheduler.table.windows
    scheduler.add(sequence_of(0, 0, np.arange(8192, dtype=np.int32) % 90, 100))
    most_decoding = 0
    while (step := scheduler.schedule()) is not None:
        scheduler.update(step, *model.run(step, scheduler.table))
        if step.is_decode and len(scheduler.running):
            most_decoding = max(most_decoding, windows.blocks.num_held)
    assert windows.blocks.most_held <= places_for(512, BLOCK, 512) == 68
    assert most_decoding <= places_for(512, BLOCK, 1) == 36
    assert windows.blocks.num_held == 0 and scheduler.blocks.num_free == 600


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 230), st.integers(1, 3), st.integers(1, 60)), min_size=1,
             max_size=5),
    st.integers(1, 4), st.integers(0, 90), st.integers(0, 20), st.integers(1, 70), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_schedule_reads_the_windows_of_its_own_tokens(requests, rows, extra_budget, spare, window, seed):
    """Chunks, prefixes of others, preemption, drafts, tokens to come, removal: nothing that is read is another's."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 40, (3, 230)).astype(np.int32)
    sequences = [
        sequence_of(number, index, texts[text, :length], max_tokens)
        for number, (text, length, n, max_tokens) in enumerate(requests)
        for index in range(n)
    ]
    num_blocks = max(blocks_needed(each.length_limit, BLOCK) for each in sequences) + spare
    scheduler, model = scheduler_of(rows, rows + extra_budget, num_blocks, window)
    table, windows = scheduler.table, scheduler.table.windows
    for each in sequences:
        scheduler.add(each)
    while (step := scheduler.schedule(bool(rng.random() < 0.9) or not len(scheduler.running))) is not None:
        if step.is_decode and rng.random() < 0.3:
            step = scheduler.add_drafts(step, [rng.integers(0, 50, rng.integers(0, 6)).tolist() for _ in step.rows])
        elif step.is_decode and rng.random() < 0.3:
            length = table.length[step.rows]
            limit = table.length_limit[step.rows] - 1
            scheduler.row_blocks.reserve(step.rows, *(np.minimum(length + more, limit) for more in (1, 65)))
        sampled, logprobs = model.run(step, table)
        if step.has_drafts:
            step, kept = scheduler.accept(step, sampled)
            sampled, logprobs = sampled[kept], logprobs[kept]
        scheduler.update(step, sampled, logprobs)
        running = scheduler.running
        assert windows.blocks.num_held <= (windows.end - windows.first)[running].sum()
        if len(running) and rng.random() < 0.05:
            scheduler.remove(table.sequences[rng.choice(running)])
    assert windows.blocks.num_held == 0 and not windows.blocks.ref_count.any()
    assert scheduler.blocks.num_free == num_blocks


def test_a_prefix_without_places_is_computed_again_once():
    """Eight completions of a prompt whose blocks are cached but for its window: one of them computes it."""
    scheduler, model = scheduler_of(8, 1024, 400, 40)
    prompt, others = np.arange(200, dtype=np.int32), np.arange(900, dtype=np.int32) % 77 + 300

    def computed(sequences):
        for each in sequences:
            scheduler.add(each)
        total = 0
        while (step := scheduler.schedule()) is not None:
            scheduler.update(step, *model.run(step, scheduler.table))
            total += step.num_tokens
        return total

    first = computed([sequence_of(0, index, prompt, 1) for index in range(8)])
    assert first == 200 + 7 * 8
    assert computed([sequence_of(1, 0, prompt, 1)]) == 8
    # Takes all places, and leaves the prompt's blocks in the cache of the other layers.
    computed([sequence_of(2, index, others[index:], 1) for index in range(4)])
    assert (scheduler.table.windows.blocks.place[:12] == -1).all()
    assert computed([sequence_of(3, index, prompt, 1) for index in range(8)]) == first


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER, "float32")


@pytest.fixture
def poisoned(monkeypatch):
    """Keys and values that were never written are no numbers."""
    take = KVCache.take

    def take_poisoned(cache):
        is_new = cache.arrays is None
        take(cache)
        for array in cache.arrays if is_new else ():
            array.fill(np.nan)

    monkeypatch.setattr(KVCache, "take", take_poisoned)


def random_prompts(*lengths):
    return [np.random.default_rng(length).integers(3, 144, length).tolist() for length in lengths]


def assert_trained(model, outputs):
    """All completions have the log-probs of training."""
    sequences = [(o.prompt_token_ids, each) for o in outputs for each in o.completions]
    batch = pack([prompt + each.token_ids for prompt, each in sequences])
    trained = np.split(device.to_host(score(model, batch).logprobs), np.cumsum(batch.lengths)[:-1])
    for logprobs, (prompt, each) in zip(trained, sequences, strict=True):
        assert_same_bits(logprobs[len(prompt) :], each.array("logprobs"))


OPTIONS = {
    "chunks of 37": {"max_num_batched_tokens": 37},
    "whole prompts": {},
    "preemption": {"num_gpu_blocks_override": 45, "max_num_batched_tokens": 64},
    "without run ahead": {"async_scheduling": False, "max_num_batched_tokens": 400},
    "drafts": {"speculative_method": "ngram", "num_speculative_tokens": 3, "max_num_batched_tokens": 200},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_rollout_and_training_agree(model, poisoned, options):
    """Groups, contexts of many windows, a prompt that is there already, and fewer places than blocks."""
    config = EngineConfig(max_num_seqs=3, **OPTIONS[options])
    llm, params = LLM(model, config=config), SamplingParams(max_tokens=100, n=2, ignore_eos=True, seed=2)
    prompts = random_prompts(390, 300, 21)
    outputs = llm.generate(prompts, params) + llm.generate([prompts[0] + [5, 6]], params)
    assert_trained(model, outputs)
    cache, windows = llm.engine.runner.cache, llm.engine.scheduler.table.windows.blocks
    assert [len(cache.layers[layer][0]) for layer in range(4)] == [
        cache.num_places, cache.num_places, cache.num_blocks, cache.num_places
    ]  # fmt: skip
    assert cache.num_places == windows.num_places and windows.num_held == 0 < windows.most_held
    assert cache.num_places < cache.num_blocks or options == "whole prompts"
    assert (llm.engine.num_preemptions > 0) == (options == "preemption")


def test_aborted_requests_and_sleep_give_places_back(model, poisoned):
    llm = LLM(model, config=EngineConfig(max_num_seqs=4, max_num_batched_tokens=100))
    engine, params = llm.engine, SamplingParams(max_tokens=80, n=2, ignore_eos=True)
    windows = lambda: engine.scheduler.table.windows.blocks  # noqa: E731
    for number, prompt in enumerate(random_prompts(300, 120)):
        engine.add_request(number, prompt, params)
    for _ in range(30):
        engine.step()
    engine.abort(0)
    for _ in range(5):
        engine.step()
    engine.sleep()
    assert windows().num_held == 0
    found = {}
    while engine.has_unfinished:
        found |= {(each.request_id, each.index): each.completion for each in engine.step().finished}
    assert set(found) == {(1, 0), (1, 1)} and windows().num_held == 0
    prompt = random_prompts(120)[0]
    batch = pack([prompt + each.token_ids for each in found.values()])
    trained = np.split(device.to_host(score(model, batch).logprobs), np.cumsum(batch.lengths)[:-1])
    for logprobs, each in zip(trained, found.values(), strict=True):
        assert_same_bits(logprobs[120:], each.array("logprobs"))
    engine.reset()
    assert windows().num_places == engine.runner.cache.num_places and windows().num_held == 0


def test_padding_of_windows():
    """Rows and tokens that are added have no slot, and tables as wide as the others."""
    scheduler, _ = scheduler_of(2, 64, 30, 40)
    scheduler.add(sequence_of(0, 0, np.arange(50, dtype=np.int32), 4))
    arrays = step_arrays(scheduler.schedule(), scheduler.table, BLOCK)
    padded = pad_step(arrays, StepShape(1, 50, 1, 50, 50).of_prefill(), BLOCK)
    assert padded["window_slots"].shape == padded["slot_mapping"].shape > arrays["window_slots"].shape
    assert (padded["window_slots"][50:] == -1).all() and (padded["window_slots"][:50] == arrays["window_slots"]).all()
    assert padded["window_tables"].shape == padded["block_tables"].shape


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["chunks of 37", "preemption", "drafts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollout_and_training_agree_on_a_gpu(poisoned, dtype, options):
    """Captured steps; groups; blocks for tokens to come."""
    model = load_model(FOLDER, dtype)
    llm = LLM(model, config=EngineConfig(**{"num_gpu_blocks_override": 96, "max_num_seqs": 3} | OPTIONS[options]))
    params = SamplingParams(max_tokens=100, n=2, ignore_eos=True, seed=2)
    assert_trained(model, llm.generate(random_prompts(390, 300, 21, 250, 399), params))
    cache = llm.engine.runner.cache
    assert cache.num_places < cache.num_blocks and not llm.engine.scheduler.table.windows.blocks.num_held


def test_memory_is_shared_between_blocks_and_places():
    """Three layers of four have windows; blocks that have no place take a quarter of the bytes."""
    config = ModelConfig.from_folder(FOLDER)
    sizes = BlockSizes.of(config, BLOCK, np.float32, 4, 64)
    assert sizes.window_bytes * 4 == sizes.block_bytes * 3
    assert sizes.most_places == 4 * places_for(config.sliding_window, BLOCK, 80) + 4
    full = sizes.most_places * sizes.block_bytes
    assert sizes.blocks_in(full) == sizes.most_places and sizes.nbytes(sizes.most_places) == full
    assert sizes.blocks_in(full + 100 * sizes.block_bytes) == sizes.most_places + 400
    for num_blocks in (1, sizes.most_places - 1, sizes.most_places + 1, 500):
        cache = KVCache(config, num_blocks, BLOCK, np.float32, num_places=sizes.places_of(num_blocks))
        assert cache.nbytes == sizes.nbytes(num_blocks) and sizes.blocks_in(sizes.nbytes(num_blocks)) == num_blocks
    plain = ModelConfig.from_folder(FOLDER.parent / "models" / "qwen3_tied")
    assert BlockSizes.of(plain, BLOCK, np.float32, 4, 64)[1:] == (0, 0)
