"""Prompts that the completions of a group share in a micro-batch: fewer tokens, the same log-probs and gradients."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from rlnumba.config import LoraConfig
from rlnumba.data import Prompt
from rlnumba.data.packing import TokenSequence
from rlnumba.data.prefix_tree import PrefixRule
from rlnumba.engine.sequence import Completion
from rlnumba.errors import ConfigError
from rlnumba.kernels.attention import ops
from rlnumba.kernels.attention.sequences import PackedPrefixes
from rlnumba.kernels.delta_rule import ops as delta_rule
from rlnumba.kernels.delta_rule.inputs import empty_tokens
from rlnumba.kernels.rl.ppo_loss import SUMS, ppo_loss_blocks
from rlnumba.model.blocks.linear_attention import LinearAttention, heads_of
from rlnumba.model.config import LM_HEAD, SCORE_HEAD
from rlnumba.model.hub import read_config
from rlnumba.model.lora import Adapter
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Transformer, load_model
from rlnumba.model.weights import Weights
from rlnumba.runs.micro_batch import MicroBatch, cost_of
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.runtime.shapes import shapes_only
from rlnumba.sampling.samples import Sample
from rlnumba.trainers import dpo, grpo, kto, ppo, reward
from rlnumba.trainers.rollout import Rollouts, with_groups_together
from tests.close import assert_same_bits
from tests.trainers.runs import GOLDEN, MODEL, grpo_config, grpo_run, metrics_of, ppo_run, preference_run, reward_run

SHARING = PrefixRule(16)
# Tokens of the prompts and of each one's completions.
GROUPS = [(40, [5, 1, 17]), (16, [9, 8]), (17, [1, 2, 3]), (70, [30]), (33, [12, 12])]


def rollouts_of(rng, groups=GROUPS, system=0):
    """Rollouts of groups of random tokens, side by side, whose prompts begin with `system` tokens that all have."""
    samples, first = [], rng.integers(3, 40, system).tolist()
    for length, completions in groups:
        prompt = Prompt("", first + rng.integers(3, 40, length).tolist(), {}, "")
        for count in completions:
            ids, logprobs = rng.integers(3, 40, count).tolist(), rng.uniform(-5, -1, count).tolist()
            completion = Completion(ids, logprobs, "stop", "")
            samples.append(Sample(prompt, completion, np.zeros(1), 0.0, {}, float(rng.standard_normal())))
    return Rollouts.of(samples, False)


# A float32 model shares on the cpu device alone, one of 16 bits on GPUs that have the sm90 kernels.
on_cpu = pytest.mark.skipif(device.name() != "cpu", reason="sequences of float32 share nothing on GPUs")


def policy_of(model=MODEL, dtype=None, **train):
    config = grpo_config(**{"max_completion_length": 32, "per_device_train_batch_size": 11} | train)
    model = model if isinstance(model, Transformer) else load_model(model, dtype)
    return Policy(model, config, None, config.temperature)


def test_what_neighbours_begin_with_is_there_once(rng):
    rollouts = rollouts_of(rng)
    plain, shared = rollouts.micro_batch(), rollouts.micro_batch(sharing=SHARING)
    # 32 of 40 and of 33 tokens, 16 of 17, none of 16, whose last one is not shared, nor of a prompt alone.
    own = [*(32, 8 + 5, 8 + 1, 8 + 17), *(25, 24), *(16, 1 + 1, 1 + 2, 1 + 3), 100, *(32, 1 + 12, 1 + 12)]
    parents = [-1, 0, 0, 0, -1, -1, -1, 6, 6, 6, -1, -1, 11, 11]
    lengths = [0, 32, 32, 32, 0, 0, 0, 16, 16, 16, 0, 0, 32, 32]
    assert np.diff(shared.sequences["cu_seqlens"]).tolist() == own and shared.max_seqlen == 100
    assert shared.sequences["parents"].tolist() == parents and shared.sequences["prefix_lens"].tolist() == lengths
    assert shared.num_tokens == plain.num_tokens - 2 * 32 - 2 * 16 - 32
    # A target has its token and its position, and the tokens before it are those of its sequence.
    for name in ("input_ids", "position_ids"):
        found, expected = (each.tokens[name][each.targets["rows"]] for each in (shared, plain))
        np.testing.assert_array_equal(found, expected)
    starts, ids, whole = shared.sequences["cu_seqlens"], shared.tokens["input_ids"], []
    for i, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        if i not in parents:
            before = ids[starts[parent] :][:length] if parent >= 0 else []
            whole += [*before, *ids[starts[i] : starts[i + 1]]]
    np.testing.assert_array_equal(whole, rollouts.token_ids)
    np.testing.assert_array_equal(shared.sequences["completion_bounds"], plain.sequences["completion_bounds"])

    config = load_model(MODEL).config
    assert plain.cost(config) == cost_of(rollouts.lengths, config)
    saved = rollouts.shared_lengths(SHARING)
    assert saved.tolist() == [0, 32, 32, 0, 0, 0, 16, 16, 0, 0, 32]
    assert shared.cost(config) == cost_of(rollouts.lengths, config) - cost_of(saved, config)
    # Those whose keys the most queries see: 100 rows that stand alone, then prompts with all of their completions.
    queries = np.diff(shared.sequences["query_bounds"])
    assert shared.sequences["order"].tolist() == sorted(range(14), key=lambda sequence: -queries[sequence])
    assert [int(queries[sequence]) for sequence in shared.sequences["order"][:3]] == [100, 79, 58]
    padded = shared.padded()
    assert padded.sequences["order"][:14].tolist() == shared.sequences["order"].tolist()
    assert sorted(padded.sequences["order"]) == list(range(len(padded.sequences["parents"])))
    assert padded.sequences["parents"][len(parents) :].tolist() == [-1] * (len(padded.sequences["parents"]) - 14)


def test_sequences_that_share_nothing_stay_as_they_are():
    ids = np.arange(60, dtype=np.int32)
    batch = MicroBatch.of(ids, np.array([20, 20, 20]), np.array([19, 39, 59]))
    assert batch.sharing_prefixes(SHARING) is batch
    assert batch.sharing_prefixes(None) is batch
    # Of the first two sequences targets begin in the first 16 tokens: one row predicts one target.
    same = MicroBatch.of(np.zeros(60, np.int32), np.array([20, 20, 20]), np.array([10, 30, 59]))
    shared = same.sharing_prefixes(SHARING)
    assert shared.sequences["parents"].tolist() == [-1, 0, 0, -1]
    assert shared.targets["rows"].tolist() == [9, 24 + 9, 16 + 4 + 2]


MODELS = [MODEL, GOLDEN / "gemma3", GOLDEN / "qwen3_moe"]


# Layers with windows of 8 tokens, and one without.
GEMMA = GOLDEN / "gemma3"

# Of linear attention prefixes end at multiples of 64 tokens.
HYBRID, LONG_GROUPS = GOLDEN / "qwen3_5", [(140, [5, 9, 80]), (70, [17, 3]), (64, [4, 2])]


def config_of_128_columns():
    """The config of HYBRID with heads of linear attention that tensor cores take."""
    return replace(read_config(HYBRID), linear_key_head_dim=128, linear_value_head_dim=128)


def hybrid_of_128_columns(dtype):
    """A Transformer of that config, of random weights, whose heads remember for hundreds of tokens."""
    config = config_of_128_columns()
    weights = Weights.random(config, dtype)
    for parameter in weights.parameters:
        if parameter.decays:
            weights[parameter.name][...] *= 5
        elif parameter.name.endswith("dt_bias"):
            weights[parameter.name][...] = -5
    return Transformer(config, weights)


def check_log_probs(rng, model, dtype=None, groups=GROUPS):
    rollouts, found = rollouts_of(rng, groups), []
    for shares in ("never", "always"):
        policy = policy_of(model, dtype, share_prefixes=shares, router_aux_loss_coef=0.0)
        assert (policy.prefix_sharing(policy.model) is not None) == (shares == "always")
        with policy.context.use():
            found.append(grpo.host_logprobs(policy, policy.model, rollouts.parts(11)))
    assert found[0].min() < -1
    assert_same_bits(*found)


@on_cpu
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_log_probs_have_the_same_bits(rng, model):
    check_log_probs(rng, model)


@on_cpu
def test_log_probs_of_a_hybrid_have_the_same_bits(rng):
    check_log_probs(rng, HYBRID, groups=LONG_GROUPS)
    rule = policy_of(HYBRID).prefix_sharing(load_model(HYBRID))
    shared = rollouts_of(rng, LONG_GROUPS).micro_batch(sharing=rule)
    assert rule.multiple == 64 and shared.sequences["prefix_lens"].tolist() == [0, 128, 128, 128, 0, 64, 64, 0, 0]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_log_probs_have_the_same_bits_on_a_gpu(rng, model):
    check_log_probs(rng, model, "bfloat16")


@pytest.mark.gpu
@pytest.mark.sm90
def test_log_probs_of_a_hybrid_have_the_same_bits_on_a_gpu(rng):
    check_log_probs(rng, hybrid_of_128_columns("bfloat16"), groups=LONG_GROUPS)


@on_cpu
@pytest.mark.parametrize("model, loss_type", [(MODEL, "dapo"), (MODEL, "gmpo"), (MODELS[2], "dapo"), (HYBRID, "dapo")])
def test_a_step_has_the_same_loss_and_gradient(rng, monkeypatch, model, loss_type):
    monkeypatch.setattr(grpo, "sampler_is_exact", lambda train: False)
    rollouts, found = rollouts_of(rng, LONG_GROUPS if model == HYBRID else GROUPS), []
    for shares in ("never", "always"):
        for limit in (None, 130):
            options = {"share_prefixes": shares, "max_tokens_per_micro_batch": limit, "loss_type": loss_type}
            policy = policy_of(model, router_aux_loss_coef=0.0, **options)
            metrics = grpo.train_step(policy, rollouts.parts(11, on_policy=True), 0.0)
            found.append((metrics, device.to_host(policy.grads.flat).copy()))
    (metrics, gradient), *others = found
    scale = np.abs(gradient).max()
    for other, of_other in others:
        # The load of experts is that of the rows that are computed.
        names = [name for name in metrics if not name.startswith("experts/")]
        assert {name: other[name] for name in names} == pytest.approx(
            {n: metrics[n] for n in names}, rel=1e-5, abs=1e-6
        )
        # Sums over a hundred tokens in another order.
        np.testing.assert_allclose(of_other, gradient, atol=2e-6 * scale)


def windows_of(tmp_path, window):
    """The folder of GEMMA with other windows."""
    folder = tmp_path / "model"
    shutil.copytree(GEMMA, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    return folder


def check_step(rng, model, tolerance, system, size, dtype=None):
    """Log-probs have the bits that they have without sharing, and a step's gradient has the same terms.

    system: tokens that all prompts begin with, of which there are four groups of `size`.
    """
    groups = [(length, rng.integers(1, 60, size).tolist()) for length in (40, 70, 33, 100)]
    rollouts, found = rollouts_of(rng, groups, system), []
    parts = rollouts.parts(4 * size, on_policy=True)
    for shares in ("never", "always"):
        policy = policy_of(model, dtype, share_prefixes=shares, router_aux_loss_coef=0.0)
        rule = policy.prefix_sharing(policy.model)
        assert (rule is not None) == (shares == "always")
        if rule is not None:
            batch = rollouts.micro_batch(sharing=rule)
            assert batch.levels == (3 if system else 2) and batch.num_tokens < 0.6 * len(rollouts.token_ids)
        policy.step = lambda learning_rate: {}
        with policy.context.use():
            logprobs = grpo.host_logprobs(policy, policy.model, parts)
        metrics = dict(grpo.train_step(policy, parts, 0.0))
        found.append((logprobs, metrics, device.to_host(policy.grads.flat).astype(np.float64)))
    (logprobs, metrics, gradient), (others, of_shared, shared) = found
    assert logprobs.min() < -1
    assert_same_bits(others, logprobs, "log-probs")
    assert of_shared == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert not np.array_equal(shared, gradient)
    np.testing.assert_allclose(shared, gradient, atol=tolerance * np.abs(gradient).max())


@on_cpu
@pytest.mark.parametrize("system", [0, 48], ids=["prompts", "a system prompt"])
@pytest.mark.parametrize("window", [None, 20])
def test_a_step_of_trees_and_windows(rng, tmp_path, system, window):
    check_step(rng, windows_of(tmp_path, window) if window else MODEL, 2e-6, system, 4)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("system", [0, 48], ids=["prompts", "a system prompt"])
@pytest.mark.parametrize("window", [None, 8, 40, 100])
def test_a_step_of_trees_and_windows_on_a_gpu(rng, tmp_path, system, window, size):
    model = windows_of(tmp_path, window) if window else MODEL
    check_step(rng, model, 2e-2, system, size, "bfloat16")


@on_cpu
def test_a_step_of_a_hybrid(rng):
    check_step(rng, hybrid_of_128_columns("float32"), 1e-5, 150, 4)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("system", [64, 150])
def test_a_step_of_a_hybrid_on_a_gpu(rng, system, size):
    check_step(rng, hybrid_of_128_columns("bfloat16"), 2e-2, system, size)


@on_cpu
def test_operators_of_linear_attention_are_planned(monkeypatch):
    """On a GPU, of short completions, each of which has a state's gradient and no more than one block."""
    config, (count, sequences) = config_of_128_columns(), (2 * (64 + 40 * 3), 82)
    block, heads, found = LinearAttention(0), heads_of(config), []
    with shapes_only(device.GPUS["h200"]):
        bfloat16, empty = device.dtype("bfloat16"), device.xp().empty
        tokens, gradients = (empty_tokens(count, heads, bfloat16, empty, each) for each in (np.float16, bfloat16))
        prefixes = PackedPrefixes(*(empty(sequences + i, np.int32) for i in (0, 0, 1, 0)))
        arguments = empty(tokens.v.shape, bfloat16), tokens, empty(sequences + 1, np.int32), gradients, prefixes
        kind = type(device.xp())
        monkeypatch.setattr(kind, "empty", lambda _, *sizes: found.append(empty(*sizes)) or found[-1])
        delta_rule.delta_rule_backward(*arguments)
        taken = sum(array.nbytes for array in found)
        sizes = config, "bfloat16", count, sequences
        assert block.operator_bytes(*sizes) < taken < block.operator_bytes(*sizes, has_prefixes=True)


