"""Groups of earlier steps in the place of those of equal rewards."""

import numpy as np
import pytest

from rlnumba import checkpoint
from rlnumba.data import Prompt
from rlnumba.engine.sequence import Completion
from rlnumba.errors import ConfigError
from rlnumba.sampling.samples import Sample
from rlnumba.trainers import grpo
from rlnumba.trainers.replay_buffer import ReplayBuffer, score_of
from rlnumba.trainers.rollout import set_advantages
from tests.trainers.runs import grpo_config, grpo_run, metrics_of

TRAIN = grpo_config()


def groups_of(*pairs, first_id=5):
    """A group of two completions for each pair of rewards, with GRPO's advantages; the first id is the group's own."""
    groups = [
        [
            Sample(Prompt("", [1], {}, ""), Completion([first_id + i, 1], [-0.5, -1.0], "stop"), np.array([r]), r, {})
            for r in pair
        ]
        for i, pair in enumerate(pairs)
    ]
    set_advantages(groups, [1.0], "group")
    return groups


def ids_of(parts):
    return [part.token_ids[1] for part in parts]


def test_the_groups_of_highest_score_are_kept():
    buffer = ReplayBuffer(3)
    groups = groups_of((0.0, 1.0), (0.5, 0.5), (0.0, 4.0), (np.nan, 1.0))
    # std of (0, 1) is sqrt(1/2), and both |A| are 0.5 / (std + 1e-4).
    std = 0.5**0.5
    assert score_of(groups[0]) == pytest.approx(std * 2 * 0.5 / (std + 1e-4))
    assert score_of(groups[1]) == score_of(groups[3]) == 0
    # Nothing to replay yet: the groups of equal rewards stay.
    assert ids_of(buffer.replay(groups, TRAIN, 3, seed=0)) == [5, 6, 7, 8]
    assert [(entry.rollouts.token_ids[1], entry.step) for entry in buffer.entries] == [(7, 3), (5, 3)]
    assert buffer.metrics == {"replay/groups": 0, "replay/buffer_size": 2}
    # Of two with one score the older stays.
    buffer.replay(groups_of((0.0, 1.0), (0.0, 2.0), first_id=20), TRAIN, 4, seed=0)
    assert ids_of(entry.rollouts for entry in buffer.entries) == [7, 21, 5]


def test_groups_of_equal_rewards_are_replaced_by_a_draw():
    buffer = ReplayBuffer(8)
    buffer.replay(groups_of((0.0, 1.0), (0.0, 3.0)), TRAIN, 1, seed=0)
    low, high = sorted(entry.score for entry in buffer.entries)
    state, drawn = buffer.state(), []
    for seed in range(300):
        again = ReplayBuffer(8)
        again.load_state(state, 2)
        parts = again.replay(groups_of((0.0, 9.0), (2.0, 2.0), first_id=30), TRAIN, 5, seed)
        assert ids_of(parts)[0] == 30 and again.metrics["replay/age"] == 4.0
        drawn.append(ids_of(parts)[1])
        np.testing.assert_array_equal(np.abs(parts[1].advantages) > 0, True)
        assert parts[1].rollout_logprobs.tolist() == [-0.5, -1.0] * 2
    assert set(drawn) == {5, 6}
    # In proportion to the scores: the standard deviation of the share is 0.03.
    assert np.mean(np.array(drawn) == 6) == pytest.approx(high / (low + high), abs=0.1)
    # Each at most once, and as many as there are.
    parts = buffer.replay(groups_of((1.0, 1.0), (2.0, 2.0), (3.0, 3.0), first_id=40), TRAIN, 5, seed=1)
    assert sorted(ids_of(parts)) == [5, 6, 42] and buffer.metrics["replay/groups"] == 2
    # Groups of another size than the run's are not restored.
    again.load_state(state, 4)
    assert again.entries == []


def test_a_run_replays_with_the_old_log_probs_and_is_resumed(tmp_path, monkeypatch):
    """The sampler's log-probs of new groups are the policy's, bit for bit; of others they are an earlier one's."""
    differing, train_step = [], grpo.train_step

    def recording(policy, parts, learning_rate):
        found = []
        for part in parts:
            assert not part.on_policy
            differs = grpo.host_logprobs(policy, policy.model, [part]) != part.rollout_logprobs
            owner = np.repeat(np.arange(part.num_sequences), part.completion_lengths)
            found += np.bincount(owner, differs, part.num_sequences).tolist()
            assert part.advantages[(np.bincount(owner, differs) > 0)[owner]].all()
        differing.append(sum(count > 0 for count in found))
        return train_step(policy, parts, learning_rate)

    monkeypatch.setattr(grpo, "TRAINER", grpo.TRAINER._replace(train_step=recording))
    options = {"replay_buffer_size": 3, "save_steps": 1, "max_steps": 4, "steps_per_generation": 2}
    run = grpo_run(tmp_path / "run", "one_for_even", num_prompts=12, **options)
    grpo.run_grpo(run)
    rows = metrics_of(run)
    replayed = [row["replay/groups"] for row in rows]
    assert replayed[0] == 0 and sum(replayed) > 1
    assert differing == [4 * count for count in replayed]
    assert all(row["replay/age"] >= 1 for row in rows if row["replay/groups"])
    weights = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    kept = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-2")[1]["data"]["replay_buffer"]
    assert [entry["step"] for entry in kept] and len(kept) <= 3
    grpo.run_grpo(run, resume=2)
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() == weights
    assert [row["loss"] for row in metrics_of(run)] == [row["loss"] for row in rows]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_mask_replay": True}, "replay_buffer_size has completions of other steps: not with sampling_mask"),
        ({"advantage_estimator": "rae"}, "replay_buffer_size is for advantage_estimator grpo and maxrl, not rae"),
    ],
)
def test_what_does_not_go_together_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        grpo_config(replay_buffer_size=4, **options)
