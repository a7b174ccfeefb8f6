"""Training on episodes: what the environment has written is read, and no target of anything."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from rlnumba.data import Prompt
from rlnumba.engine import Engine
from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.engine.sequence import Completion, EpisodeRecord, SamplingParams
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.sampling.pipeline import Drawn
from rlnumba.sampling.pipeline_state import encoded
from rlnumba.sampling.samples import Generation, Sample, generation_metrics
from rlnumba.trainers import grpo, ppo
from rlnumba.trainers.rollout import Rollouts
from tests.close import assert_same_bits
from tests.counts import EPISODES
from tests.engine.test_llm import make_model
from tests.trainers.runs import MODEL
from tests.trainers.test_grpo import golden_policy, golden_samples, other_sampler  # noqa: F401


def masked(sample, holes):
    """A Sample whose tokens at `holes` are the environment's, as an episode has it."""
    completion = sample.completion
    mask = np.ones(completion.num_tokens, bool)
    mask[holes] = False
    logprobs = np.where(mask, completion.array("logprobs"), np.float32(0))
    turns = 1 + int((np.diff(mask.astype(int)) == 1).sum())
    record = EpisodeRecord(sample.prompt.prompt_token_ids, turns, 40, None)
    changes = {"logprobs": logprobs, "mask": None if mask.all() else mask, "episode": record}
    ids, versions = completion.array("token_ids"), np.arange(len(mask), dtype=np.int32)
    return replace(sample, completion=Completion(ids, finish_reason="stop", policy_versions=versions, **changes))


def masked_samples():
    """The golden samples with holes of several lengths, also none; the last token is always a drawn one."""
    samples = golden_samples()
    return [
        masked(each, slice(i % 4, min(i % 4 + i, each.completion.num_tokens - 1))) for i, each in enumerate(samples)
    ]


def dense_rollouts(samples):
    """The same with all tokens as targets, of which the environment's have loss mask 0 and log-probs of no meaning."""
    whole = [replace(each, completion=replace(each.completion, mask=None)) for each in samples]
    mask = np.concatenate([np.ones(each.completion.num_tokens, bool) if each.completion.mask is None
                           else each.completion.mask for each in samples])  # fmt: skip
    rollouts = Rollouts.of(whole, False)
    rollouts.loss_mask *= mask
    rollouts.rollout_logprobs = np.where(mask, rollouts.rollout_logprobs, np.float32(-3))
    return rollouts, mask


def test_arrays_have_an_entry_for_each_drawn_token():
    samples = masked_samples()
    rollouts, (dense, mask) = Rollouts.of(samples, False), dense_rollouts(samples)
    assert 20 < (~mask).sum() < mask.sum() and len(rollouts.loss_mask) == mask.sum()
    assert_same_bits(rollouts.drawn, mask)
    for name in ("loss_mask", "rollout_logprobs", "advantages"):
        assert_same_bits(getattr(rollouts, name), getattr(dense, name)[mask], name)
    assert_same_bits(rollouts.lengths, dense.lengths)
    whole, batch = dense.to_device(), rollouts.to_device()
    for name in ("rows", "target_ids"):
        assert_same_bits(getattr(batch.targets, name), device.to_host(getattr(whole.targets, name))[mask], name)
    bounds = device.to_host(batch.arrays["completion_bounds"])
    assert np.diff(bounds).tolist() == [each.completion.num_drawn for each in samples]
    assert rollouts.num_active == mask.sum()
    # A truncated completion's drawn tokens leave the loss, too.
    cut = replace(samples[5], completion=replace(samples[5].completion, finish_reason="length"))
    assert Rollouts.of([samples[1], cut], True).num_active == samples[1].completion.num_drawn


def test_parts_and_checkpoints_keep_what_was_drawn():
    rollouts = Rollouts.of(masked_samples(), False)
    arrays = [name for name, value in vars(rollouts).items() if isinstance(value, np.ndarray)]
    for again in (
        Rollouts.joined(rollouts.parts(3)),
        Rollouts.joined([Rollouts.of([each], False) for each in masked_samples()]),
        Rollouts.restored(rollouts.state()),
        rollouts.ordered(range(7, -1, -1)).ordered(range(7, -1, -1)),
    ):
        for name in arrays:
            assert_same_bits(getattr(again, name), getattr(rollouts, name), name)
    part = rollouts.part(2, 3)
    assert_same_bits(part.targets, Rollouts.of(masked_samples()[2:5], False).targets)
    plain = Rollouts.of(golden_samples(), False)
    assert len(plain.drawn) == 0 and len(Rollouts.joined(plain.parts(3)).drawn) == 0
    # A checkpoint of before has neither field.
    saved = {name: value for name, value in plain.state().items() if name not in ("drawn", "target_lengths")}
    assert_same_bits(Rollouts.restored(saved).targets, plain.targets)


