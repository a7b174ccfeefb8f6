"""HGPO: advantages by a hierarchy of step groups beside a reference in plain Python, by hand and of tool episodes."""

import statistics
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config.sections.agents import ToolsConfig
from rlnumba.errors import ConfigError
from rlnumba.trainers.estimators import anchors_of, gigpo_advantages, hgpo_advantages
from tests.parallel import in_threads
from tests.trainers.runs import grpo_config, grpo_run, metrics_of, on_two_ranks
from tests.trainers.test_agents import agent_run, completions_of, train
from tests.trainers.test_gigpo import MODES, random_episodes
from tests.trainers.test_resume import hash_of

HISTORIES = {"advantage_estimator": "hgpo", "hgpo_history_length": 1, "hgpo_alpha": 0.5, "gigpo_gamma": 0.8}


def settings(mode="mean_norm", length=2, alpha=1.0, base=False, gamma=0.8):
    names = {"hgpo_history_length": length, "hgpo_alpha": alpha, "hgpo_base_group": base}
    return SimpleNamespace(gigpo_mode=mode, gigpo_gamma=gamma, step_advantage_w=1.0, **names)


def of_group(value, members, mode, deviation=statistics.pstdev):
    """A value beside the others of its group, itself among them; None where that says nothing."""
    if len(members) < 2 or all(abs(member - members[0]) < 1e-12 for member in members):
        return None
    difference = value - statistics.fmean(members)
    if abs(difference) < 1e-12:
        return None
    return difference / (deviation(members) + 1e-6) if mode == "mean_std_norm" else difference


def reference(episodes, train):
    """[[advantage of each turn]] of the episodes of a group, (reward, prompt ids, ids, mask) each."""
    turns = []
    for number, (reward, prompt, ids, mask) in enumerate(episodes):
        said, history = list(prompt), []
        for drawn, tokens in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
            if drawn:
                history.append(list(said))
            said = [token for token, _ in tokens]
        for turn in range(len(history)):
            worth = reward * train.gigpo_gamma ** (len(history) - 1 - turn)
            turns.append((number, history[: turn + 1], worth))
    rewards, found = [episode[0] for episode in episodes], [[] for _ in episodes]
    for number, history, worth in turns:
        terms = {}
        for k in range(1, train.hgpo_history_length + 2):
            if k <= len(history):
                same = [value for _, other, value in turns if len(other) >= k and other[-k:] == history[-k:]]
                terms[k] = of_group(worth, same, train.gigpo_mode)
        if train.hgpo_base_group:
            terms[0] = of_group(rewards[number], rewards, train.gigpo_mode, statistics.stdev)
        terms = {k: value for k, value in terms.items() if value is not None}
        total = sum((k + 1) ** train.hgpo_alpha for k in terms)
        found[number].append(sum((k + 1) ** train.hgpo_alpha * value / total for k, value in terms.items()))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("length", "alpha", "base"), [(0, 1.0, False), (1, 0.0, True), (2, 1.0, False), (4, 2.0, True)]
)
def test_random_episodes(mode, length, alpha, base):
    rng, train, levels = np.random.default_rng(length), settings(mode, length, alpha, base), 0
    for _ in range(10):
        episodes = random_episodes(rng, 6, 5)
        anchors = [anchors_of(prompt, ids, np.array(mask, bool)) for _, prompt, ids, mask in episodes]
        rewards = [each[0] for each in episodes]
        advantages, steps = hgpo_advantages(rewards, anchors, train)
        assert not advantages.any()
        for own, expected in zip(steps, reference(episodes, train), strict=True):
            np.testing.assert_allclose(own.values, expected, atol=1e-9)
        _, of_gigpo = gigpo_advantages(rewards, anchors, train)
        for own, other in zip(steps, of_gigpo, strict=True):
            assert own.group_sizes.tolist() == other.group_sizes.tolist()
            levels += not np.allclose(own.values, other.values)
    # Longer histories change something; without them the groups are GiGPO's.
    assert (levels == 0) == (length == 0 and not base and mode == "mean_norm")


