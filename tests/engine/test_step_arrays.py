import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.engine.blocks.prefix_groups import PrefixGroups
from rlnumba.engine.kernel_list import (
    decode_buckets,
    extras_of,
    mixed_shapes,
    prefill_buckets,
    prefill_shapes,
    short,
    sizes_between,
    step_arrays_of,
)
from rlnumba.engine.scheduler import SchedulerOutput
from rlnumba.engine.sequence import SamplingParams, Sequence, SequenceTable
from rlnumba.engine.steps import attention
from rlnumba.engine.steps.arrays import decode_arrays, step_arrays
from rlnumba.engine.steps.shapes import (
    MAX_PREFILL_CONTEXT,
    MAX_PREFILL_TOKENS,
    StepShape,
    context_bucket_of,
    most_prefill_tokens,
    pad_step,
    prefill_bucket,
    prefill_rows_of,
    row_bucket_of,
    token_bucket_of,
)
from rlnumba.kernels.delta_rule.arithmetic import StateCache
from rlnumba.kernels.delta_rule.inputs import ConvCache
from rlnumba.kernels.ptx.wgmma import ROWS
from rlnumba.model.blocks.attention import Attention
from rlnumba.model.blocks.mlp import Mlp


def make_table():
    table = SequenceTable(num_rows=3, block_size=4)
    for row, (length, blocks) in enumerate([(9, [7, 3, 5]), (6, [2, 8]), (13, [1, 4, 6, 9])]):
        ids = 100 * row + np.arange(length, dtype=np.int32)
        penalty = 1.5 if row == 2 else 1.0
        params = SamplingParams(temperature=row + 0.5, repetition_penalty=penalty)
        table.put(row, Sequence(row, row, ids, params, (row, 40 + row), 20))
        table.block_tables[row, : len(blocks)] = blocks
    return table


def decode_shape(rows, context):
    return StepShape(rows, rows, rows, 1, context)


def step_of(rows, starts, counts, table):
    rows, starts, counts = map(np.array, (rows, starts, counts))
    return SchedulerOutput(rows, starts, counts, starts + counts == table.length[rows])


def test_arrays_of_a_mixed_step():
    table = make_table()
    arrays = step_arrays(step_of([1, 0, 2], [5, 3, 10], [1, 4, 3], table), table, 4)
    assert arrays["input_ids"].tolist() == [105, 3, 4, 5, 6, 210, 211, 212]
    assert arrays["position_ids"].tolist() == [5, 3, 4, 5, 6, 10, 11, 12]
    assert arrays["slot_mapping"].tolist() == [33, 31, 12, 13, 14, 26, 27, 36]
    assert arrays["cu_seqlens"].tolist() == [0, 1, 5, 8]
    assert arrays["context_lens"].tolist() == [6, 7, 13]
    assert arrays["block_tables"].tolist() == [[2, 8, 0, 0], [7, 3, 5, 0], [1, 4, 6, 9]]
    # Rows 1 and 2 have all their tokens computed and sample the next.
    assert arrays["rows"].tolist() == [0, 7] and arrays["position"].tolist() == [6, 13]
    assert arrays["temperature"].tolist() == [1.5, 2.5] and arrays["philox_key"].tolist() == [[1, 41], [2, 42]]
    assert arrays["penalty"].tolist() == [1.0, 1.5]
    assert arrays["history"].tolist() == [[*range(100, 106), *[-1] * 7], [*range(200, 213)]]
    for array in arrays.values():
        assert array.dtype.itemsize == 4 and array.flags.c_contiguous


def test_arrays_of_a_decode_step_and_its_padding():
    table = make_table()
    arrays = step_arrays(step_of([1, 0], [5, 8], [1, 1], table), table, 4)
    assert arrays["input_ids"].tolist() == [105, 8] and arrays["cu_seqlens"].tolist() == [0, 1, 2]
    assert "rows" not in arrays and "penalty" not in arrays
    padded = pad_step(arrays, decode_shape(4, 32), 4)
    assert padded["slot_mapping"].tolist() == [33, 20, -1, -1] and padded["context_lens"].tolist() == [6, 9, 0, 0]
    assert padded["cu_seqlens"].tolist() == [0, 1, 2, 3, 4]
    assert padded["block_tables"].shape == (4, 8) and padded["block_tables"][1, :3].tolist() == [7, 3, 5]
    assert {name: array.dtype for name, array in padded.items()} == {n: a.dtype for n, a in arrays.items()}