def test_tokens_are_counted_once(rng):
    rollouts = rollouts_of(rng, [(65, [10] * 6), (65, [10] * 6)])
    # Of a prompt of 65 tokens 64 are shared: the first completion has 75 tokens, each further one 11.
    assert [part.num_sequences for part in rollouts.parts_of_tokens(130)] == [1] * 12
    parts = rollouts.parts_of_tokens(130, SHARING)
    assert [part.num_sequences for part in parts] == [6, 6]
    assert [part.micro_batch(sharing=SHARING).num_tokens for part in parts] == [130, 130]
    assert [part.num_sequences for part in rollouts.parts_of_tokens(129, SHARING)] == [5, 1, 5, 1]
    # 141 have a further completion, 205 all that is left of the next prompt: as many micro-batches as of whole groups.
    assert [part.num_sequences for part in rollouts.parts_of_tokens(205, SHARING)] == [6, 6]
    # Groups of 284 tokens: cutting one saves a micro-batch.
    rollouts = rollouts_of(rng, [(65, [10] * 20)] * 3)
    assert [part.num_sequences for part in rollouts.parts_of_tokens(500, SHARING)] == [33, 27]


def test_groups_come_together():
    order, groups = np.array([7, 2, 5, 0, 1, 6, 3, 4]), np.array([0, 0, 0, 0, 1, 1, 1, 1])
    assert with_groups_together(order, groups, 8).tolist() == [7, 5, 6, 4, 2, 0, 1, 3]
    assert with_groups_together(order, groups, 4).tolist() == [7, 5, 2, 0, 1, 3, 6, 4]
    assert with_groups_together(order, groups, 3).tolist() == [7, 5, 2, 0, 1, 6, 3, 4]


