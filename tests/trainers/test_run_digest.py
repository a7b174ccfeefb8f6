"""A run that goes on is the same run, or says what has changed."""

import contextlib
import json
import os
import shutil
from dataclasses import dataclass, field, replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rlnumba import checkpoint
from rlnumba.config import RewardsConfig
from rlnumba.config.resuming import FREE, KEYS, NEXT, RULES, SAME, keys_by_rule, rule_of
from rlnumba.errors import ConfigError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.reporting import metrics
from rlnumba.rewards.calling import ModelReward
from rlnumba.rewards.functions import accuracy_reward
from rlnumba.runs import run_digest
from rlnumba.runs.policy import epoch_order
from rlnumba.runs.prompt_order import PromptOrder
from rlnumba.runs.prompt_schedule import MicroBatchSchedule, Start
from rlnumba.runs.row_loop import RowSchedule
from rlnumba.runs.run_digest import keys_of_run, model_hash, new_indices, row_hashes, source_hash
from rlnumba.trainers import sft
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.sft import run_sft
from tests.trainers.runs import MODEL, SFT_ROWS, grpo_config, grpo_run, metrics_of, preference_run, sft_run
from tests.trainers.test_resume import hash_of

# Of the property below; more where the variable says so.
EXAMPLES = int(os.environ.get("RLNUMBA_PROPERTY_EXAMPLES") or 8)
STEPS = 4
# What may be edited, with a value other than the run's.
EDITS = {
    "logging_steps": 3,
    "save_total_limit": 9,
    "save_steps": 3,
    "gradient_checkpointing": True,
    "activation_memory": "selective",
    "eval_on_start": True,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.5,
    "weight_decay": 0.25,
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 1,
    "loss_type": "dft",
    "seed": 7,
    "shuffle_dataset": False,
    "optim": "adamw_8bit",
    "model": str(MODEL.parent / "models" / "qwen3_tied"),
}
OF_RUN = ("seed", "model")


def full_name(name):
    return name if name in OF_RUN else f"train.{name}"


def edited(run, names):
    of_run = {name: EDITS[name] for name in names if name in OF_RUN}
    train = {name: EDITS[name] for name in names if name not in OF_RUN}
    return replace(run, **of_run, train=replace(run.train, **train))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(run, its rows in the order of training) of an sft run that was not interrupted, with all its checkpoints."""
    run = sft_run(tmp_path_factory.mktemp("whole") / "run", max_steps=STEPS, save_steps=1, shuffle_dataset=True)
    with trained_rows() as rows:
        run_sft(run)
    return run, rows


@pytest.fixture(scope="module", autouse=True)
def no_curves():
    """Drawing them takes longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot", lambda folders, path: None)
        yield


@contextlib.contextmanager
def trained_rows():
    """A list to which the rows of each optimizer step in the block are added, as bytes."""
    found, patch = [], pytest.MonkeyPatch()
    train_step = sft.train_step

    def noted(policy, rows, learning_rate):
        found.extend(row[0].input_ids.tobytes() for row in rows)
        return train_step(policy, rows, learning_rate)

    patch.setattr(sft, "TRAINER", sft.TRAINER._replace(train_step=noted))
    try:
        yield found
    finally:
        patch.undo()


@hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == 8, phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
@hypothesis.given(step=st.integers(1, STEPS - 1), names=st.sets(st.sampled_from(sorted(EDITS)), min_size=1, max_size=3))
@hypothesis.example(step=2, names={"logging_steps", "activation_memory"})
@hypothesis.example(step=1, names={"per_device_train_batch_size"})
@hypothesis.example(step=3, names={"seed", "learning_rate"})
def test_edits_of_a_run_that_was_killed(whole, tmp_path_factory, step, names):
    """It ends as the run that was not interrupted, and goes on from that step with the edits; or in one line."""
    (run, rows_before), path = whole, tmp_path_factory.mktemp("edited")
    for name in ("killed", "not"):
        shutil.copytree(run.output_dir, path / name)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(path / "killed" / "checkpoints" / f"step-{later}")
    shutil.rmtree(path / "killed" / "final")
    killed, other = (replace(edited(run, names), output_dir=str(path / name)) for name in ("killed", "not"))
    refused = [name for name in names if rule_of(full_name(name)) not in (FREE, NEXT)]
    if refused:
        with pytest.raises(ConfigError) as caught:
            run_sft(killed, resume=True)
        assert "\n" not in str(caught.value) and "this cannot change on --resume" in str(caught.value)
        for name in refused:
            before = getattr(run if name in OF_RUN else run.train, name)
            assert f"{full_name(name)} = {before!r}, and this run has {EDITS[name]!r}" in str(caught.value)
        assert not (path / "killed" / "final").exists()
        return
    with trained_rows() as rows:
        run_sft(killed, resume=True)
    with trained_rows():
        run_sft(other, resume=step)
    assert hash_of(killed) == hash_of(other)
    if all(rule_of(full_name(name)) == FREE for name in names):
        assert hash_of(killed) == hash_of(run)
    # No row is skipped and none comes twice, whatever the sizes of the steps.
    size = run.train.per_device_train_batch_size * run.train.micro_batches_per_step
    size_now = killed.train.per_device_train_batch_size * killed.train.micro_batches_per_step
    count = len(golden_rows())
    order = np.concatenate([epoch_order(count, True, run.seed, epoch) for epoch in range(3)])
    assert rows == [golden_rows()[i] for i in order[step * size :][: (STEPS - step) * size_now]]
    assert rows_before[: step * size] == [golden_rows()[i] for i in order[: step * size]]


def golden_rows():
    """The rows of the golden file as `trained_rows` notes them, in the order of the file."""
    if not _golden_rows:
        run = sft_run(MODEL)
        loaded = sft.load_rows(str(SFT_ROWS), run, load_model(MODEL), Tokenizer(MODEL))
        _golden_rows.extend(row[0].input_ids.tobytes() for row in loaded)
    return _golden_rows


_golden_rows = []


def test_a_run_says_what_has_changed(tmp_path, capsys):
    """Each key that may change with what it does; the data's and the rewards' content, not their names."""
    run = grpo_run(tmp_path / "run", max_steps=2, save_steps=1)
    run_grpo(run)
    capsys.readouterr()
    shutil.copy(tmp_path / "prompts.jsonl", tmp_path / "same.jsonl")
    file = tmp_path / "rewards_for_tests.py"
    file.write_text(file.read_text() + "# another line\n")
    del_module(file)
    train = replace(run.train, max_steps=3, learning_rate=1e-3, logging_steps=2, beta=0.5)
    changed = replace(run, data=replace(run.data, train=str(tmp_path / "same.jsonl")), train=train)
    run_grpo(changed, resume=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rlnumba: ")]
    assert [line for line in lines if "curves" not in line] == [
        "rlnumba: train.learning_rate 0.002 -> 0.001 from step 3",
        "rlnumba: train.max_steps 2 -> 3 from step 3",
        "rlnumba: train.logging_steps 10 -> 2",
        "rlnumba: train.beta 0.0 -> 0.5 from step 3",
        "rlnumba: rewards.funcs: digits has changed, from step 3",
    ]
    # From one checkpoint to the next.
    run_grpo(changed, resume=True)
    assert "->" not in capsys.readouterr().err


def del_module(file):
    """Let a reward file be read again, as another process does."""
    import sys

    name = next(name for name, module in sys.modules.items() if vars(module).get("__file__") == str(file))
    del sys.modules[name]


def test_a_checkpoint_without_a_digest_is_resumed_with_a_warning(tmp_path, capsys):
    run = sft_run(tmp_path / "run", max_steps=3, save_steps=2)
    run_sft(run)
    expected, (step, state) = hash_of(run), checkpoint.load(tmp_path / "run" / "checkpoints" / "step-2")
    model = load_model(tmp_path / "run" / "checkpoints" / "step-2")
    for name in ("run", "position"):
        del state[name]
    state["policy"]["optimizer"] = {
        name: np.array(value) if isinstance(value, np.ndarray) else value
        for name, value in state["policy"]["optimizer"].items()
    }
    checkpoint.save(tmp_path / "run", step, model, Tokenizer(MODEL), state)
    run_sft(run, resume=2)
    assert hash_of(run) == expected
    warning = "step-2 does not hold what its run read: whether this one is the same is not checked"
    assert warning in capsys.readouterr().err


def test_other_rows_begin_a_new_epoch(tmp_path, capsys):
    lines = SFT_ROWS.read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[:20]))
    run = sft_run(tmp_path / "run", {"train": str(tmp_path / "rows.jsonl")}, max_steps=2, save_steps=1)
    with trained_rows() as before:
        run_sft(run)
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:3], *lines[30:37]]))
    with trained_rows() as rows:
        run_sft(replace(run, train=replace(run.train, max_steps=4)), resume=True)
    message = (
        "data.train has other rows, 10 instead of 20, of which 3 were there before: a new epoch begins with step 3"
    )
    assert message in capsys.readouterr().err
    # 8 of 10, and what is left of the epoch.
    assert len(rows) == 10 and rows[:3] == before[:3] and metrics_of(run)[-1]["epoch"] == 2


