"""Models whose layers differ: in the number of blocks, in their sizes, and in what they keep in the cache."""

import dataclasses

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.config.lora import LoraConfig
from rlnumba.config.schema import RECOMPUTE_MODULES
from rlnumba.engine import few_rows, kernel_list
from rlnumba.engine.cache import KVCache, block_bytes_of
from rlnumba.engine.check import Agreement, check_agreement, first_difference
from rlnumba.model import config as config_module
from rlnumba.model.blocks.attention import Attention
from rlnumba.model.blocks.low_rank import projection_numbers
from rlnumba.model.blocks.mlp import Mlp
from rlnumba.model.config import ModelConfig
from rlnumba.model.layer_gradients import LayerGradients, backward_and_update
from rlnumba.model.lora import Adapter, load_adapter, save_adapter
from rlnumba.model.shard import Shard
from rlnumba.model.transformer import Tape, Transformer, load_model, pack, packed_attention, save_model
from rlnumba.model.weights import Weights, parameters
from rlnumba.parallel.layer_shards import LayerShards
from rlnumba.runs.micro_batch import cost_of
from rlnumba.runtime import device
from rlnumba.runtime.arena import Arena
from tests.close import assert_same_bits
from tests.model.gradients import gradients_of_logprobs
from tests.parallel import in_threads
from tests.trainers.runs import MODEL

pytestmark = pytest.mark.skipif(device.name() != "cpu", reason="how blocks are put together, not what they compute")
SEQUENCES = [[5, 9, 3, 8, 17, 2], [11, 4], [7, 3, 3, 9, 30, 12, 1, 6, 5]]