def test_checkpoints_keep_completions_with_one_drawn_token_each():
    samples = masked_samples()[:3]
    for each in samples:
        completion = each.completion
        each.completion = replace(completion, mask=np.arange(completion.num_tokens) == 0)
    rollouts = Rollouts.of(samples, False)
    assert len(rollouts.advantages) == 3 < rollouts.completion_lengths.sum()
    assert_same_bits(Rollouts.restored(rollouts.state()).advantages, rollouts.advantages)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "beta": 0.1},
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
        {"loss_type": "dapo", "entropy_coef": 0.1, "top_entropy_quantile": 0.5},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.01},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_gradient_is_that_of_all_tokens_times_the_mask(other_sampler, options):  # noqa: F811
    samples, found = masked_samples(), []
    rollouts, (dense, mask) = Rollouts.of(samples, False), dense_rollouts(samples)
    rng = np.random.default_rng(0)
    dense.old_logprobs = (dense.rollout_logprobs + rng.normal(0, 0.3, len(mask))).astype(np.float32)
    dense.ref_logprobs = (dense.rollout_logprobs + rng.normal(0, 0.3, len(mask))).astype(np.float32)
    for name in ("old_logprobs", "ref_logprobs"):
        setattr(rollouts, name, getattr(dense, name)[mask])
    for each in (rollouts, dense):
        policy = golden_policy(**options)
        metrics = grpo.train_step(policy, each.parts(4), 0.0)
        found.append((metrics, device.to_host(policy.grads.flat).copy()))
    (metrics, gradient), (wanted, expected) = found
    assert {**metrics}.keys() == {**wanted}.keys() and np.abs(expected).max() > 1e-4
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    # Sums over about a hundred tokens in another order.
    np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())


def test_ppo_has_values_and_advantages_of_drawn_tokens():
    samples = masked_samples()
    rollouts, (dense, mask) = Rollouts.of(samples, False), dense_rollouts(samples)
    number = np.cumsum(mask) - 1
    for chosen in ([0, 1, 2, 3, 4, 5, 6, 7], [6, 1]):
        (batch, rows), (whole, all_rows) = (ppo.micro_batch(each, np.array(chosen)) for each in (rollouts, dense))
        kept = mask[all_rows]
        assert rows.tolist() == number[all_rows[kept]].tolist() and rows.dtype == np.int32
        for name in ("rows", "target_ids"):
            assert_same_bits(getattr(batch, name), device.to_host(getattr(whole, name))[kept], name)
        assert_same_bits(batch.input_ids, whole.input_ids)


def test_metrics_of_episodes():
    samples = masked_samples()[4:6]
    drawn, total = ([getattr(each.completion, name) for each in samples] for name in ("num_drawn", "num_tokens"))
    metrics = generation_metrics(Generation([samples]), ["f"])
    assert metrics["completions/mean_length"] == np.mean(drawn)
    assert metrics["completions/env_tokens_mean"] == np.mean(total) - np.mean(drawn) > 0
    samples[0].completion.num_cached_tokens = 16
    metrics = generation_metrics(Generation([samples]), ["f"])
    turns = [each.completion.episode.num_turns for each in samples]
    assert metrics["rollout/turns_mean"] == np.mean(turns) and metrics["rollout/turns_max"] == max(turns)
    assert metrics["rollout/prefix_hit_frac"] == 16 / 80
    prompts = sum(len(each.prompt_token_ids) for each in samples)
    assert Generation([samples]).num_tokens == prompts + sum(drawn) and Generation([samples]).num_generated == sum(
        drawn
    )
    assert not [name for name in generation_metrics(Generation([golden_samples()]), ["f"]) if "turns" in name]