def test_solved_prompts_are_known_by_their_content(tmp_path, capsys):
    """New rows in the places of solved ones are drawn; a row that is still there stays solved."""
    run = grpo_run(
        tmp_path / "run",
        num_prompts=8,
        reward="all_solved",
        max_steps=1,
        save_steps=1,
        generation_batch_size=16,
        no_resampling_pass_rate=0.5,
    )
    file = tmp_path / "rewards_for_tests.py"
    file.write_text("def all_solved(completions, **columns):\n    return [1.0] * len(completions)\n")
    run = replace(run, train=replace(run.train, difficulty_weights=[0.3, 1.0, 1.0]))
    run_grpo(run)
    _, state = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-1")
    solved = state["data"]["memory"]["solved"]
    assert len(solved) == 4
    rows = (tmp_path / "prompts.jsonl").read_text().splitlines()
    kept = [index for index in range(8) if index not in solved[1:]]
    (tmp_path / "prompts.jsonl").write_text("\n".join([rows[index] for index in kept] + ['{"prompt": "new"}'] * 4))
    run_grpo(replace(run, train=replace(run.train, max_steps=2)), resume=True)
    assert "9 instead of 8, of which 5 were there before" in capsys.readouterr().err
    lines = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    drawn = {row["prompt"] for row in map(json.loads, lines) if row["step"] == 2}
    assert json.loads(rows[solved[0]])["prompt"] not in drawn


def test_reference_logps_are_those_of_the_reference(tmp_path, capsys, monkeypatch):
    """Where a run goes on with another one, which its checkpoint does not refuse."""
    run = preference_run("dpo", tmp_path / "run", max_steps=1, precompute_ref_log_probs=True)
    run_dpo(run)
    run_dpo(replace(run, train=replace(run.train, max_steps=2)), resume=True)
    assert "computing them again" not in capsys.readouterr().err
    shutil.copytree(MODEL, tmp_path / "other")
    shutil.copy(tmp_path / "run" / "final" / "model.safetensors", tmp_path / "other")
    monkeypatch.setattr("rlnumba.runs.run_folder.check_keys", lambda *arguments: [])
    run_dpo(replace(run, model=str(tmp_path / "other"), train=replace(run.train, max_steps=3)), resume=True)
    assert "does not have this reference's log-probs: computing them again" in capsys.readouterr().err


def test_every_key_has_its_rule():
    found = keys_by_rule()
    named = {name for names in KEYS.values() for name in names.split()}
    # Of TrainingArguments, which some trainers may not have.
    assert named - {name for names in found.values() for name in names} <= {
        *("train.save_strategy", "train.eval_strategy", "train.logging_strategy")
    }
    assert set(found) == set(RULES)
    assert {"seed", "gemm", "train.optim", "train.dtype", "train.shuffle_dataset"} <= set(found[SAME])
    assert rule_of("train.a_key_of_tomorrow") == SAME
    assert rule_of("deploy.num_train_gpus") == FREE and rule_of("engine.max_model_len") == NEXT


def test_keys_do_not_depend_on_the_number_of_ranks():
    """Of rows in a step and a generation, those of all ranks are compared."""
    run = grpo_run_of(steps_per_generation=4)
    (alone, together) = (
        keys_of_run(each)
        for each in (
            run,
            replace(
                run,
                train=replace(
                    run.train,
                    global_batch_size=16,
                    gradient_accumulation_steps=1,
                    steps_per_generation=None,
                    generation_batch_size=32,
                ),
            ),
        )
    )
    assert alone == together and alone["train.global_batch_size"] == 16 and alone["train.generation_batch_size"] == 32
    assert keys_of_run(replace(run, gemm="numba"))["gemm"] == "native" == keys_of_run(replace(run, gemm="auto"))["gemm"]


