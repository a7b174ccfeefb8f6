"""The comparison of rollout with training: what it counts, and whether it names the operator that was wrong."""

import dataclasses

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine import check
from rlnumba.engine.check import Agreement, check_agreement, first_difference
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device
from tests.trainers.runs import MODEL

pytestmark = pytest.mark.skipif(device.name() != "cpu", reason="changes arrays of NumPy")

IDS, PROMPT, COPIES = [3 + i % 40 for i in range(21)], 18, 3
# (block of a layer, field of what it saves): the operator that wrote it.
OUTPUTS = {
    (0, "normed"): "input rmsnorm",
    (0, "qkv"): "qkv_proj",
    (0, "q"): "qkv_split of q (head norm, rope)",
    (0, "k"): "qkv_split of k (head norm, rope)",
    (0, "v"): "qkv_split of v",
    (0, "attended"): "attention",
    (1, "x"): "o_proj",
    (1, "normed"): "post rmsnorm",
    (1, "gate_up"): "gate_up_proj",
    (1, "activated"): "swiglu",
}
AGREES = "log-prob of the sampled token, or what depends on the rest of the batch: alone, all hidden states agree"


def change(model, monkeypatch, forward, edit):
    """Call edit(tape, hidden) after one of the forwards: 0 is training's, 1 the prompt's, then one for each token."""
    calls, original = [], model.forward

    def changed(input_ids, position_ids, attend, tape=None, arena=None):
        hidden = original(input_ids, position_ids, attend, tape, arena)
        if len(calls) == forward:
            edit(tape, hidden)
        calls.append(len(input_ids))
        return hidden

    monkeypatch.setattr(model, "forward", changed)
    return calls


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("place", OUTPUTS, ids=OUTPUTS.get)
@pytest.mark.parametrize("position, part", [(0, "prefill"), (17, "prefill"), (18, "decode"), (20, "decode")])
def test_the_operator_at_fault_is_named(monkeypatch, layer, place, position, part):
    model, (block, field) = load_model(MODEL), place

    def edit(tape, hidden):
        array = getattr(tape.layers[layer][block], field)
        array.reshape(COPIES * len(IDS), -1)[2 * len(IDS) + position, 1] += 1

    change(model, monkeypatch, 0, edit)
    found = first_difference(model, IDS, PROMPT, COPIES)
    assert found == f"layer {layer} {OUTPUTS[place]}, at position {position} ({part})"


def test_the_stream_between_layers_is_named(monkeypatch):
    names = []
    for edit in (
        lambda tape, hidden: np.add.at(tape.layers[0][0].x, (4, 0), 1),
        lambda tape, hidden: np.add.at(tape.layers[1][0].x, (4, 0), 1),
        lambda tape, hidden: np.add.at(tape.last[0], (4, 0), 1),
        lambda tape, hidden: np.add.at(hidden, (4, 0), 1),
    ):
        model = load_model(MODEL)
        change(model, monkeypatch, 0, edit)
        names.append(first_difference(model, IDS, PROMPT, COPIES))
    last = load_model(MODEL).config.num_hidden_layers - 1
    assert names == [
        f"{name}, at position 4 (prefill)"
        for name in ("embedding", "layer 0 down_proj", f"layer {last} down_proj", "final rmsnorm")
    ]


@pytest.mark.parametrize("field, name", [("k", "qkv_split of k (head norm, rope)"), ("v", "qkv_split of v")])
def test_keys_and_values_are_read_from_the_cache(monkeypatch, field, name):
    """Each copy has blocks of its own, 16 tokens long, two for 21 tokens: position 19 of the second is in its last."""
    model = load_model(MODEL)

    def edit(tape, hidden):
        getattr(tape.layers[0][0], field)[3, 3, 0, 0] += 1

    calls = change(model, monkeypatch, 3, edit)
    assert first_difference(model, IDS, PROMPT, COPIES) == f"layer 0 {name}, at position 19 (decode)"
    assert calls == [COPIES * len(IDS), COPIES * PROMPT, COPIES, COPIES, COPIES]