def test_a_checkpoint_has_no_completions_of_episodes():
    """Their environments are gone: they are drawn again."""
    drawn = Drawn(0, 0, 0, 0, SamplingParams(), [])
    groups = [(i, drawn, [each.completion for each in found[:2]]) for i, found in enumerate((golden_samples(), []))]
    groups.append((2, drawn, [each.completion for each in masked_samples()[:2]]))
    assert [each["completions"] is None for each in encoded(groups)] == [False, True, True]


LARGER = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
LARGER |= {"num_attention_heads": 16, "num_key_value_heads": 8}


def drawn_over_turns(model, tokenizer, n, turns, most, **params):
    """Samples of n rollouts of so many turns, of at most `most` tokens each. The first context is another than the
    prompt of the data, results are of many lengths, and come at any time."""
    delays, tools = random.Random(0), ThreadPoolExecutor(8)
    prompt, results = tokenizer.encode("what is 1+1? "), [tokenizer.encode(text) for text in (" = 2", "no", "x" * 40)]

    async def episode(rollout):
        context = [*rollout.prompt_token_ids, *results[1]]
        for turn in range(turns):
            drawn = (await rollout.complete(context, most)).token_ids
            await rollout.wait(tools.submit(time.sleep, delays.random() / 200))
            context += [*drawn, *results[(turn + sum(drawn)) % 3]]

    episodes = Episodes(Engine(model, tokenizer))
    params = SamplingParams(n=n, max_tokens=turns * (most + 40), seed=3, **params)
    episodes.submit(GroupRequest(0, prompt, params, episode=episode))
    found = []
    while not episodes.is_idle:
        found += episodes.step()
    ((request,), _) = found, tools.shutdown()
    samples = [Sample(Prompt("", prompt, {}, ""), each, np.zeros(1), 0.0, {}) for each in request.completions]
    for index, each in enumerate(samples):
        each.advantage = float(index % 6 - 2)
    assert [len(each.prompt_token_ids) for each in samples] == [len(prompt) + len(results[1])] * n
    return samples


@pytest.mark.parametrize("is_known", [True, False])
def test_the_sampler_s_log_probs_are_the_trainer_s_over_turns(is_known):
    """To the bit, whenever the results come."""
    n, model = EPISODES // 25, load_model(MODEL)
    rollouts = Rollouts.of(drawn_over_turns(model, Tokenizer.from_folder(MODEL), n, 4, 10), False)
    assert 4 * n < len(rollouts.loss_mask) < len(rollouts.drawn)
    policy = golden_policy()
    for part in rollouts.parts(4):
        logprobs = device.xp().empty(len(part.loss_mask), np.float32)
        policy.logprobs(part.to_device().targets, logprobs)
        assert_same_bits(logprobs, part.rollout_logprobs)
    metrics = grpo.train_step(Policy(model, policy.train), rollouts.parts(3, on_policy=is_known), 1e-3)
    assert metrics["sampling/sampling_logp_difference/max"] == 0.0 and metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("dtype", "n", "most", "sizes"),
    [
        ("float32", 4, 40, {"vocab_size": 300}),
        pytest.param("bfloat16", 64, 60, LARGER, marks=pytest.mark.gpu, id="10,000 tokens in bfloat16"),
    ],
)
def test_log_probs_of_turns_that_are_drawn_to_their_limit(dtype, n, most, sizes):
    """Three turns of each rollout, with contexts over the ends of blocks."""
    model = make_model(dtype, max_position_embeddings=1024, **sizes)
    samples = drawn_over_turns(model, Tokenizer.from_folder(MODEL), n, 3, most, ignore_eos=True)
    rollouts, policy = Rollouts.of(samples, False), Policy(model, golden_policy().train)
    assert len(rollouts.loss_mask) == n * 3 * most and {each.completion.episode.num_turns for each in samples} == {3}
    for part in rollouts.parts(4):
        logprobs = device.xp().empty(len(part.loss_mask), np.float32)
        policy.logprobs(part.to_device().targets, logprobs)
        assert_same_bits(logprobs, part.rollout_logprobs)
    metrics = grpo.train_step(policy, rollouts.parts(3, on_policy=True), 1e-3)
    assert metrics["sampling/sampling_logp_difference/max"] == 0.0 and metrics["grad_norm"] > 0