def test_arrays_that_advance_a_decode_step():
    table = make_table()
    table.put(2, Sequence(2, 0, np.arange(13, dtype=np.int32), SamplingParams(min_tokens=2), (2, 42), 20, (7, 9)))
    table.block_tables[2, 4] = 3
    step = step_of([2, 0], [12, 8], [1, 1], table)
    arrays = step_arrays(step, table, 4) | decode_arrays(step, table, 8)
    # All blocks that the rows have, also those of tokens to come.
    assert arrays["block_tables"].tolist() == [[1, 4, 6, 9, 3], [7, 3, 5, 0, 0]]
    assert arrays["stop_ids"].tolist() == [[7, 9], [-1, -1]] and arrays["length_limit"].tolist() == [20, 20]
    assert arrays["banned"].tolist() == [[7, 9], [-1, -1]] and arrays["banned_until"].tolist() == [15, 9]
    padded = pad_step(arrays, decode_shape(4, 32), 4)
    assert padded["live"].tolist() == [1, 1, 0, 0] and padded["num_steps"].tolist() == [0]
    assert padded["stop_ids"].tolist() == padded["banned"].tolist() == [[7, 9], [-1, -1], [-1, -1], [-1, -1]]
    assert padded["block_tables"].shape == (4, 8) and padded["block_tables"][0].tolist() == [1, 4, 6, 9, 3, 0, 0, 0]
    table = make_table()
    arrays = step_arrays(step_of([2], [12], [1], table), table, 4)
    padded = pad_step(arrays, decode_shape(1, 32), 4)
    assert padded["history"].tolist() == [[*range(200, 213), *[-1] * 19]]


def test_prefix_groups_are_among_the_arrays_and_padding_is_in_none():
    table = make_table()
    step = step_of([1, 0], [5, 8], [1, 1], table)
    step.prefix_groups = PrefixGroups(np.array([0, 1]), np.array([4, 4], np.int32), np.array([2, 0], np.int32), 8)
    arrays = step_arrays(step, table, 4)
    assert arrays["shared_prefix_lens"].tolist() == [4, 4] and arrays["group_sizes"].tolist() == [2, 0]
    padded = pad_step(arrays, decode_shape(4, 32), 4)
    assert padded["shared_prefix_lens"].tolist() == [4, 4, 0, 0] and padded["group_sizes"].tolist() == [2, 0, 1, 1]
    assert {name: array.dtype for name, array in padded.items()} == {n: a.dtype for n, a in arrays.items()}
    same = pad_step(arrays, decode_shape(2, 16), 4)
    assert all(same[name].tolist() == arrays[name].tolist() for name in arrays if name != "block_tables")


def test_a_chunk_that_ends_before_the_last_token_samples_nothing():
    table = make_table()
    arrays = step_arrays(step_of([2], [0], [12], table), table, 4)
    assert "temperature" not in arrays and arrays["cu_seqlens"].tolist() == [0, 12]


def test_padding_of_a_mixed_step():
    table = make_table()
    arrays = step_arrays(step_of([1, 0, 2], [5, 3, 10], [1, 4, 3], table), table, 4)
    padded = pad_step(arrays, StepShape(4, 16, 4, 16, 32), 4)
    # The fourth sequence has a token without context; the seven after it are of none.
    assert padded["cu_seqlens"].tolist() == [0, 1, 5, 8, 9] and padded["context_lens"].tolist() == [6, 7, 13, 0]
    assert padded["slot_mapping"].tolist() == [33, 31, 12, 13, 14, 26, 27, 36] + [-1] * 8
    assert padded["input_ids"].tolist() == [105, 3, 4, 5, 6, 210, 211, 212] + [0] * 8
    assert padded["rows"].tolist() == [0, 7, 0, 0] and padded["temperature"].tolist() == [1.5, 2.5, 0, 0]
    assert padded["block_tables"].shape == (4, 8) and padded["block_tables"][2].tolist() == [1, 4, 6, 9, 0, 0, 0, 0]
    assert padded["history"].shape == (4, 32) and padded["history"][1, :13].tolist() == [*range(200, 213)]
    assert (padded["history"][2:] == -1).all() and (padded["history"][1, 13:] == -1).all()
    assert {name: array.dtype for name, array in padded.items()} == {n: a.dtype for n, a in arrays.items()}