@on_cpu
def test_a_run_has_the_same_completions(tmp_path):
    """Log-probs of the rollout are still those of training, bit for bit, and the reference's KL is the same."""
    rows, options = [], {"beta": 0.1, "num_iterations": 2, "max_steps": 4, "learning_rate": 1e-4}
    for shares in ("never", "auto"):
        run = grpo_run(tmp_path / shares, share_prefixes=shares, **options)
        grpo.run_grpo(run)
        rows.append(metrics_of(run))
    for row, other in zip(*rows, strict=True):
        assert row["reward"] == other["reward"] and other["sampling/sampling_logp_difference/max"] == 0.0
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
        assert other["kl"] == pytest.approx(row["kl"], rel=1e-3, abs=1e-7)
    assert any(row["grad_norm"] != other["grad_norm"] for row, other in zip(*rows, strict=True))


def test_models_that_share_nothing():
    """A mixture whose routers have a loss, the mean over a micro-batch's tokens."""
    policy = policy_of(MODELS[2])
    assert policy.prefix_sharing(policy.model) is None
    with pytest.raises(ConfigError, match=r"^train.share_prefixes true needs a model of attention, dense MLPs and mix"):
        policy_of(MODELS[2], share_prefixes="always")


def rules_of_gpus(gpu, *models):
    """The PrefixRules of models of 16 bits, or None, on a GPU."""
    rules = []
    with shapes_only(device.GPUS[gpu]):
        for folder in models:
            config = read_config(folder)
            rules.append(Transformer(config, Weights(config, "bfloat16")).prefix_sharing)
    return rules