def test_by_hand():
    """The state b was reached from a twice and from c once; an episode without a reward is in no group."""
    anchors = [["start", "a", "b"], ["start", "a", "b"], ["start", "c", "b"], ["start", "a"]]
    rewards = [1.0, 0.0, 0.0, np.nan]
    _, steps = hgpo_advantages(rewards, anchors, settings(length=1, gamma=1.0))
    # Of the last turns: 1 - 1/3 of those in b with weight 2, 1 - 1/2 of those that came from a with weight 3.
    np.testing.assert_allclose(steps[0].values[2], (2 * 2 / 3 + 3 / 2) / 5)
    np.testing.assert_allclose(steps[1].values[2], (2 * -1 / 3 + 3 * -1 / 2) / 5)
    # The third is alone with its history.
    np.testing.assert_allclose(steps[2].values, [-1 / 3, 0, -1 / 3])
    assert steps[3].values.tolist() == [0, 0] and steps[0].group_sizes.tolist() == [3, 2, 3]
    # The episode's advantage, 2/3, has weight 1; alpha 0 weighs all alike.
    _, steps = hgpo_advantages(rewards, anchors, settings(length=1, gamma=1.0, base=True))
    np.testing.assert_allclose(steps[0].values[2], (2 / 3 + 2 * 2 / 3 + 3 / 2) / 6)
    _, steps = hgpo_advantages(rewards, anchors, settings(length=1, gamma=1.0, alpha=0.0))
    np.testing.assert_allclose(steps[0].values[2], (2 / 3 + 1 / 2) / 2)


def test_groups_that_say_nothing_have_no_weight():
    """Equal returns, whose mean rounds, are left out of the weights."""
    anchors = [["x", "a", "b"], ["y", "a", "b"], ["z", "a", "b"], ["w", "c", "b"]]
    _, steps = hgpo_advantages([0.1, 0.1, 0.1, 0.9], anchors, settings(length=1, gamma=1.0))
    np.testing.assert_allclose(steps[0].values, [0, 0, -0.2], atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_a_tool(tmp_path, mode):
    run = agent_run(tmp_path / "run", max_steps=1, gigpo_mode=mode, **HISTORIES)
    train(run)
    lines, seen = completions_of(run), []
    for first in range(0, len(lines), 4):
        group = lines[first : first + 4]
        episodes = [(x["reward"], x["prompt_token_ids"], x["token_ids"], x["mask"]) for x in group]
        for line, values in zip(group, reference(episodes, run.train), strict=True):
            assert line["advantage"] == 0
            np.testing.assert_allclose(line["step_advantages"], values, atol=1e-6)
            seen += values
    assert any(seen) and metrics_of(run)[0]["step_groups/size_mean"] > 1


def test_resumed_and_on_two_ranks(tmp_path):
    keys = {"max_steps": 2, "per_device_train_batch_size": 4, "global_batch_size": 8}
    run = agent_run(tmp_path / "whole", **keys | HISTORIES)
    train(run)
    parts = replace(run, output_dir=str(tmp_path / "parts"))
    train(replace(parts, train=replace(run.train, max_steps=1)))
    train(parts, resume=True)
    assert hash_of(parts) == hash_of(run)
    both = on_two_ranks(run, tmp_path / "two")
    in_threads.run(lambda communicator: train(both, communicator=communicator), 2)
    assert hash_of(both) == hash_of(run)


def test_what_is_refused(tmp_path):
    run, config = grpo_run(tmp_path / "run"), grpo_config(**HISTORIES)
    with pytest.raises(ConfigError, match="hgpo compares the turns of episodes: it needs tools or an environment"):
        replace(run, train=config)
    assert replace(run, train=config, tools=ToolsConfig(funcs=["a.py:f"])).train.hgpo_alpha == 0.5
    for keys, message in (
        ({"hgpo_history_length": -1}, r"train\.hgpo_history_length must be at least 0"),
        ({"hgpo_alpha": -1.0}, r"train\.hgpo_alpha must be at least 0"),
        ({"replay_buffer_size": 8}, "replay_buffer_size is for advantage_estimator grpo and maxrl, not hgpo"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(config, **keys)