def grpo_run_of(**train):
    from rlnumba.config import DataConfig, GRPORun

    return GRPORun(
        model="m", output_dir="o", data=DataConfig(train="t"), rewards=RewardsConfig(funcs=["accuracy"]),
        train=grpo_config(**train),
    )  # fmt: skip


def test_hash_of_a_model(tmp_path):
    """It finds other weights, another size and another configuration, wherever the folder is."""
    shutil.copytree(MODEL, tmp_path / "a")
    same = model_hash(MODEL)
    assert model_hash(tmp_path / "a") == same
    weights, config = tmp_path / "a" / "model.safetensors", tmp_path / "a" / "config.json"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert model_hash(tmp_path / "a") != same
    weights.write_bytes(content + b"\0")
    assert model_hash(tmp_path / "a") != same
    weights.write_bytes(content)
    # Another order of keys is the same configuration.
    values = json.loads(config.read_text())
    config.write_text(json.dumps(dict(reversed(values.items()))))
    assert model_hash(tmp_path / "a") == same
    config.write_text(json.dumps(values | {"rms_norm_eps": 1e-3}))
    assert model_hash(tmp_path / "a") != same
    assert source_hash(ModelReward("m", None, MODEL)) == same
    weights.write_bytes(bytes(3 << 20))
    shorter = model_hash(tmp_path / "a")
    weights.write_bytes(bytes(4 << 20))
    assert model_hash(tmp_path / "a") != shorter


def test_hash_of_files(tmp_path):
    """Names count, those of files that are not there do not."""
    for name in ("a", "b"):
        (tmp_path / name).write_text("text")
    of = run_digest.files_hash
    assert of([tmp_path / "a"]) == of([tmp_path / "a", tmp_path / "none"]) != of([tmp_path / "b"])


def test_hash_of_a_reward():
    assert source_hash(accuracy_reward) is None
    assert source_hash(test_hash_of_a_reward) == run_digest.files_hash([run_digest.Path(__file__)])
    partial = run_digest.functools.partial(test_hash_of_a_reward, 1)
    assert source_hash(partial) == source_hash(test_hash_of_a_reward)


def test_what_is_compared_with_a_checkpoint():
    def digest(**keys):
        return {"keys": {"train.global_batch_size": 2, **keys}, "inputs": {}, "versions": {}}

    def said(before, now):
        return run_digest.check_keys(before, now, "step-3", 3)

    with_async = digest(**{"async.max_staleness": 1})
    assert said(digest(), with_async) == ["[async] is new from step 4"]
    assert said(with_async, digest()) == ["[async] is gone from step 4"]
    assert said(with_async, digest(**{"async.max_staleness": 2})) == ["async.max_staleness 1 -> 2 from step 4"]
    assert said(digest(), digest(**{"train.global_batch_size": 4})) == ["train.global_batch_size 2 -> 4 from step 4"]
    packed = digest(**{"quantization.type": "nf4"})
    assert said(packed, packed) == []
    bits = {"quantization.bits": 4, "quantization.type": None, "quantization.group_size": None}
    spellings = digest(**bits), digest(**bits | {"quantization.type": "nf4", "quantization.group_size": 64})
    assert [said(packed, each) + said(each, packed) for each in spellings] == [[], []]
    with pytest.raises(ConfigError, match="saved with quantization.type = 'nf4', and this run has 'int8'"):
        said(spellings[0], digest(**bits | {"quantization.bits": 8}))
    for before, now, message in (
        (packed, digest(), r"^step-3: saved with \[quantization\], and this run has none: this cannot change"),
        (digest(), packed, r"^step-3: saved with no \[quantization\], and this run has one: this cannot change"),
    ):
        with pytest.raises(ConfigError, match=message):
            said(before, now)
    one = digest(**{"teacher.model": "a"}) | {"inputs": {"teacher.model": "1"}}
    several = digest(**{"teacher.models": {"x": "a"}}) | {"inputs": {"teacher.models": "2"}}
    with pytest.raises(
        ConfigError, match=r"saved with teacher.model = 'a', and this run has teacher.models = \{'x': 'a'"
    ):
        said(one, several)
    with pytest.raises(
        ConfigError, match=r"saved with teacher.models = \{'x': 'a'\}, and this run has teacher.model ="
    ):
        said(several, one)
    assert said(digest(), one) == ["[teacher] is new from step 4"]
    # A function that is new has not changed.
    assert run_digest.check_sources({"a": "1", "b": "1"}, {"a": "2", "b": "1", "c": "1"}, "rewards.funcs: ", 3) == [
        "rewards.funcs: a has changed, from step 4"
    ]