def rule_of_hybrid(gpu, dtype):
    """The PrefixRule of hybrid_of_128_columns on a GPU, or None."""
    config = config_of_128_columns()
    with shapes_only(device.GPUS[gpu]):
        return Transformer(config, Weights(config, dtype)).prefix_sharing


@on_cpu
@pytest.mark.parametrize("levels, windows", [(None, None), (2, False), (3, False)])
def test_what_gpus_share(rng, monkeypatch, levels, windows):
    """Constants say which levels and windows; what is not shared is computed as without sharing."""
    if levels is None:
        levels, windows = 3, True
    else:
        monkeypatch.setattr(ops, "PREFIX_LEVELS", levels)
        monkeypatch.setattr(ops, "PREFIX_WINDOWS", windows)
    rules = rules_of_gpus("h200", HYBRID, MODEL, GEMMA)
    assert rules == [None, PrefixRule(16, levels), PrefixRule(16, levels) if windows else None]
    assert rule_of_hybrid("h200", "bfloat16") == PrefixRule(64, levels)
    # The gradient of float16 has no tensor cores.
    assert rule_of_hybrid("h200", "float16") is None and rules_of_gpus("h200", HYBRID) == [None]
    # No kernels of prefixes for other GPUs.
    assert rule_of_hybrid("a100", "bfloat16") is None
    assert rules_of_gpus("a100", MODEL, GEMMA) == [None, None]

    rollouts = rollouts_of(rng, [(40, [5, 1]), (16, [9, 8]), (33, [12])], system=48)
    found = [rollouts.micro_batch(sharing=rule) for rule in (None, *rules, SHARING)]
    assert [batch.levels for batch in found] == [0, 0, levels, levels if windows else 0, 3]
    plain, without = found[0], [batch for batch, rule in zip(found, (None, *rules), strict=False) if rule is None]
    for batch in without:
        assert "parents" not in batch.sequences and batch.levels == 0
        for name in ("input_ids", "position_ids"):
            np.testing.assert_array_equal(batch.tokens[name], plain.tokens[name])
        np.testing.assert_array_equal(batch.targets["rows"], plain.targets["rows"])
    # The system prompt once, and of the first prompt 32 tokens more, where a prompt's prefix may have one.
    rest = 16 + 9 + 16 + 8 + 33 + 12
    assert found[2].num_tokens == 48 + {2: 40 + 5 + 40 + 1, 3: 32 + 8 + 5 + 8 + 1}[levels] + rest


