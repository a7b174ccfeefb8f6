"""Adapters: PEFT's files and logits, gradients, and the invariants of what is trained."""

import json
import shutil

import numpy as np
import pytest

from rlnumba.checkpoint import copy_model
from rlnumba.config import EngineConfig, LoraConfig, SFTConfig
from rlnumba.engine import check
from rlnumba.engine.check import check_agreement
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.gemm.ops import linear
from rlnumba.model import lora
from rlnumba.model.blocks.block import MODULES
from rlnumba.model.blocks.low_rank import Dropout, LoraContext
from rlnumba.model.lora import Adapter, load_adapter, merge
from rlnumba.model.quantized.convert import quantize_checkpoint
from rlnumba.model.transformer import Tape, host_copy, load_model, pack, packed_attention, save_model, score
from rlnumba.model.weights import open_tensors
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device, memory
from rlnumba.runtime.arena import Arena
from tests.close import assert_close, assert_same_bits
from tests.model.gradients import gradients_of_logprobs
from tests.trainers.runs import GOLDEN, MODEL

CASES = ["all_linear", "qv_rslora"]
SEQUENCES = [[3 + (7 * i) % 40 for i in range(n)] for n in (11, 1, 30)]


def golden_adapter(case, which="final"):
    return GOLDEN / "lora" / case / which


def load_golden(case, which="final"):
    return load_model(golden_adapter(case, which), base=MODEL)


def random_adapter(model, seed=0, **keys):
    """The model with an adapter whose B are not zero."""
    keys = {"r": 5, "lora_alpha": 10} | keys
    model.adapter = Adapter.new(model.config, LoraConfig(**keys), model.dtype.name, "base", seed)
    host = np.array(device.to_host(model.adapter.flat)).astype(np.float32)
    generator = np.random.default_rng(seed)
    for name, view in model.adapter.tensors(host):
        if "lora_B" in name:
            view[...] = 0.1 * generator.standard_normal(view.shape)
    model.adapter.set_flat(host)
    return model


def logits_of(model, ids):
    batch = pack([ids])
    hidden = model.forward(batch.input_ids, batch.position_ids, packed_attention(model, batch))
    logits = device.xp().empty((len(ids), model.config.vocab_size), np.float32)
    linear(hidden, model.lm_head, logits)
    return device.to_host(logits)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_pefts_adapters(case):
    expected = np.load(GOLDEN / "lora/logits.npz")
    model, ids = load_golden(case), expected["input_ids"].tolist()
    np.testing.assert_allclose(logits_of(model, ids), expected[case], atol=1e-5)
    # Switched off, it is the base.
    assert_same_bits(logits_of(model.without_adapter(), ids), logits_of(load_model(MODEL), ids))
    assert np.abs(logits_of(model, ids) - logits_of(model.without_adapter(), ids)).max() > 0.1
    merge(model.weights, model.adapter)
    np.testing.assert_allclose(logits_of(model.without_adapter(), ids), expected[f"{case}_merged"], atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_saved_adapter_has_pefts_tensors(case, tmp_path):
    model = load_golden(case)
    save_model(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    written, theirs = (open_tensors(f / "adapter_model.safetensors") for f in (tmp_path, golden_adapter(case)))
    assert written.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_same_bits(written[name].read(), tensor.read(), name)
    config, expected = (json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path, golden_adapter(case)))
    for key in config.keys() - {"base_model_name_or_path", "target_modules"}:
        assert config[key] == expected[key], key
    ends = {name.split(".")[-1] for name in expected["target_modules"]}
    assert set(config["target_modules"]) == ends
    again = load_model(tmp_path)
    assert_same_bits(again.adapter.flat, model.adapter.flat)


def test_peft_loads_what_is_saved(tmp_path):
    torch = pytest.importorskip("torch")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = random_adapter(load_model(MODEL, "float32"))
    save_model(model, tmp_path)
    base = transformers.Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path)(torch.tensor([SEQUENCES[2]])).logits[0]
    np.testing.assert_allclose(logits_of(model, SEQUENCES[2]), theirs.detach().numpy(), atol=1e-5)