def test_buckets_of_steps_hold_them():
    rng = np.random.default_rng(0)
    for _ in range(300):
        counts = rng.integers(1, rng.choice([2, 9, 100]), rng.integers(1, 40))
        shape = StepShape(len(counts), int(counts.sum()), len(counts) - 1, int(counts.max()), int(rng.integers(1, 999)))
        bucket = shape.of_prefill()
        assert all(holds >= size for holds, size in zip(bucket, shape, strict=True))
        # A token for each sequence that is added, so that all sequences have one.
        assert bucket.tokens - shape.tokens >= bucket.rows - shape.rows
        tokens = shape.tokens + bucket.rows - shape.rows
        assert bucket.tokens <= max(1.25 * tokens, tokens + 15)
        assert bucket.of_prefill() == bucket
    assert StepShape(1, 700, 0, 700, 700).of_prefill() == StepShape(1, 768, 0, 1024, 1024)


def test_large_steps_and_long_contexts_are_no_graphs():
    shape = StepShape(16, 600, 16, 60, 60)
    assert prefill_bucket(shape, 640) == shape.of_prefill() and prefill_bucket(shape, 639) is None
    assert prefill_bucket(shape._replace(max_context_len=MAX_PREFILL_CONTEXT), 2048).max_context_len == 4096
    assert prefill_bucket(shape._replace(max_context_len=MAX_PREFILL_CONTEXT + 1), 2048) is None


def config_of(hidden_size, intermediate_size, heads, kv_heads, head_dim):
    return SimpleNamespace(
        hidden_size=hidden_size, intermediate_size=intermediate_size, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, attn_output_gate=False, blocks=[[Attention(0), Mlp(0)]] * 3,
    )  # fmt: skip


def test_prefill_graphs_of_large_models_are_small():
    assert most_prefill_tokens(config_of(576, 1536, 9, 3, 64), 8192) == MAX_PREFILL_TOKENS
    assert most_prefill_tokens(config_of(1024, 3072, 16, 8, 128), 100) == 100
    # Qwen3-8B: 193 million weights a layer.
    assert most_prefill_tokens(config_of(4096, 12288, 32, 8, 128), 8192) == 310


@pytest.mark.parametrize("rows, bucket", [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (16, 16), (17, 32), (256, 256)])
def test_buckets(rows, bucket):
    assert row_bucket_of(rows) == bucket


def test_context_buckets():
    assert [context_bucket_of(n) for n in (1, 256, 257, 512, 513)] == [256, 256, 512, 512, 1024]


