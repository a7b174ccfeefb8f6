"""Sequence-level distillation: a teacher draws the completions that the model does not, in the run itself."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from rlnumba.config import AsyncConfig, DeployConfig, EngineConfig
from rlnumba.config.keys import without_effect
from rlnumba.engine.llm import LLM
from rlnumba.errors import ConfigError
from rlnumba.model.config import ModelConfig
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Transformer, load_model, save_model
from rlnumba.model.weights import ROLLOUT_REGION, Weights
from rlnumba.parallel import launch
from rlnumba.runs.planning.plan import Planner
from rlnumba.runs.prompt_run import generation_params
from rlnumba.runtime import memory
from rlnumba.sampling.samples import derived_seed
from rlnumba.trainers.distill import run_distill
from tests.parallel import in_threads
from tests.trainers.runs import MODEL, distill_run, metrics_of, on_two_ranks, with_column
from tests.trainers.test_distill import completions_of, with_demonstrations
from tests.trainers.test_resume import hash_of
from tests.trainers.test_teacher import write_teacher


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a teacher."""
    return write_teacher(tmp_path_factory.mktemp("teacher") / "model", 0, 0.06)


def drawn_by(folder, run, prompts):
    """The texts of the completions that a model draws of texts in the first generation of a run, as its teacher."""
    tokenizer = Tokenizer.from_folder(MODEL)
    params = generation_params(run.train, derived_seed(run.seed, 0, 0, 4))
    outputs = LLM(load_model(folder), tokenizer).generate([tokenizer.encode(text) for text in prompts], params)
    return [completion.text for output in outputs for completion in output.completions]


def of_teacher(rows):
    return [row for row in rows if row["finish_reason"] == "teacher"]


def test_the_teacher_draws_what_the_model_does_not(tmp_path, teacher):
    """From prompts alone; the others are those of a run in which the model draws all."""
    settings = {"max_steps": 1, "num_prompts": 32, "per_device_train_batch_size": 16, "reward": "digits"}
    whole = distill_run(tmp_path / "whole", {"model": teacher}, **settings)
    run = distill_run(tmp_path / "mixed", {"model": teacher}, lmbda=0.5, seq_kd=True, **settings)
    for each in (whole, run):
        run_distill(each)
    expected, found = completions_of(whole), completions_of(run)
    taught = of_teacher(found)
    assert 8 <= len(taught) <= 24
    assert [row["completion"] for row in taught] == drawn_by(teacher, run, [row["prompt"] for row in taught])
    for own, other in zip(found, expected, strict=True):
        assert own["prompt"] == other["prompt"]
        if own["finish_reason"] == "teacher":
            assert own["reward"] is None and own["completion"] != other["completion"]
        else:
            assert own == other | {"advantage": own["advantage"]}
    (row,) = metrics_of(run)
    assert row["completions/teacher_frac"] == len(taught) / 32 and "completions/given_frac" not in row
    lengths = metrics_of(whole)[0]["completions/mean_length"], row["completions/mean_length"]
    assert lengths[0] != lengths[1] and hash_of(run) != hash_of(whole)


def test_a_run_goes_on_and_two_ranks_have_its_weights(tmp_path, teacher):
    """With a generation for four steps, two teachers and two completions of a prompt."""
    settings = {"save_steps": 3, "max_steps": 6, "lmbda": 0.3, "num_generations": 2, "num_iterations": 2}
    settings |= {"global_batch_size": 8, "per_device_train_batch_size": 4, "generation_batch_size": 16}
    settings["gradient_accumulation_steps"] = 1
    run = distill_run(tmp_path / "run", {"models": {"a": teacher, "b": str(MODEL)}}, seq_kd=True, **settings)
    run = with_column(run, "teacher", lambda row: "ab"[int(row["answer"]) % 2])
    run_distill(run)
    rows, expected = completions_of(run), hash_of(run)
    taught = of_teacher(rows)
    assert 0 < len(taught) < len(rows)
    # The two completions of a prompt, and those of another generation, are others.
    assert len({row["completion"] for row in taught}) > 0.9 * len(taught)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    run_distill(run, resume=True)
    assert hash_of(run) == expected
    both = on_two_ranks(run, tmp_path / "two")
    in_threads.run(lambda communicator: run_distill(both.resolved(), communicator=communicator), 2)
    assert hash_of(both) == expected


def test_the_model_as_its_own_teacher_sees_its_own_prompt(tmp_path):
    run = distill_run(tmp_path / "run", {"prompt_column": "shown"}, lmbda=0.0, seq_kd=True, max_steps=1)
    run = with_demonstrations(run)
    run_distill(run)
    rows = completions_of(run)
    assert len(of_teacher(rows)) == len(rows)
    assert [row["completion"] for row in rows] == drawn_by(MODEL, run, [f"7777777 {row['prompt']}" for row in rows])


def test_a_completion_fits_behind_the_prompt_of_the_model(tmp_path):
    """The teacher's own prompt is shorter, but the model has room for few tokens."""
    tokenizer = Tokenizer.from_folder(MODEL)
    limit = len(tokenizer.encode("what is the number 10? ")) + 2
    run = distill_run(tmp_path / "run", {"prompt_column": "shown"}, lmbda=0.0, seq_kd=True, max_steps=1)
    run = with_column(run, "shown", lambda row: "7")
    run = replace(run, engine=EngineConfig(max_model_len=limit))
    run_distill(run)
    rows = completions_of(run)
    lengths = [len(tokenizer.encode(row["prompt"])) + len(tokenizer.encode(row["completion"])) for row in rows]
    assert max(lengths) == limit