def test_a_new_adapter_is_pefts():
    """A uniform within 1 / sqrt(inputs), B zero; the seed decides."""
    model, config = load_model(MODEL), LoraConfig(r=8)
    adapter = Adapter.new(model.config, config, "float32", "base", 3)
    flat = np.array(device.to_host(adapter.flat))
    total = 0
    for name, view in adapter.tensors(flat):
        total += view.size
        if "lora_B" in name:
            assert not view.any()
        else:
            bound = view.shape[1] ** -0.5
            assert 0.8 * bound < np.abs(view).max() <= bound
            assert np.std(view) == pytest.approx(bound / 3**0.5, rel=0.15)
    # Nothing else in the buffer is anything but zero.
    assert np.count_nonzero(flat) <= total
    assert_same_bits(Adapter.new(model.config, config, "float32", "base", 3).flat, adapter.flat)
    assert not np.array_equal(device.to_host(Adapter.new(model.config, config, "float32", "base", 4).flat), flat)
    model.adapter = adapter
    assert_same_bits(logits_of(model, SEQUENCES[0]), logits_of(model.without_adapter(), SEQUENCES[0]))


def gradients(model, recompute=False, dropout=None, modules=frozenset()):
    """(loss, the adapter's gradients) of the sum of weighted log-probs of SEQUENCES."""
    return gradients_of_logprobs(model, SEQUENCES, Tape(recompute, dropout, modules=modules), Arena("test"))