@on_cpu
def test_dropout_shares_nothing():
    policy = policy_of()
    assert policy.prefix_sharing(policy.model) == SHARING
    for dropout in (0.0, 0.1):
        policy.model.adapter = Adapter.new(
            policy.model.config, LoraConfig(r=2, lora_dropout=dropout), "float32", "base", 0
        )
        assert (policy.prefix_sharing(policy.model) is not None) == (dropout == 0)


# --- trainers whose pairs, completions or prompts begin alike ---------------------------------------------------------


def preference_policy(tmp_path, kind, dtype=None, **train):
    """A Policy of DPO, KTO or a reward model that has moved from its reference, and its rows: prompts of 40 tokens or
    more, some of which repeat."""
    trainer = {"dpo": dpo, "kto": kto, "reward": reward}[kind]
    options = {"per_device_train_batch_size": 6, "max_length": 200, "share_prefixes": "always"} | train
    run = reward_run(tmp_path, **options) if kind == "reward" else preference_run(kind, tmp_path, **options)
    heads = SCORE_HEAD if kind == "reward" else LM_HEAD
    model = load_model(MODEL, dtype, heads)
    if kind == "reward":
        score = np.random.default_rng(5).standard_normal(model.score.shape)
        model.score[...] = device.asarray(score.astype(model.dtype))
    policy = Policy(model, run.train, None if kind == "reward" else load_model(MODEL, dtype))
    policy.model.weights.flat[::7] *= 1.01
    rows = trainer.load_rows(run.data.train, run, model, Tokenizer.from_folder(MODEL))
    return trainer, policy, rows


