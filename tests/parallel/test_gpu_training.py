"""Training on several GPUs, or on ranks that share some: the files of one rank's run, whatever their number."""

import dataclasses
import importlib
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from rlnumba.config import QuantizationConfig, to_toml
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import RankError
from rlnumba.kernels.nn import reduce
from rlnumba.model.transformer import load_model, save_model
from rlnumba.parallel import launch
from rlnumba.parallel.placement import RANKS_PER_GPU, gpus_of_ranks
from rlnumba.runs.ranks import train_on_ranks
from rlnumba.sampling import ranks
from tests.engine.test_llm import make_model
from tests.parallel import test_trainers, test_training
from tests.parallel.test_faults import train_with_error
from tests.parallel.test_trainers import LORA, train_each, written
from tests.trainers.runs import MODEL, SFT_ROWS

pytestmark = pytest.mark.gpu

# Five segments of the gradient's norm, of which two ranks have three and two, and four ranks two, two, one and none;
# heads, rows and columns that the kernels with tensor cores take.
SIZES = {
    "vocab_size": 1096, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def folder_of_model(folder, **options):
    """The folder, with a bfloat16 model and the tokenizer of another one, which has the first of its ids."""
    save_model(make_model("bfloat16", **SIZES, **options), folder)
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return folder_of_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return folder_of_model(tmp_path_factory.mktemp("teacher"), seed=1)


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """As many GPUs as there are, and ranks that share them where these are too few."""
    monkeypatch.setenv(RANKS_PER_GPU, "4")


def run_of(kind, folder, model, num_ranks=1, **options):
    """A Run of a few steps in bfloat16."""
    options = {"dtype": "bfloat16", "max_steps": 3, "save_steps": 2} | options
    if kind == "sft":
        return test_training.run_of(folder, num_ranks, model, **options)
    return dataclasses.replace(test_trainers.run_of(kind, folder, num_ranks, **options), model=str(model))


def train(kind, run, resume=False):
    """`written` of a run, which one rank trains in this process."""
    if run.num_ranks == 1:
        getattr(importlib.import_module(f"rlnumba.trainers.{kind}"), f"run_{kind}")(run, resume)
    else:
        train_on_ranks(run, resume)
    return written(run)


def base_in(name):
    """The options of an adapter, without dropout, on a base in a format."""
    return {"lora": dataclasses.replace(LORA, lora_dropout=0.0), "quantization": QuantizationConfig(type=name)}


CASES = {
    "sft": ("sft", {}, (2, 4)),
    "sft, lora": ("sft", {"lora": LORA}, (2,)),
    "sft, without graphs": ("sft", {"cuda_graphs": False, "optim": "adamw_8bit"}, (2,)),
    "sft, offload": (
        "sft",
        {
            "offload_optimizer": True,
            "optim": "adamw_bf16",
            "gradient_checkpointing": True,
            "eval_steps": 2,
            "data": {"eval": str(SFT_ROWS)},
        },
        (2,),
    ),
    "sft, zero 3": (
        "sft",
        {"zero_stage": 3, "gradient_checkpointing": True, "eval_steps": 2, "data": {"eval": str(SFT_ROWS)}},
        (2, 4),
    ),
    "dpo, zero 3": ("dpo", {"zero_stage": 3, "optim": "adamw_8bit"}, (2,)),
    "grpo, zero 3": ("grpo", {"zero_stage": 3, "num_iterations": 2, "beta": 0.1}, (2, 4)),
    "sft, zero 3, lora": ("sft", {"zero_stage": 3, "lora": LORA, "gradient_checkpointing": True}, (2,)),
    # Without dropout, with which there are no graphs anyway.
    "grpo, zero 3, lora": (
        "grpo",
        {"zero_stage": 3, "lora": dataclasses.replace(LORA, lora_dropout=0.0), "num_iterations": 2, "beta": 0.1},
        (2, 4),
    ),
    "sft, zero 3, int8": ("sft", {"zero_stage": 3, **base_in("int8"), "gradient_checkpointing": True}, (2,)),
    # A micro-batch less than ranks in the last round, and packed words that decode steps read.
    "dpo, zero 3, fp8": ("dpo", {"zero_stage": 3, **base_in("fp8")}, (2,)),
    "grpo, zero 3, nf4": ("grpo", {"zero_stage": 3, **base_in("nf4"), "num_iterations": 2, "beta": 0.1}, (2, 4)),
    # Every two ranks are one engine.
    "grpo, cut": ("grpo", {"num_iterations": 2, "beta": 0.1}, (2, 4)),
    "grpo, cut, lora": (
        "grpo",
        {"zero_stage": 3, "lora": dataclasses.replace(LORA, lora_dropout=0.0), "learning_rate": 1e-2},
        (2,),
    ),
    "grpo, cut, nf4": ("grpo", {**base_in("nf4"), "num_iterations": 2, "learning_rate": 1e-2}, (2, 4)),
    "grpo, cut, zero 3, int8": ("grpo", {"zero_stage": 3, **base_in("int8"), "learning_rate": 1e-2}, (2,)),
    "dpo": ("dpo", {}, (2,)),
    "grpo": ("grpo", {}, (2, 4)),
    "grpo, dynamic sampling": (
        "grpo",
        {"dynamic_sampling": True, "over_sampling_batch_size": 5, "reward": "one_for_even"},
        (2,),
    ),
    "distill, zero 3, several": ("distill", {"zero_stage": 3, "beta": 0.5, "learning_rate": 1e-4}, (2,)),
    "distill, zero 3, several, taught": (
        "distill",
        {"zero_stage": 3, "lmbda": 0.3, "seq_kd": True, "learning_rate": 1e-4},
        (2,),
    ),
    "ppo, zero 3": ("ppo", {"zero_stage": 3, "gradient_checkpointing": True}, (2, 4)),
    "ppo, zero 3, shared": ("ppo", {"zero_stage": 3, "critic": {"shared": True}, "learning_rate": 1e-4}, (2,)),
    "ppo, zero 3, lora": (
        "ppo",
        {"zero_stage": 3, "lora": dataclasses.replace(LORA, lora_dropout=0.0), "learning_rate": 1e-3},
        (2,),
    ),
    "ppo": ("ppo", {"use_score_scaling": True}, (2, 4)),
    "ppo, shared": ("ppo", {"critic": {"shared": True}, "top_k": 20}, (2,)),
    "grpo, lora": ("grpo", {"lora": dataclasses.replace(LORA, lora_dropout=0.0), "num_iterations": 2}, (2,)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_files_of_one_rank(tmp_path, model, teacher, case):
    kind, options, counts = CASES[case]
    if "several" in case:
        options = options | {"teacher": {"models": {"a": str(model), "b": str(teacher)}}}
    expected = train(kind, run_of(kind, tmp_path / "1", model, **options))
    assert len(expected[0]) >= 3 and len(expected[1]) >= 3
    for count in counts:
        size = {"tensor_parallel_size": 2} if ", cut" in case else {}
        found = train(kind, run_of(kind, tmp_path / str(count), model, count, **options, **size))
        for each, wanted in zip(found, expected, strict=True):
            assert each == wanted


def test_layers_that_are_folded_one_by_one(tmp_path, model):
    """As those of large models are."""
    runs = [("sft", run_of("sft", tmp_path / str(count), model, count)) for count in (1, 2)]
    expected = train(*runs[0])
    place = {"transport": "peer", "gpus": gpus_of_ranks(2, "test")}
    # A GPU's sums of squares take segments of whole blocks.
    options = {"fold_by_layer_bytes": 0, "segment": reduce.SEGMENT}
    launch(partial(train_each, **options), 2, runs[1:], timeout_s=300, **place)
    assert written(runs[1][1]) == expected


# So many that a rank with few takes over some of the other's, and of very different lengths.
PROMPTS = [[5 + i, 7, 9, 11] * (1 + 5 * i) for i in range(6)]
PARAMS = [SamplingParams(n=16, max_tokens=4 if i else 150, seed=3, ignore_eos=True) for i in range(6)]


def draw(communicator, folder):
    """(completions of all prompts, sequences that this rank has taken over in the middle of them)."""
    ranks.ROUND_S = 0.002
    together, taken = ranks.LedLLM(LLM(load_model(folder)), communicator), []
    own = together.own.engine
    move_in = own.move_in
    own.move_in = lambda sequences: (taken.extend(s for s in sequences if len(s.completion_ids)), move_in(sequences))
    outputs = together.led(lambda: together.llm.generate(PROMPTS, PARAMS))
    return [[(c.token_ids, c.logprobs) for c in output.completions] for output in outputs], len(taken)


def test_completions_of_one_rank(model):
    place = {"transport": "peer", "gpus": gpus_of_ranks(2, "test")}
    expected = LLM(load_model(model)).generate(PROMPTS, PARAMS)
    expected = [[(c.token_ids, c.logprobs) for c in output.completions] for output in expected]
    found = launch(draw, 2, str(model), timeout_s=300, **place)
    for completions, _ in found:
        assert completions == expected
    assert sum(taken for _, taken in found) > 0


@pytest.mark.parametrize("kind, counts", [("sft", (2, 1)), ("grpo", (1, 2))])
def test_a_killed_run_is_resumed_on_another_number(tmp_path, model, kind, counts):
    options = {"max_steps": 12, "save_steps": 3}
    expected = train(kind, run_of(kind, tmp_path / "whole", model, **options))
    run = run_of(kind, tmp_path / "ended", model, counts[0], **options)
    (tmp_path / "run.toml").write_text(to_toml(run))
    command = [sys.executable, "-m", "rlnumba", "--device", "cuda", kind, "--config", str(tmp_path / "run.toml")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 180
    while not list((tmp_path / "ended" / "checkpoints").glob("step-*")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    # Ranks end when the process that started them has gone.
    time.sleep(2)
    found = train(kind, run_of(kind, tmp_path / "ended", model, counts[1], **options), resume=True)
    assert found[0]["final/model.safetensors"] == expected[0]["final/model.safetensors"]


def test_an_error_of_one_rank_leaves_a_checkpoint_of_the_last_step(tmp_path, model):
    """Without graphs, which call no function that could raise it."""
    options = {"max_steps": 4, "save_steps": 100, "cuda_graphs": False}
    expected = train("sft", run_of("sft", tmp_path / "whole", model, **options))
    runs = [("sft", run_of("sft", tmp_path / "run", model, 2, **options))]
    place = {"transport": "peer", "gpus": gpus_of_ranks(2, "test")}
    function = partial(train_with_error, segment=reduce.SEGMENT)
    with pytest.raises(RankError, match="rank 1: internal error: MemoryError: 32 GiB"):
        launch(function, 2, 2, MemoryError("32 GiB"), runs, timeout_s=300, **place)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    found = train("sft", run_of("sft", tmp_path / "run", model, **options), resume=True)
    assert found[0]["final/model.safetensors"] == expected[0]["final/model.safetensors"]