def test_second_steps_with_states_of_every_length_are_listed():
    """What is left of 4 prompts of any length after a state, for the 2 further completions of each, beside a token."""
    engine = SimpleNamespace(max_num_batched_tokens=2048, enable_prefix_caching=True)
    request = SimpleNamespace(engine=engine, model=SimpleNamespace(has_linear_attention=True), n=3, mixes=False)
    shapes = prefill_shapes(request, [100, 150, 200, 150], 0, 12, 256)
    assert all(type(shape.tokens) is int for shape in shapes)
    tiles = {-(-shape.tokens // 64) for shape in shapes}
    assert tiles >= {-(-4 * (1 + 2 * tail) // 64) for tail in range(1, 65)}
    # The first steps: 4 prompts of 100 to 200 tokens.
    assert tiles >= {-(-4 * length // 64) for length in range(100, 201)}


@pytest.mark.parametrize(
    "name, changes",
    [
        ("replay", {"logit_thresholds": True}),
        ("repetition", {"repetition_penalty": 1.5}),
        ("output", {"frequency_penalty": 0.5}),
        ("banned", {"min_tokens": 2}),
        ("logprobs", {"prompt_logprobs": 0}),
        ("bias", {"logit_bias": {3: 1.0}}),
        ("allowed", {"allowed_token_ids": [3]}),
        ("bad_words", {"bad_words": ["a"]}),
    ],
)
def test_what_one_of_the_requests_asks_for_is_listed(name, changes):
    assert extras_of([SamplingParams(), SamplingParams(**changes)]) == (name,) and extras_of([SamplingParams()]) == ()


def model_of(window=0, has_linear_attention=False, vocab_size=65):
    return SimpleNamespace(
        window_of=lambda layer: window, num_hidden_layers=1, has_linear_attention=has_linear_attention,
        vocab_size=vocab_size,
    )  # fmt: skip


def listed_arrays(shape, extras=(), lora=None, **model):
    found = step_arrays_of(shape, SimpleNamespace(model=model_of(**model), lora=lora, extras=extras))
    return {name: (array.dtype.name, array.shape) for name, array in found.items()}


ASKED = {
    (): {},
    ("repetition",): {"repetition_penalty": 1.5},
    ("output",): {"frequency_penalty": 0.5},
    ("logprobs",): {"logprobs": 2},
    ("replay",): {"logit_thresholds": True},
    ("banned",): {"min_tokens": 9},
}


@pytest.mark.parametrize("extras", ASKED)
def test_listed_arrays_are_those_of_steps(extras):
    """Names, dtypes and shapes of decode, and of a step with prefill, of three sequences of which each asks for it."""
    table = SequenceTable(num_rows=3, block_size=BLOCK_SIZE)
    for row, length in enumerate((9, 6, 13)):
        params = SamplingParams(temperature=1.0, **ASKED[extras])
        table.put(row, Sequence(row, 0, np.arange(length, dtype=np.int32), params, (row, 40), 20, (7,)))
    step = step_of([0, 1, 2], [8, 5, 12], [1, 1, 1], table)
    shape = decode_shape(3, 200).of_decode()
    arrays = step_arrays(step, table, BLOCK_SIZE) | decode_arrays(step, table, 2)
    arrays = pad_step(arrays, shape, BLOCK_SIZE)
    assert listed_arrays(shape, extras) == {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    step = step_of([0, 1, 2], [0, 0, 12], [9, 6, 1], table)
    shape = StepShape(3, 16, 3, 9, 200).of_prefill()
    arrays = pad_step(step_arrays(step, table, BLOCK_SIZE), shape, BLOCK_SIZE)
    assert listed_arrays(shape, extras) == {name: (array.dtype.name, array.shape) for name, array in arrays.items()}


def test_listed_arrays_of_rules_adapters_states_windows_and_groups():
    shape = StepShape(4, 4, 4, 1, 256, 8)
    plain = listed_arrays(shape._replace(max_group_size=1))
    assert {"live", "stop_ids", "num_steps"} <= plain.keys() and "rows" not in plain

    def added(*arguments, shape=shape, **keywords):
        return {name: each for name, each in listed_arrays(shape, *arguments, **keywords).items() if name not in plain}

    groups = {"shared_prefix_lens": ("int32", (4,)), "group_sizes": ("int32", (4,))}
    assert added() == groups
    shape = shape._replace(max_group_size=2)
    assert added(shape=shape) == groups
    shape = shape._replace(max_group_size=1)
    assert added(("bias",), shape=shape) == {"bias_ids": ("int32", (4, 1)), "bias": ("float32", (4, 1))}
    assert added(("allowed",), shape=shape) == {"allowed": ("int32", (4, 3))}
    assert added(("allowed",), shape=shape, vocab_size=64) == {"allowed": ("int32", (4, 2))}
    words = {"bad_words": ("int32", (4, 1, 1)), "starts": ("int32", (4,)), "history": ("int32", (4, 256))}
    assert added(("bad_words",), shape=shape) == words
    assert added(lora=("an adapter",), shape=shape) == {"adapter_ids": ("int32", (4,))}
    assert added(lora="one adapter of all", shape=shape) == {}
    tables = {"window_slots": ("int32", (4,)), "window_tables": ("int32", (4, 256 // BLOCK_SIZE))}
    assert added(window=32, shape=shape) == tables
    states = {"state_tables": ("int32", (4, 4)), "state_slots": ("int32", (4,)), "resumed_at": ("int32", (4,))}
    assert added(has_linear_attention=True, shape=shape) == states
    # Several sampled tokens of each sequence: drafts, which the host advances.
    drafts = listed_arrays(StepShape(4, 12, 12, 3, 256))
    assert not {"rows", "live"} & drafts.keys() and drafts["temperature"] == ("float32", (12,))
    assert drafts["block_tables"] == ("int32", (4, 256 // BLOCK_SIZE)) and drafts["cu_seqlens"] == ("int32", (5,))


@pytest.mark.parametrize("most_rows", [1, 3, 16, 17, 40, 300])
def test_listed_buckets_are_those_of_all_numbers_of_rows(most_rows):
    rows = range(1, most_rows + 1)
    assert decode_buckets(most_rows) == sorted({row_bucket_of(n) for n in rows})
    assert prefill_buckets(most_rows) == sorted({prefill_rows_of(n) for n in rows})


def test_mixed_shapes_have_every_bucket_of_rows_and_of_tokens():
    shapes = list(mixed_shapes(500, 40, 300))
    assert {shape.rows for shape in shapes} == {1, 2, 4, 8, 16, 32, 64}
    assert {shape.tokens for shape in shapes} == {token_bucket_of(n) for n in range(1, 449)}
    assert all(shape == prefill_bucket(shape, 500) and shape.max_context_len == 512 for shape in shapes)
    # As many sequences as have a token each, and one of them more.
    assert {(1, 16), (8, 16), (16, 32), (32, 48)} <= {(shape.rows, shape.tokens) for shape in shapes}
    assert all(shape.rows < shape.tokens for shape in shapes)
    assert list(mixed_shapes(8, 40, 300)) == []


def test_sizes_between():
    """One of each 64 rows, as the tensor cores' tiles, or of the choice that larger ones share, up to the last."""
    assert list(sizes_between(5, 4)) == [] and list(sizes_between(5, 5)) == [5]
    found = list(sizes_between(5, 300))
    assert found[0] >= 5 and found[-1] == 300 and found == sorted(set(found))
    assert {-(-each // ROWS) for each in found} == {-(-n // ROWS) for n in range(5, 301)}


def test_some_layers_stand_for_all():
    """At least three, and as many as have the first of each kind."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        blocks: tuple
        num_hidden_layers: int

    class Narrow:
        @staticmethod
        def matrices(config):
            return [SimpleNamespace(shape=(2, 3))]

        @staticmethod
        def vectors(config):
            return []

    class Other(Narrow):
        pass

    class WithVector(Narrow):
        @staticmethod
        def vectors(config):
            return [SimpleNamespace(shape=(3,))]

    def layers(*kinds):
        return short(Config(tuple((kind(),) for kind in kinds), len(kinds))).num_hidden_layers

    assert layers(*[Narrow] * 9) == 3 and layers(Narrow, Narrow) == 2 and layers(Narrow) == 1
    for kind in (Other, WithVector):
        assert layers(*[Narrow] * 4, kind, Narrow) == 5 and layers(Narrow, kind, *[Narrow] * 4) == 3


def test_decode_of_linear_attention_gets_the_states_of_the_layer(monkeypatch):
    found = []
    monkeypatch.setattr(attention, "delta_rule_decode", lambda *arguments: found.append(arguments))
    backend = attention.PagedAttention.__new__(attention.PagedAttention)
    backend.cache = SimpleNamespace(
        pages={5: ("states", "page rows")}, slots={5: ("keys", "values", "decays", "conv rows")}
    )
    backend.state_sequences = "sequences"
    backend.delta_rule_decode(5, "projected", "weights", "norm", "heads", "outputs")
    caches = StateCache("states", "keys", "values", "decays"), ConvCache("conv rows", "page rows")
    assert found == [("projected", "weights", "norm", "heads", "sequences", *caches, "outputs")]