@dataclass
class Row:
    ids: list
    mask: np.ndarray
    columns: dict
    where: str = field(default="", compare=False)


def test_hashes_of_rows():
    rows = [
        Row([1, 2], np.array([True]), {"a": "x"}),
        Row([1, 2], np.array([True]), {"a": "x"}, where="elsewhere"),
        Row([1, 2], np.array([False]), {"a": "x"}),
        Row([1, 2], np.array([True]), {"a": None}),
        Row([1], np.array([True]), {"a": "x"}),
        Row([1, 2], np.array([True]), {"a": "\ud800"}),
        [[1], [2]],
        [[1, 2]],
        [["1", 2]],
        {"x": {"a": 1}, "b": 2},
        {"x": {"a": 1, "b": 2}},
    ]
    found = row_hashes(rows)
    assert found.dtype == np.uint64 and found[0] == found[1] and len(set(found.tolist())) == len(rows) - 1
    assert new_indices(np.array([5, 6, 5, 7]), np.array([7, 5, 8, 5])) == {0: 1, 2: 3, 3: 0}


def test_order_of_other_prompts():
    order = PromptOrder(4, False, 0, epoch=2, position=3, solved_at=1.0)
    order.memory = {"solved": [3, 1], "mean_rewards": {"3": 0.5, "0": 0.1}, "draws": 6}
    order.begin_with({3: 0, 0: 2})
    assert (order.epoch, order.position) == (3, 0)
    assert order.memory == {"solved": [0], "mean_rewards": {"0": 0.5, "2": 0.1}, "draws": 6}


@pytest.mark.parametrize("epochs", [1.0, 2.5, 3.0])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 37])
def test_row_schedules_go_on_anywhere(count, epochs):
    """A run that goes on has the steps, epochs and positions that are left, and with other sizes the rows that are."""
    train = sft_run(MODEL, max_steps=-1, num_train_epochs=epochs).train
    whole = RowSchedule(train, count)
    taken = []
    for step in range(whole.total_steps):
        again = RowSchedule(train, count, step, whole.epoch, whole.position)
        assert again.total_steps == whole.total_steps
        other = RowSchedule(replace(train, per_device_train_batch_size=3), count, step, whole.epoch, whole.position)
        rows = [other.take() for _ in range(other.total_steps - step)]
        if epochs != 2.5:
            assert other.epoch == epochs and other.position == 0
        assert rows[0] == (whole.epoch, slice(whole.position, whole.position + 6))
        taken.append(whole.take())
    assert sum(len(range(*rows.indices(count))) for epoch, rows in taken if epoch == 0) == count
    assert whole.epochs_done == pytest.approx(whole.total_steps / (whole.total_steps / epochs), abs=0.5)


def test_schedules_of_generations_go_on_with_other_sizes():
    """At the step of the checkpoint a generation begins, or goes on where it was."""
    train = grpo_config(steps_per_generation=4, gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2.0)
    whole = MicroBatchSchedule(train, "rows", 16)
    assert whole.total_steps == 8 and whole.within_generation(3)
    again = MicroBatchSchedule(train, "rows", 16, Start(3, whole.epochs_done(3), 0))
    assert not again.within_generation(3) and again.within_generation(4) and again.total_steps == 8
    assert again.epochs_done(3) == whole.epochs_done(3) and again.epochs_done(8) == 2.0
    goes_on = MicroBatchSchedule(train, "rows", 16, Start(3, whole.epochs_done(3), 2))
    assert [each.index for each in goes_on.micro_steps(3)] == [2, 3] and not goes_on.within_generation(4)
    # After the first epoch it is as ever.
    assert [goes_on.micro_steps(step) for step in (6, 7)] == [whole.micro_steps(step) for step in (0, 1)]