def test_a_moving_teacher_draws_with_its_weights_of_now(tmp_path):
    """A run whose teacher moves goes on with the same bits, also in parts; its second generation is not that of one
    that stays."""
    moves = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0, "learning_rate": 0.02}
    settings = {"lmbda": 0.0, "seq_kd": True, "max_steps": 2, "save_steps": 1, "learning_rate": 0.02}
    settings |= {"global_batch_size": 16, "gradient_accumulation_steps": 1}
    texts = []
    for name, keys in (("stays", {}), ("moves", moves)):
        run = with_demonstrations(distill_run(tmp_path / name, {"prompt_column": "shown"}, **settings | keys))
        run_distill(run)
        texts.append([[row["completion"] for row in completions_of(run) if row["step"] == step] for step in (1, 2)])
    assert texts[0][0] == texts[1][0] and texts[0][1] != texts[1][1]
    expected = hash_of(run)
    shutil.rmtree(tmp_path / "moves" / "checkpoints" / "step-2")
    run_distill(run, resume=True)
    assert hash_of(run) == expected
    parts = on_two_ranks(replace(run, deploy=DeployConfig(zero_stage=3)), tmp_path / "parts")
    in_threads.run(lambda communicator: run_distill(parts.resolved(), communicator=communicator), 2)
    assert hash_of(parts) == expected


def test_a_teacher_with_more_rows_in_its_head(tmp_path):
    """Ids that the model has not are not drawn."""
    config = ModelConfig.from_folder(MODEL)
    config = replace(config, vocab_size=config.vocab_size + 900)
    model = Transformer(config, Weights(config, "float32"))
    model.weights.flat[...] = 0.05 * np.random.default_rng(0).standard_normal(model.weights.flat.shape)
    save_model(model, tmp_path / "wide", Tokenizer.from_folder(MODEL))
    wide = str(tmp_path / "wide")
    run = distill_run(tmp_path / "run", {"model": wide}, lmbda=0.0, seq_kd=True, max_steps=1)
    run_distill(run)
    assert len(of_teacher(completions_of(run))) == len(completions_of(run))


def test_inference_processes_draw_for_the_model_alone(tmp_path, teacher):
    """Without staleness the weights are those of a run without [async], also from a checkpoint."""
    settings = {"lmbda": 0.5, "seq_kd": True, "max_steps": 3, "save_steps": 2}
    run = distill_run(tmp_path / "run", {"model": teacher}, num_prompts=32, **settings)
    run_distill(run)
    beside = {"asynchronous": AsyncConfig(max_staleness=0), "deploy": DeployConfig(num_infer_gpus=1)}
    other = replace(run, output_dir=str(tmp_path / "async"), **beside)
    run_distill(other)
    assert hash_of(other) == hash_of(run)
    ahead = replace(other, output_dir=str(tmp_path / "ahead"), asynchronous=AsyncConfig(max_staleness=1))
    run_distill(ahead)
    shutil.rmtree(tmp_path / "ahead" / "checkpoints" / "step-3")
    run_distill(ahead, resume=True)
    texts = [row["completion"] for row in of_teacher(completions_of(ahead))]
    assert texts and all(texts)


def gathered_bytes(communicator, run):
    """Bytes of the layers that this rank's engines have gathered in a run."""
    with memory.separate_report() as regions:
        run_distill(run.resolved(), communicator=communicator)
    return regions[ROLLOUT_REGION][1]


@pytest.mark.usefixtures("quick_starts")
def test_the_plan_has_what_a_teacher_in_parts_gathers(tmp_path, teacher):
    """Two teachers that draw, of which the first is larger, and the model itself for the report at the end."""
    settings = {"lmbda": 0.0, "seq_kd": True, "max_steps": 1, "global_batch_size": 8, "gradient_accumulation_steps": 1}
    run = distill_run(tmp_path / "run", {"models": {"a": teacher, "b": str(MODEL)}}, **settings)
    run = with_column(run, "teacher", lambda row: "ab"[int(row["answer"]) % 2])
    run = on_two_ranks(replace(run, deploy=DeployConfig(zero_stage=3)), tmp_path / "parts")
    planned = {on_gpu: Planner(run, on_gpu, 16 << 30).plan().regions[ROLLOUT_REGION] for on_gpu in (False, True)}
    assert launch(gathered_bytes, 2, run, timeout_s=120) == [planned[False]] * 2
    # A GPU has those of one engine at a time.
    assert planned[True] < planned[False]


def test_what_is_refused(tmp_path, teacher):
    def run(keys=None, **parts):
        made = distill_run(tmp_path / "run", {"model": teacher}, **{"lmbda": 0.5, "seq_kd": True} | (keys or {}))
        return replace(made, **parts)

    assert run({"num_generations": 2}).given_limit is None
    note = "train.seq_kd has no effect: it needs a number below 1 as train.lmbda"
    assert note in without_effect(run({"lmbda": 1.0})) and note not in without_effect(run())
    for parts, message in (
        ({"engine": EngineConfig(enable_sleep_mode=False)}, r"train\.seq_kd needs engine\.enable_sleep_mode"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(**parts)
    with pytest.raises(ConfigError, match=r"train\.seq_kd: with \[async\] .* set deploy\.num_infer_gpus"):
        run_distill(run(asynchronous=AsyncConfig()))