def half(config):
    return dataclasses.replace(config, intermediate_size=config.intermediate_size // 2)


class Narrow(Mlp):
    """An MLP of half the size."""

    def matrices(self, config):
        return super().matrices(half(config))

    def forward(self, x, w, ctx, out, recomputed=()):
        return super().forward(x, w, dataclasses.replace(ctx, config=half(ctx.config)), out, recomputed)

    def products(self, config):
        return super().products(half(config))

    def row_elements(self, config):
        return super().row_elements(half(config))


@pytest.fixture
def config(monkeypatch):
    """Three layers: a narrow MLP alone, attention and MLP, attention and a narrow MLP."""
    layers = ((Narrow(0),), (Attention(1), Mlp(1)), (Attention(2), Narrow(2)))
    monkeypatch.setattr(config_module, "_layers_of", lambda config: layers[: config.num_hidden_layers])
    return dataclasses.replace(ModelConfig.from_folder(MODEL), num_hidden_layers=3)


@pytest.fixture
def model(config):
    return Transformer(config, Weights.random(config, seed=4))


def test_gradients_are_those_of_finite_differences(model):
    _, grads = gradients_of_logprobs(model, SEQUENCES, Tape(), Arena("test"))
    generator, step = np.random.default_rng(2), 1e-2

    def loss():
        return gradients_of_logprobs(model, SEQUENCES, Tape(), Arena("test"))[0]

    for name in ("model.layers.1.qkv", "model.layers.0.gate_up", "model.layers.0.post_norm", "model.layers.2.down"):
        direction, view = generator.standard_normal(grads[name].shape).astype(np.float32), model.weights[name]
        direction /= np.linalg.norm(direction)
        view += step * direction
        above = loss()
        view -= 2 * step * direction
        difference = (above - loss()) / (2 * step)
        view += step * direction
        assert np.sum(grads[name] * direction) == pytest.approx(difference, rel=0.02, abs=1e-4), name


def test_what_is_recomputed_and_what_is_updated_in_the_backward_has_the_same_bits(model):
    _, kept = gradients_of_logprobs(model, SEQUENCES, Tape(), Arena("test"))
    modules = frozenset(RECOMPUTE_MODULES)
    for tape in (Tape(recompute=True), Tape(modules=modules), Tape(modules=modules, num_layers=2)):
        assert_same_bits(gradients_of_logprobs(model, SEQUENCES, tape, Arena("test"))[1].flat, kept.flat)
    # A layer's gradients share the memory of the largest layer's.
    whole, found, grads = model.weights, np.zeros(model.weights.size, np.float32), LayerGradients(model.weights, 2)
    sizes = [len(grads.layer(i)[1]) for i in range(3)]
    assert len(set(sizes)) == 3 and sizes[1] == max(sizes)
    batch, tape = pack(SEQUENCES), Tape()
    attention = packed_attention(model, batch)
    hidden = model.forward(batch.input_ids, batch.position_ids, attention, tape)
    assert_same_bits(model.forward(batch.input_ids, batch.position_ids, packed_attention(model, batch)), hidden)
    dhidden = np.random.default_rng(1).standard_normal(hidden.shape, np.float32)

    def update(start, gradients):
        found[start : start + len(gradients)] = gradients

    backward_and_update(model, dhidden.copy(), tape, grads, update)
    model.forward(batch.input_ids, batch.position_ids, packed_attention(model, batch), tape)
    expected = whole.grads()
    model.backward(dhidden.copy(), tape, expected)
    assert_same_bits(found, expected.flat)


def test_layers_in_parts_of_ranks(config):
    whole = Weights.random(config, seed=4)

    def layers_of(communicator):
        weights = LayerShards(config, communicator=communicator)
        for first, array in weights.spans():
            array[...] = whole.flat[first : first + len(array)]
        return [
            [None if view is None else view.copy() for w in weights.layer(index) for view in w] for index in range(3)
        ]

    for found in in_threads.run(layers_of, 3):
        for index, views in enumerate(found):
            for view, expected in zip(views, (v for w in whole.layers[index] for v in w), strict=True):
                assert (view is None) == (expected is None)
                if view is not None:
                    assert_same_bits(view, expected)


def test_parts_of_tensor_parallel_ranks(config):
    own = parameters(config, Shard(1, 2))
    for p, whole in zip(own, parameters(config), strict=True):
        is_cut = p.layer is not None and p.decays
        assert p.shape == ((whole.shape[0] // 2 if is_cut else whole.shape[0]), *whole.shape[1:]), p.name
    of_rank = Shard(1, 2).config_of(config)
    assert (of_rank.intermediate_size, of_rank.num_attention_heads) == (
        config.intermediate_size // 2, config.num_attention_heads // 2,
    )  # fmt: skip


def test_an_adapter_has_the_projections_of_each_layer(model, tmp_path):
    lora = LoraConfig(r=3, target_modules=["q_proj", "down_proj"])
    model.adapter = adapter = Adapter.new(model.config, lora, "float32", "base", 3)
    assert [(layout.name, layout.layers) for layout in adapter.places.layouts] == [
        ("down", (0, 2)), ("qkv", (1, 2)), ("down", (1,)),
    ]  # fmt: skip
    assert [sorted(layer) for layer in adapter.layers] == [["down"], ["down", "qkv"], ["down", "qkv"]]
    numbers = projection_numbers(model.blocks)
    assert sorted(numbers.values()) == list(range(10)) and (0, "qkv") not in numbers
    values = adapter.flat.copy()
    for _, view in adapter.tensors(values):
        view += np.float32(0.01)
    adapter.set_flat(values)
    save_adapter(adapter, tmp_path)
    loaded = load_adapter(tmp_path, model.weights, "float32", "base")
    assert_same_bits(loaded.flat, adapter.flat)
    _, grads = gradients_of_logprobs(model, SEQUENCES, Tape(), Arena("test"))
    assert grads.layers[0]["down"].a.any() and grads.layers[2]["qkv"].b.any()
    # The ranges of a rank's part are the whole adapter's values.
    part = Adapter(model.config, lora, "float32", "base", shard=Shard(1, 2))
    part.set_flat(adapter.flat)
    rows = len(adapter.layers[2]["down"].b) // 2
    assert_same_bits(part.layers[2]["down"].b, adapter.layers[2]["down"].b[rows:])


def test_the_cache_has_the_layers_with_an_entry(model):
    config = model.config
    cache = KVCache(config, 5, 16, np.float32)
    assert [pool.layers for pool in cache.pools] == [(1, 2)]
    heads = config.num_key_value_heads, config.head_dim
    assert block_bytes_of(config, 16, np.float32) == 2 * 2 * 16 * heads[0] * heads[1] * 4 == cache.nbytes // 5
    cache.take()
    assert list(cache.layers) == [1, 2] and cache.layers[2][1].shape == (5, 16, *heads)
    cache.layers[2][1][4] = 7
    cache.grow(8)
    assert cache.arrays[1].shape == (2, 8, 16, *heads) and (cache.arrays[1][1, 4] == 7).all()
    cache.give_back()
    assert cache.arrays is cache.layers is None


def test_rollout_and_training_agree(model):
    found = check_agreement(model, EngineConfig(max_num_batched_tokens=40), max_tokens=7)
    assert found == Agreement(2 * 6 * 7, 2 * 6 * 7, 0.0, None)
    forward = model.forward

    def changed(input_ids, position_ids, attention, tape=None, arena=None):
        hidden = forward(input_ids, position_ids, attention, tape, arena)
        if tape is not None and len(input_ids) == 3 * 21:
            tape.layers[0][0].activated[20, 1] += 1
        return hidden

    model.forward = changed
    ids = [3 + i % 40 for i in range(21)]
    assert first_difference(model, ids, 18, 3) == "layer 0 swiglu, at position 20 (decode)"


def test_weights_go_to_a_folder_and_back(model, tmp_path):
    save_model(model, tmp_path)
    assert_same_bits(load_model(tmp_path).weights.flat, model.weights.flat)


def test_costs_and_kernels_are_those_of_all_blocks(config, monkeypatch):
    D, F, H, E = config.hidden_size, config.intermediate_size, config.num_attention_heads, config.head_dim
    per_token = 2 * D * 2 * (H + config.num_key_value_heads) * E + 3 * D * F + 2 * 3 * D * (F // 2)
    assert cost_of([3, 4], config) == 7 * per_token + 2 * H * E * (9 + 16)
    assert few_rows.weights_of(Weights(config)) is None
    # Some layers stand for all once every kind is among them.
    monkeypatch.setattr(kernel_list, "SOME_LAYERS", 1)
    assert kernel_list.short(config).num_hidden_layers == 3
    monkeypatch.undo()
    plain = ModelConfig.from_folder(MODEL)
    monkeypatch.setattr(kernel_list, "SOME_LAYERS", 1)
    assert kernel_list.short(plain).num_hidden_layers == 1


def test_blocks_name_the_modules_that_may_be_recomputed():
    blocks = [block for blocks in ModelConfig.from_folder(MODEL).blocks for block in blocks]
    assert {name for block in blocks for name in block.RECOMPUTED} == set(RECOMPUTE_MODULES)