def reference_logprob_sum(config, weights, adapter, dropped):
    """The loss of `gradients` in float64, from the formulas of transformers and PEFT, module by module.

    weights, adapter: {name: float64 array}; dropped(layer, fused projection, x): dropout of the packed inputs.
    """
    E, H, HK = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    loss, factors = 0.0, iter(np.random.default_rng(1).standard_normal(sum(len(s) - 1 for s in SEQUENCES)))
    factors = iter(np.float32(list(factors)).astype(np.float64))
    ids = np.concatenate(SEQUENCES)
    positions = np.concatenate([np.arange(len(s)) for s in SEQUENCES])
    owner = np.repeat(np.arange(len(SEQUENCES)), [len(s) for s in SEQUENCES])

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * w

    def project(layer, module, fused, x):
        name = f"model.layers.{layer}.{module}"
        y = x @ weights[f"{name}.weight"].T
        if f"{name}.lora_A.weight" in adapter:
            a, b = adapter[f"{name}.lora_A.weight"], adapter[f"{name}.lora_B.weight"]
            y = y + adapter["scaling"] * dropped(layer, fused, x) @ a.T @ b.T
        return y

    angles = positions[:, None] * config.rope_theta ** (-np.arange(E // 2) * 2 / E)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rope(x):
        first, second = x[..., : E // 2], x[..., E // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = weights["model.embed_tokens.weight"][ids]
    visible = (owner[:, None] == owner) & (positions[:, None] >= positions)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        n = norm(x, weights[f"{at}.input_layernorm.weight"])
        q, k, v = (project(layer, f"self_attn.{m}_proj", "qkv", n).reshape(len(ids), -1, E) for m in "qkv")
        q = rope(norm(q, weights[f"{at}.self_attn.q_norm.weight"]))
        k = rope(norm(k, weights[f"{at}.self_attn.k_norm.weight"]))
        k, v = (np.repeat(array, H // HK, axis=1) for array in (k, v))
        s = np.where(visible, np.einsum("ihe,jhe->hij", q, k) * E**-0.5, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        attended = np.einsum("hij,jhe->ihe", p, v).reshape(len(ids), -1)
        x = x + project(layer, "self_attn.o_proj", "o", attended)
        n = norm(x, weights[f"{at}.post_attention_layernorm.weight"])
        gate, up = (project(layer, f"mlp.{m}_proj", "gate_up", n) for m in ("gate", "up"))
        x = x + project(layer, "mlp.down_proj", "down", gate / (1 + np.exp(-gate)) * up)
    z = norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T
    z -= z.max(-1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    for row in np.flatnonzero(owner[:-1] == owner[1:]):
        loss += next(factors) * logp[row, ids[row + 1]]
    return loss


DROPOUT = Dropout(0.3, 17, 5, 2)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "targets", [["all-linear"], ["k_proj", "up_proj"], ["q_proj", "v_proj", "o_proj", "down_proj"]]
)
@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
def test_gradients_are_finite_differences(recompute, targets, dropout):
    """Against the reference in float64, along random directions of each tensor."""
    model = random_adapter(load_model(MODEL, "float32"), target_modules=targets, use_rslora=recompute)
    loss, grads = gradients(model, recompute, dropout)
    if device.name() != "cpu":
        pytest.skip("the reference's dropout is the cpu device's")
    weights = {name: np.float64(view) for name, view in model.weights.tensors()}
    tensors = {name.removeprefix(lora.PREFIX): np.float64(v) for name, v in model.adapter.tensors(model.adapter.flat)}

    def dropped(layer, fused, x):
        if dropout is None:
            return x
        mask = np.empty(x.shape, np.float32)
        dropout.apply(layer * 4 + ("qkv", "o", "gate_up", "down").index(fused), np.ones(x.shape, np.float32), mask)
        return x * (mask != 0) / (1 - dropout.p)

    def value():
        return reference_logprob_sum(model.config, weights, tensors | {"scaling": model.adapter.lora.scaling}, dropped)

    assert value() == pytest.approx(loss, rel=1e-5, abs=1e-4)
    generator, found = np.random.default_rng(2), dict(grads.tensors(np.asarray(grads.flat)))
    for name, gradient in found.items():
        direction = generator.standard_normal(gradient.shape)
        array, step = tensors[name.removeprefix(lora.PREFIX)], 1e-5
        array += step * direction
        above = value()
        array -= 2 * step * direction
        difference = (above - value()) / (2 * step)
        array += step * direction
        size = np.linalg.norm(gradient)
        assert size > 0, name
        assert abs(np.sum(gradient * direction) - difference) < 2e-4 * max(size, 1.0), name


def test_what_is_in_no_block_stays_zero():
    model = random_adapter(load_model(MODEL), target_modules=["q_proj", "v_proj", "up_proj"])
    _, grads = gradients(model)
    for adapter in (model.adapter, grads):
        flat = np.array(device.to_host(adapter.flat))
        for _, view in adapter.tensors(flat):
            view[...] = 0
        assert not flat.any()
    # The rows of up_proj alone are trained, those of gate_proj are not.
    b = device.to_host(grads.layers[1]["gate_up"].b)
    assert b[64:].any() and not b[:64].any()
    assert "o" not in grads.layers[0] and "down" not in grads.layers[0]


def test_recomputation_gives_the_same_bits():
    model = random_adapter(load_model(MODEL))
    for dropout in (None, DROPOUT):
        plain, recomputed = (gradients(model, recompute, dropout)[1] for recompute in (False, True))
        assert_same_bits(plain.flat, recomputed.flat)
        assert_same_bits(plain.flat, gradients(model, dropout=dropout, modules=MODULES)[1].flat)


def test_dropout_is_in_training_alone():
    model = random_adapter(load_model(MODEL))
    without, other = gradients(model)[0], gradients(model, dropout=DROPOUT)[0]
    assert without != other
    assert gradients(model, dropout=DROPOUT)[0] == other
    assert gradients(model, dropout=DROPOUT._replace(micro_batch=3))[0] != other


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "gate_proj"]])
def test_rollout_and_training_agree(targets):
    """Prefill, decode and training compute the same bits."""
    model = random_adapter(load_model(MODEL), target_modules=targets)
    found = check_agreement(model, max_tokens=20)
    assert (found.equal, found.largest, found.operator) == (found.tokens, 0.0, None)
    base = check_agreement(model.without_adapter(), max_tokens=20)
    assert base.equal == base.tokens


def test_chunked_prefill_agrees_with_training():
    model = random_adapter(load_model(MODEL))
    config = EngineConfig(max_num_batched_tokens=16, max_num_seqs=8)
    found = check_agreement(model, config, max_tokens=8)
    assert (found.equal, found.operator) == (found.tokens, None)


def test_check_names_the_operator_with_an_adapter(monkeypatch):
    model = random_adapter(load_model(MODEL))
    low_rank, calls = LoraContext.low_rank, []

    def changed(self, layer, name, x, memory):
        calls.append(name)
        if (layer, name) != (1, "gate_up") or len(calls) > 8:
            return low_rank(self, layer, name, x, memory)
        xa = self.reduce(layer, name, x, memory)
        xa[0] += 1
        return (xa, self.pair(layer, name).b), None

    monkeypatch.setattr(LoraContext, "low_rank", changed)
    found = check.first_difference(model, SEQUENCES[2], 20, 2)
    assert found == "layer 1 gate_up_proj, at position 0 (prefill)"


def test_no_gradients_nor_moments_of_the_base():
    memory.reset_peaks()
    before = memory.report()
    model = random_adapter(load_model(MODEL))
    gradients(model)
    added = {name: nbytes - before.get(name, 0) for name, nbytes in memory.report().items()}
    assert added["adapter"] == model.adapter.flat.nbytes
    assert added["grads"] == model.adapter.flat.nbytes


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden adapter, to be damaged."""
    return shutil.copytree(golden_adapter("qv_rslora"), tmp_path / "adapter")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("modules_to_save", ["lm_head"], 'modules_to_save ["lm_head"] is not supported'),
        ("modules_to_save", [[1]], "modules_to_save [[1]] is not supported"),
        ("target_modules", True, "target_modules must be a string or a list of strings, got True"),
        ("bias", "all", 'bias "all" is not supported'),
        ("use_dora", True, "use_dora true is not supported"),
        ("rank_pattern", {"q_proj": 2}, 'rank_pattern {"q_proj": 2} is not supported'),
        ("init_lora_weights", "pissa", 'init_lora_weights "pissa" is not supported'),
        ("layers_to_transform", [0], "layers_to_transform [0] is not supported"),
        ("layers_to_transform", 0, "layers_to_transform 0 is not supported"),
        ("an_option_of_tomorrow", 3, "an_option_of_tomorrow 3 is not supported"),
        ("peft_type", "IA3", "peft_type 'IA3' is not supported"),
        ("r", 0, "lora.r must be at least 1, got 0"),
        ("r", "4", "r must be a number, got '4'"),
        ("target_modules", [], "target_modules must be a string or a list of strings, got []"),
        ("target_modules", ["q_proj", "lm_head"], "target_modules 'lm_head' matches no linear layer"),
        (
            "target_modules",
            ["v_proj", "layers.1.self_attn.q_proj"],
            "target_modules: self_attn.q_proj is a target in 1 of 2 layers",
        ),
        ("target_modules", "(", "target_modules"),
    ],
)
def test_options_that_are_not_there_are_named(folder, key, value, message):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError) as error:
        load_model(folder, base=MODEL)
    assert message in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_target_modules_as_a_regular_expression(folder):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"target_modules": r".*\.self_attn\.[qv]_proj"}
    path.write_text(json.dumps(config))
    assert load_model(folder, base=MODEL).adapter.lora.target_modules == ["q_proj", "v_proj"]


def test_files_that_are_missing_or_damaged(folder, tmp_path):
    tensors = folder / "adapter_model.safetensors"
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-100])
    with pytest.raises(UserError, match=f"{tensors}: truncated or damaged"):
        load_model(folder, base=MODEL)
    tensors.unlink()
    with pytest.raises(UserError, match=f"{tensors}: no such file"):
        load_model(folder, base=MODEL)
    tensors.write_bytes(content)
    with pytest.raises(UserError, match="its base cannot be found: .*--base"):
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace("tests/golden/tiny-qwen3", str(tmp_path / "gone")))
        load_model(folder)


def test_an_adapter_of_another_base(folder):
    other = GOLDEN / "models" / "qwen3_tied"
    with pytest.raises(UserError) as error:
        load_model(folder, base=other)
    message = str(error.value)
    assert "the adapter does not fit its base" in message and "wrong shapes" in message
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight is (6, 32), not (6, " in message
    with pytest.raises(UserError, match="not an adapter folder, so it has no base"):
        load_model(MODEL, base=MODEL)


def test_a_rank_that_differs_from_the_file(folder):
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 6', '"r": 7'))
    with pytest.raises(UserError, match=r"q_proj.lora_A.weight is \(6, 32\), not \(7, 32\)"):
        load_model(folder, base=MODEL)


def test_tensors_of_more_modules_than_are_targets(folder):
    shutil.copy(golden_adapter("all_linear") / "adapter_model.safetensors", folder)
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 6', '"r": 4'))
    with pytest.raises(UserError, match="tensors that the base does not have, or adapter_config.json does not target"):
        load_model(folder, base=MODEL)


def test_scores_have_no_dropout_and_no_tape():
    model = random_adapter(load_model(MODEL), lora_dropout=0.5)
    batch = pack(SEQUENCES)
    first, second = (device.to_host(score(model, batch).logprobs) for _ in range(2))
    assert_same_bits(first, second)
    model.adapter.lora = LoraConfig(r=5, lora_alpha=10)
    assert_same_bits(first, device.to_host(score(model, batch).logprobs))


def test_merged_in_16_bits(tmp_path):
    """The sum is rounded once."""
    if device.name() == "cpu":
        pytest.skip("the cpu device has float32 only")
    model = random_adapter(load_model(MODEL, "bfloat16"))
    adapter = dict(model.adapter.tensors(np.array(device.to_host(model.adapter.flat)).astype(np.float64)))
    name = "model.layers.1.self_attn.k_proj"
    weight = np.array(device.to_host(dict(model.weights.tensors())[f"{name}.weight"])).astype(np.float64)
    a, b = (adapter[f"{lora.PREFIX}{name}.lora_{which}.weight"] for which in "AB")
    merge(model.weights, model.adapter)
    merged = dict(model.weights.tensors())[f"{name}.weight"]
    assert_close(merged, weight + model.adapter.lora.scaling * b @ a, "bfloat16", terms=5)


@pytest.mark.sim
def test_gradients_in_the_simulator(rng):
    """An adapter's gradients by kernels, against those of the cpu device's formulas in test_gradients."""
    model = random_adapter(
        load_model(MODEL, "float32"), r=2, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"]
    )
    batch = pack([SEQUENCES[0][:5]])
    tape, grads, arena = Tape(True, DROPOUT), model.adapter.grads(), Arena("test")
    with arena.scope():
        attention = packed_attention(model, batch, arena)
        hidden = model.forward(batch.input_ids, batch.position_ids, attention, tape, arena)
        dhidden = device.asarray(rng.standard_normal(hidden.shape, np.float32))
        model.backward(dhidden, tape, grads)
    flat = np.array(device.to_host(grads.flat))
    assert np.isfinite(flat).all()
    for name, view in grads.tensors(flat):
        assert np.abs(view).max() > 0, name


def test_a_copy_is_saved_without_the_device(tmp_path, monkeypatch):
    """The thread that writes checkpoints must not wait for a stream while another thread captures a graph."""
    copied = host_copy(random_adapter(load_model(MODEL, "float32")))
    monkeypatch.setattr(device, "synchronize", lambda: 1 / 0)
    save_model(copied, tmp_path)


def test_an_adapter_beside_a_model_is_reported_once(tmp_path, capsys):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    shutil.copytree(golden_adapter("qv_rslora"), folder, dirs_exist_ok=True)
    assert load_model(folder).adapter is None and load_model(folder).adapter is None
    assert capsys.readouterr().err.count(f"warning: {folder}: the model is used without the adapter") == 1
    load_model(MODEL)
    assert "without the adapter" not in capsys.readouterr().err


def test_a_folder_has_a_model_or_an_adapter(tmp_path):
    """Of both, transformers applies the adapter to the model, and the model alone would be read here."""
    model = load_model(MODEL)
    adapter = random_adapter(load_model(MODEL))
    folders = {"model": tmp_path / "model", "adapter": tmp_path / "adapter"}
    for kind, saved in (("model", model), ("adapter", adapter)):
        # Twice the same is the later one.
        save_model(saved, folders[kind])
        save_model(saved, folders[kind])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for words, folder, call in (
        ("a model is there", folders["model"], lambda: save_model(adapter, folders["model"])),
        ("a model is there", folders["model"], lambda: copy_model(folders["adapter"], folders["model"])),
        ("an adapter is there", folders["adapter"], lambda: save_model(model, folders["adapter"])),
        ("an adapter is there", folders["adapter"], lambda: copy_model(folders["model"], folders["adapter"])),
        ("an adapter is there", folders["adapter"], lambda: quantize_checkpoint(MODEL, folders["adapter"], "int8")),
    ):
        with pytest.raises(UserError, match=f"^{folder}: {words}"):
            call()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_what_is_saved_is_float32(tmp_path):
    """Of a 16-bit adapter the values that it rounds: as drawn, as trained by the optimizer's master, as read again."""
    model = load_model(MODEL, "float32")
    model.adapter = Adapter.new(model.config, LoraConfig(r=3), "bfloat16", "base", 0)
    exact = Adapter.new(model.config, LoraConfig(r=3), "float32", "base", 0)
    gradient = np.zeros(exact.flat.shape, np.float32)
    for _, view in exact.tensors(gradient):
        view[...] = 1.0
    for step in range(2):
        save_model(host_copy(model), tmp_path)
        assert {t.dtype for t in open_tensors(tmp_path / "adapter_model.safetensors").values()} == {"F32"}
        read = load_adapter(tmp_path, model.weights, "float32", "base")
        assert_same_bits(read.flat, exact.flat, f"step {step}")
        again = load_adapter(tmp_path, model.weights, "bfloat16", "base")
        assert_same_bits(again.flat, model.adapter.flat)
        assert_same_bits(again.master, exact.flat)
        policy = Policy(model, SFTConfig(learning_rate=1e-2))
        assert_same_bits(policy.optimizer.state["master"], exact.flat)
        policy.grads.flat[...] = device.asarray(gradient)
        policy.step(1e-2)
        exact.flat[...] = policy.optimizer.state["master"]
        assert not np.array_equal(device.to_host(exact.flat), device.to_host(read.flat))
    # Weights that are rounded at random have no master.
    policy = Policy(model, SFTConfig(master_weights=False))
    policy.grads.flat[...] = device.asarray(gradient)
    policy.step(1e-2)
    save_model(model, tmp_path)
    read = load_adapter(tmp_path, model.weights, "bfloat16", "base")
    assert_same_bits(read.flat, model.adapter.flat)
    assert_same_bits(read.master, device.to_host(model.adapter.flat).astype(np.float32))


def saved_adapters(tmp_path):
    """{name: folder} of three adapters of other ranks and targets."""
    kinds = {
        "all": {"r": 5},
        "wide": {"r": 20, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "one": {"r": 1, "target_modules": ["up_proj"], "use_rslora": True},
    }
    for seed, (name, keys) in enumerate(kinds.items()):
        save_model(random_adapter(load_model(MODEL), seed, **keys), tmp_path / name)
    return {name: tmp_path / name for name in kinds}


@pytest.mark.parametrize("max_num_batched_tokens", [8192, 24])
def test_several_adapters_in_one_batch(tmp_path, max_num_batched_tokens):
    """Each completion's log-probs are, bit for bit, those of training with its adapter alone."""
    folders = saved_adapters(tmp_path)
    config = EngineConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=9)
    llm = LLM(load_model(MODEL), None, config, adapters=folders)
    names = ["all", None, "one", "wide", "all", "wide", None, "all"]
    # One prompt for all, which fills blocks of the cache, and others.
    shared = [3 + (5 * i) % 40 for i in range(40)]
    prompts = [shared if i % 4 else shared[: 17 + i] for i in range(len(names))]
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=2)
    outputs = llm.generate(prompts, params, adapters=names)
    assert len({tuple(output.completions[0].token_ids) for output in outputs[1:4]}) == 3
    for name, output in zip(names, outputs, strict=True):
        model = load_model(MODEL) if name is None else load_model(folders[name], base=MODEL)
        batch = pack([output.prompt_token_ids + c.token_ids for c in output.completions])
        scored = np.split(device.to_host(score(model, batch).logprobs), np.cumsum(batch.lengths)[:-1])
        for completion, logprobs in zip(output.completions, scored, strict=True):
            assert_same_bits(np.float32(completion.logprobs), logprobs[len(output.prompt_token_ids) :], name or "base")
    # Again, with the prompts' blocks in the cache: the same bits.
    again = llm.generate(prompts, params, adapters=names)
    for first, second in zip(outputs, again, strict=True):
        assert [c.logprobs for c in first.completions] == [c.logprobs for c in second.completions]


def test_names_of_adapters(tmp_path):
    llm, params = LLM(load_model(MODEL), None, adapters=saved_adapters(tmp_path)), SamplingParams(max_tokens=3)
    found = [
        llm.generate([[5, 6]], params, adapters=a)[0].completions[0].logprobs for a in ("one", ["one"], "all", None)
    ]
    assert found[0] == found[1] != found[2] and found[3] not in found[:3]
    with pytest.raises(ConfigError, match="no adapter 'two'; the LLM was made with all, wide, one"):
        llm.generate([[5]], adapters="two")
    with pytest.raises(ValueError, match="2 prompts with 1 adapters"):
        llm.generate([[5], [6]], adapters=["one"])
    with pytest.raises(ConfigError, match="several adapters need a model without one"):
        LLM(random_adapter(load_model(MODEL)), adapters=saved_adapters(tmp_path))