def test_queries_may_be_left_out_of_decode(monkeypatch):
    """As where attention makes them from qkv: what they are wrong in is wrong in its output."""
    forward = check.PagedAttention.forward

    def without_q(self, *arguments):
        q, *rest = forward(self, *arguments)
        return None if self.sequences.max_seqlen_q == 1 else q, *rest

    monkeypatch.setattr(check.PagedAttention, "forward", without_q)
    model = load_model(MODEL)
    assert first_difference(model, IDS, PROMPT, COPIES) == AGREES

    def edit(tape, hidden):
        tape.layers[1][0].attended[1, 0, 0] += 1

    change(model, monkeypatch, 2, edit)
    assert first_difference(model, IDS, PROMPT, COPIES) == "layer 1 attention, at position 18 (decode)"


def test_agreement_of_the_golden_model():
    model = load_model(MODEL)
    assert first_difference(model, IDS, PROMPT, COPIES) == AGREES
    found = check_agreement(model, max_tokens=7, temperature=0.8)
    assert found == Agreement(2 * 6 * 7, 2 * 6 * 7, 0.0, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.equal = 0


def test_differences_are_counted_and_the_largest_is_looked_into(monkeypatch):
    model, asked, looked = load_model(MODEL), [], []

    class Wrong(check.LLM):
        def generate(self, prompts, params, progress=None):
            asked.append(([len(prompt) for prompt in prompts], params, progress))
            outputs = super().generate(prompts, params)
            for request, index, token, by in ((1, 1, 0, 0.25), (3, 0, 4, -0.5), (3, 0, 2, 0.125)):
                outputs[request].completions[index].logprobs[token] += by
            looked.append(outputs[3].prompt_token_ids + outputs[3].completions[0].token_ids)
            return outputs

    monkeypatch.setattr(check, "LLM", Wrong)
    monkeypatch.setattr(check, "first_difference", lambda model, *rest: rest)
    found = check_agreement(model, EngineConfig(max_model_len=60), 48, 0.7, seed=5, progress=print)
    assert (found.tokens, found.equal) == (2 * 6 * 48, 2 * 6 * 48 - 3)
    # Rounding of the sum with the float32 log-prob.
    assert found.largest == pytest.approx(0.5, abs=1e-6)
    assert found.operator == (looked[0], 12, 12)
    ((lengths, params, progress),) = asked
    assert lengths == [1, 5, 12, 12, 5, 12] and progress is print
    assert (params.temperature, params.max_tokens, params.ignore_eos, params.seed, params.n) == (0.7, 48, True, 5, 2)


def test_prompts_are_random_and_the_seeds_own(monkeypatch):
    model, asked = load_model(MODEL), []

    class Asked(check.LLM):
        def generate(self, prompts, params, progress=None):
            asked.append(prompts)
            return super().generate(prompts, params, progress)

    monkeypatch.setattr(check, "LLM", Asked)
    for seed in (0, 0, 1):
        assert check_agreement(model, None, 1, seed=seed).operator is None
    assert asked[0] == asked[1] != asked[2]
    assert [len(prompt) for prompt in asked[0]] == [1, 5, 17, 48, 5, 130]
    ids = {i for prompts in asked[:3] for prompt in prompts for i in prompt}
    assert ids == set(range(model.config.vocab_size))
    # Without more said: 48 tokens at temperature 1, seed 0.
    assert check_agreement(model).tokens == 2 * 6 * 48 and asked[3] == asked[0]
    # Where not even the completion fits, a token is still asked for.
    found = check_agreement(model, EngineConfig(max_model_len=4), 9)
    assert [len(prompt) for prompt in asked[4]] == [1] * 6 and found.equal == found.tokens == 2 * 6 * 3