def long_rows(kind, rows, rng):
    """12 of the rows, after prompts that are longer, with a system prompt alike for all."""
    system = rng.integers(3, 40, 20).tolist()
    prompts = [system + rng.integers(3, 40, length).tolist() for length in (20, 33, 45)]

    def longer(sequence, prompt):
        ids = np.concatenate([np.array(prompt, np.int32), sequence.input_ids])
        mask = np.concatenate([np.zeros(len(prompt), bool), sequence.loss_mask])
        return TokenSequence(ids, mask)

    made = []
    for i, row in enumerate(rows[:12]):
        prompt = prompts[i % 3]
        if kind == "dpo":
            made.append(replace(row, chosen=longer(row.chosen, prompt), rejected=longer(row.rejected, prompt)))
        elif kind == "kto":
            ids = prompt + list(row.prompt_ids)
            made.append(replace(row, prompt_ids=ids, sequence=longer(row.sequence, prompt)))
        else:
            made.append(replace(row, prompt_ids=prompt + list(row.prompt_ids)))
    return made


@on_cpu
@pytest.mark.parametrize("kind", ["dpo", "kto", "reward"])
def test_rows_that_begin_alike(rng, tmp_path, kind):
    check_rows(rng, tmp_path, kind, 2e-6)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("kind", ["dpo", "kto", "reward"])
def test_rows_that_begin_alike_on_a_gpu(rng, tmp_path, kind):
    check_rows(rng, tmp_path, kind, 2e-2, "bfloat16")


def check_rows(rng, tmp_path, kind, tolerance, dtype=None):
    """All numbers of a step have the same bits but the gradient, which has the same terms."""
    trainer, policy, rows = preference_policy(tmp_path, kind, dtype)
    rows = long_rows(kind, rows, rng)
    plain = trainer.plain_batch(rows[:6], policy.model.config)
    shared = plain.sharing_prefixes(policy.prefix_sharing(policy.model))
    assert shared.num_tokens < 0.75 * plain.num_tokens
    # A system prompt, a prompt of it, and its completions.
    parents = shared.sequences["parents"]
    assert max(parents[parent] for parent in parents if parent >= 0) >= 0
    policy.step, found, evaluations = lambda learning_rate: {}, [], []
    for apart in (policy.computing_apart(), nullcontext()):
        with apart, policy.context.use():
            evaluations.append(trainer.evaluate(policy, rows))
            metrics = dict(trainer.train_step(policy, rows, 0.0))
            found.append((metrics, device.to_host(policy.grads.flat).copy()))
    (metrics, gradient), (others, of_shared) = found
    assert evaluations[0] == evaluations[1]
    assert metrics == others and metrics["loss"] > 0
    assert not np.array_equal(of_shared, gradient)
    np.testing.assert_allclose(of_shared, gradient, atol=tolerance * np.abs(gradient).max())


@on_cpu
@pytest.mark.parametrize("shared_trunk", [False, True], ids=["own critic", "shared trunk"])
def test_ppo_shares_what_prompts_begin_with(rng, tmp_path, shared_trunk):
    run = ppo_run(tmp_path / "run", max_completion_length=32, critic={"shared": shared_trunk}, share_prefixes="always")
    heads = LM_HEAD + SCORE_HEAD if shared_trunk else LM_HEAD
    policy = Policy(load_model(MODEL, heads=heads), run.train, load_model(MODEL), run.train.temperature)
    critic = None if shared_trunk else Policy(load_model(MODEL, heads=SCORE_HEAD), run.train)
    trained = policy if shared_trunk else critic
    trained.model.score[...] = rng.standard_normal(trained.model.score.shape).astype(np.float32)
    if critic is not None:
        critic.arena = policy.arena
    actor = ppo.ActorCritic(policy, critic, run)
    rollouts = rollouts_of(rng, [(40, [5, 9]), (70, [17])])
    rollouts.is_stale = True
    every, found = np.arange(3), []
    actor.experience = ppo.Experience(rollouts, 0, 0.0, actor.score_moments)
    assert len(ppo.micro_batch(rollouts, every, actor.prefix_sharing())[0].input_ids) == len(rollouts.token_ids) - 32
    policies = [policy] if critic is None else [policy, critic]
    for apart in (policy.computing_apart(), nullcontext()):
        with apart:
            ppo.evaluate_tokens(actor, rollouts)
            ppo.estimate_advantages(actor.buffer, rollouts, np.arange(3.0), run.train)
            evaluated = actor.buffer.memory.copy()
            actor.zero_grad()
            partials = np.zeros((ppo_loss_blocks(len(rollouts.rollout_logprobs)), SUMS), np.float32)
            ppo.forward_backward(actor, every, 1.0, partials)
            found.append((evaluated, partials, [device.to_host(each.grads.flat).copy() for each in policies]))
    for name, one, other in zip(("rollout", "loss"), *(each[:2] for each in found), strict=True):
        assert_same_bits(one, other, name)
    for one, other in zip(*(each[2] for each in found), strict=True):
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(other, one, atol=2e-6 * np.abs(one).max())
