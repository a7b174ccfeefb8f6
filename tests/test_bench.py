"""The benches that run without a GPU can be started, whatever has been renamed in the package since they last ran."""

import argparse
import importlib
import importlib.util
import json
import pathlib
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rlnumba import SFTConfig, SFTTrainer
from rlnumba.cli.run_files import parse_overrides
from rlnumba.config import load_run
from rlnumba.environments.formats import detect_format
from rlnumba.environments.schema import tool_schema
from rlnumba.environments.turns import check_turns
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.runs.planning.plan import Plan

ROOT = pathlib.Path(__file__).parent.parent
BENCH = ROOT / "bench"
NAMES = sorted(path.stem for path in BENCH.glob("*.py") if "import cupy" not in path.read_text())
# The timers need CuPy.
NAMES.remove("decode_step")


@pytest.fixture
def imported(monkeypatch):
    """importlib.import_module for modules of bench/, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for added in set(sys.modules) - before:
        if pathlib.Path(getattr(sys.modules[added], "__file__", None) or "").parent == BENCH:
            del sys.modules[added]


@pytest.mark.parametrize("name", NAMES)
def test_a_bench_can_be_imported(imported, name):
    assert imported(name).__file__ == str(BENCH / f"{name}.py")


def test_every_file_with_gpu_tests_is_in_one_part(imported):
    files = imported("gpu_tests").files_of_parts()
    listed = [path for paths in files.values() for path in paths]
    tests = pathlib.Path(__file__).parent
    assert all(files.values()) and len(listed) == len(set(listed))
    marked = {path for path in tests.rglob("test_*.py") if ".".join(("mark", "gpu")) in path.read_text()}
    assert set(listed) == marked


REPORT = """<testsuites><testsuite>
<testcase classname="tests.kernels.test_x" name="test_a[1]" time="1"/>
<testcase classname="tests.kernels.test_x" name="test_b" time="1"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.kernels.test_x" name="test_c" time="1"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


def test_the_page_of_gpu_tests_names_failures_and_missing_parts(imported, tmp_path):
    gpu_tests = imported("gpu_tests")
    (tmp_path / "r.xml").write_text(REPORT)
    passed, skipped, failed = gpu_tests.results_of(tmp_path / "r.xml")
    name = "tests/kernels/test_x.py::test_b"
    assert (passed, skipped, failed) == (1, 1, {name: ["assert 1 == 2"]})
    result = {"gpu": "1 x G, driver 5", "date": "2030-01-01", "seconds": 7, "ended": True, "commit": "abc1233"}
    result |= {"passed": passed, "skipped": skipped, "failed": failed}
    page = gpu_tests.page_of({"kernels": result, "engine": result | {"ended": False, "failed": {}}}, "abc1234")
    assert "Commit abc1234, 2030-01-01: 2 passed, 1 failed, 2 skipped." in page
    assert f"- `{name}`: assert 1 == 2" in page and "Parts without a result: attention, gemm, families, engine" in page
    assert "| kernels | 1 passed, 1 failed, 1 skipped | 7 s | abc1233 | 1 x G, driver 5 |" in page


def test_results_of_other_sources_are_refused(imported, tmp_path):
    gpu_tests = imported("gpu_tests")
    (tmp_path / "kernels.json").write_text(json.dumps({"sources": "0"}))
    with pytest.raises(SystemExit, match="of other sources"):
        gpu_tests.write_page(tmp_path, "abc1234")


def test_a_part_stands_for_the_modules_that_its_tests_import(imported, monkeypatch, tmp_path):
    gpu_tests = imported("gpu_tests")
    sources = {
        "tests/test_x.py": "from rlnumba.a import (\n    b,  # d\n    f as g,\n)\n",
        "rlnumba/a/__init__.py": "",
        "rlnumba/a/b.py": "def f():\n    import_module('rlnumba.a.c')\n",
        "rlnumba/a/c.py": "import rlnumba.e\n",
        "rlnumba/a/d.py": "",
        "rlnumba/e.py": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    files = [tmp_path / "tests" / "test_x.py"]
    reached = {path.relative_to(tmp_path).as_posix() for path in gpu_tests.reached_files(files)}
    assert reached == {*sources} - {"rlnumba/a/d.py"}
    digests = [gpu_tests.sources_digest(files)]
    for name in ("rlnumba/a/d.py", "rlnumba/e.py"):
        (tmp_path / name).write_text("x = 1\n")
        gpu_tests.imported_files.cache_clear()
        digests.append(gpu_tests.sources_digest(files))
    assert digests[0] == digests[1] != digests[2]


def test_fsdp2_without_torch_is_one_row_that_says_so(monkeypatch, capsys, imported):
    train_fsdp2 = imported("train_fsdp2")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found("json"))
    assert train_fsdp2.print_rows(argparse.Namespace()) == {}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and "not run: torch not installed" in lines[0]


def write_learning(path, rewards, seconds):
    """A file of bench/learning.py of these rewards, a step every so many seconds."""
    about = {"library": "rlnumba", "version": "", "seed": 0, "cold": False, "gpus": path.stem}
    steps = [{"step": i + 1, "reward": each, "seconds": seconds * (i + 1)} for i, each in enumerate(rewards)]
    path.write_text("".join(json.dumps(line) + "\n" for line in (about, *steps)))
    return path


def test_learning_says_when_a_run_reaches_the_reward_of_another_ones_end(tmp_path, capsys, imported):
    learning = imported("learning")
    rising = [step / 20 for step in range(21)]
    slow = write_learning(tmp_path / "2.jsonl", rising, 1.0)
    fast = write_learning(tmp_path / "1+1.jsonl", [0.0, *rising, 1.0], 0.5)
    # The last ten of `slow` are 0.55 ... 1.0. `fast` has them a step later, and its last ten are 0.6 ... 1.0, 1.0.
    assert learning.trailing_mean(learning.read(slow)[2])[[0, 1, -1]].tolist() == pytest.approx([0, 0.025, 0.775])
    learning.print_comparison({"2": [slow], "1+1": [fast]})
    rows = capsys.readouterr().out.splitlines()
    assert "end after 21.0 s" in rows[0] and "end after 11.5 s" in rows[1]
    assert "reward 0.775, 100%" in rows[2] and "2 after 21.0 s; 1+1 after 11.0 s" in rows[2]
    # 90 % of it, 0.6975: a step before that, the mean is 0.725.
    assert "2 after 20.0 s; 1+1 after 10.5 s" in rows[3]
    assert len(learning.picture([slow, fast]).axes) == 2
    write_learning(fast, [0.0] * 20, 0.5)
    learning.print_comparison({"2": [slow], "1+1": [fast]})
    assert "1+1 never" in capsys.readouterr().out


def test_learning_refuses_gpus_that_are_no_numbers(imported):
    learning = imported("learning")
    assert [learning.gpus_given(text) for text in ("2", "1+1")] == ["2", "1+1"]
    for text in ("0", "1+", "1+1+1", "two"):
        with pytest.raises(argparse.ArgumentTypeError):
            learning.gpus_given(text)
    keys = learning.on_gpus("2+3", 128, 2)
    assert keys["per_device_train_batch_size"] == 64 and keys["asynchronous"] == {"max_staleness": 2}
    keys = learning.on_gpus("2", 128, 2)
    assert keys["per_device_train_batch_size"] == 64 and "asynchronous" not in keys


def learning_jobs(learning_runs, folder):
    """The Jobs of all parts of bench/learning_runs.py, with few steps."""
    given = ["--model", str(ROOT / "examples" / "tools" / "model"), "--output", str(folder), "--steps", "7"]
    (folder / "gsm8k-sft" / "checkpoints" / "step-20").mkdir(parents=True)
    (folder / "gsm8k-sft" / "checkpoints" / "step-100").mkdir()
    jobs = learning_runs.adapter_jobs(learning_runs.parse(["adapters", *given, "--types", "int4", "--seeds", "3", "4"]))
    jobs += learning_runs.distill_jobs(learning_runs.parse(["distill", *given]))
    options = ["--data", str(folder), "--batch", "48", "--seeds", "3", "4", "5", "--gpus", "0", "2"]
    arguments = learning_runs.parse(["gsm8k", *given, *options])
    return jobs + learning_runs.sft_jobs(arguments, 1.0) + learning_runs.grpo_jobs(arguments, 2.0)


def test_runs_of_the_learning_curves_are_runs_of_rlnumba(imported, tmp_path):
    learning_runs = imported("learning_runs")
    runs, gpus = {}, {}
    for job in learning_jobs(learning_runs, tmp_path):
        gpus[job.name] = job.gpu
        options = parse_overrides(job.arguments()[3:])
        if job.command == "eval":
            options = [(name, text) for name, text in options if name not in ("trainer", "output", "dtype")]
        runs[job.name] = load_run("grpo" if job.command == "eval" else job.command, job.config, options)
    assert list(runs)[:4] == ["adapter-bf16-3", "adapter-int4-3", "adapter-bf16-4", "adapter-int4-4"]
    bf16, int4 = runs["adapter-bf16-4"], runs["adapter-int4-4"]
    assert bf16 == replace(int4, quantization=None, output_dir=bf16.output_dir) and int4.quantization.bits == 4
    assert bf16.lora.r == 16 and bf16.seed == 4 and bf16.train.max_steps == 7
    # Distillation has GRPO's batches, and its model as the teacher.
    grpo, distill, own = (runs[f"arithmetic-{name}"] for name in ("grpo", "distill", "self-ema"))
    assert distill.teacher.model == f"{grpo.output_dir}/final" and own.train.sync_ref_model
    assert grpo.train.per_device_train_batch_size == distill.train.per_device_train_batch_size == 128
    # Both phases of GSM8K have the same prompts; the checkpoints of the first are evaluated but for the last.
    sft, grpo = runs["gsm8k-sft"], runs["gsm8k-grpo-4"]
    assert sft.data.prompt_template == grpo.data.prompt_template and grpo.model == f"{sft.output_dir}/final"
    assert grpo.train.per_device_train_batch_size * grpo.train.gradient_accumulation_steps == 48
    assert runs["gsm8k-eval-20"].model.endswith("step-20") and "gsm8k-eval-100" not in runs
    # Its seeds take turns at the GPUs.
    assert [runs[f"gsm8k-grpo-{seed}"].seed for seed in (3, 4, 5)] == [3, 4, 5]
    assert [gpus[f"gsm8k-grpo-{seed}"] for seed in (3, 4, 5)] == [0, 2, 0] and gpus["adapter-bf16-3"] is None


def test_a_learning_run_sees_its_gpu_alone(imported, tmp_path, monkeypatch):
    learning_runs = imported("learning_runs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    seen = []
    monkeypatch.setattr(learning_runs.subprocess, "Popen", lambda command, env, **_: seen.append(env))
    for job in learning_jobs(learning_runs, tmp_path):
        if job.name in ("adapter-bf16-3", "gsm8k-grpo-4"):
            learning_runs.start(job, tmp_path)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in seen] == ["0,2", "2"]


def test_learning_runs_wait_for_one_another_and_end_in_time(imported, tmp_path, monkeypatch, capsys):
    learning_runs = imported("learning_runs")
    monkeypatch.setattr(learning_runs, "GRACE_S", 0.0)
    started = []

    def start(job, folder):
        started.append(job.name)
        (folder / f"{job.name}.log").write_text("the last line\n")
        return subprocess.Popen(["sh", "-c", job.command], cwd=folder)

    def job(name, command, after=None, until=float("inf")):
        return learning_runs.Job(name, command, pathlib.Path(), {}, after, until, f"{name}.done")

    monkeypatch.setattr(learning_runs, "start", start)
    (tmp_path / "old.done").touch()
    jobs = [job("b", "cat a.done > b.done", "a"), job("a", "sleep 0.2; echo > a.done"), job("old", "false")]
    jobs += [job("late", "exec sleep 60", until=time.monotonic() + 0.5), job("c", "false"), job("d", "true", "c")]
    jobs += [job("never", "true", until=0.0)]
    assert learning_runs.run_jobs(tmp_path, jobs, at_once=2) == {"a", "b", "old"}
    assert started == ["a", "late", "b", "c"]
    lines = capsys.readouterr().out.splitlines()
    assert {"d: not run", "never: not run"} <= set(lines) and any(
        "exit code 1: the last line" in line for line in lines
    )
    assert any(line.startswith("late: ") and "exit code -15" in line for line in lines)


def test_a_time_limit_ends_a_run_in_order(imported, tmp_path, monkeypatch):
    learning_runs = imported("learning_runs")
    rows = [{"prompt": "one", "completion": "two"}] * 4
    model = str(ROOT / "examples" / "quickstart" / "model")
    steps = []
    for until in (0.0, float("inf")):
        monkeypatch.setenv(learning_runs.UNTIL, str(until))
        args = SFTConfig(output_dir=str(tmp_path / str(until)), max_steps=3, save_strategy="no", eval_steps=3)
        trainer = SFTTrainer(model, args, rows, eval_dataset=rows, callbacks=[learning_runs.TimeLimit()])
        trainer.train()
        steps.append([(row["step"], "eval_loss" in row) for row in trainer.state.log_history])
        assert (tmp_path / str(until) / "final" / "model.safetensors").exists()
    assert steps == [[(1, True)], [(1, False), (2, False), (3, True)]]


def write_metrics(folder, name, values, **more):
    """FOLDER/name/metrics.jsonl of held-out accuracies, before the first step and after each one."""
    (folder / name).mkdir(parents=True)
    rows = [{"step": 0, "eval_reward": values[0]}]
    for step, value in enumerate(values[1:], start=1):
        rows.append({"step": step, "eval_reward": value, "reward": value, "num_tokens": 100.0 * step, **more})
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_curves_of_learning_runs(imported, tmp_path, capsys):
    curves, learning_runs = imported("learning_curves"), imported("learning_runs")
    apart = {"sampling/sampling_logp_difference/max": 0.0}
    for seed, (bf16, nf4, int4) in enumerate([(0.6, 0.62, 0.4), (0.65, 0.6, 0.42), (0.7, 0.7, 0.41)]):
        for form, end in (("bf16", bf16), ("nf4", nf4), ("int4", int4)):
            # Seed 2 of nf4 was cut off.
            values = [0.02, 0.3, end] if (form, seed) != ("nf4", 2) else [0.02, end]
            write_metrics(tmp_path, f"adapter-{form}-{seed}", values, **apart)
    write_metrics(tmp_path, "arithmetic-grpo", [0.0, 0.2, 0.5, 0.6])
    write_metrics(tmp_path, "arithmetic-self", [0.0, 0.55, 0.58])
    write_metrics(tmp_path, "gsm8k-grpo-0", [0.04, 0.05], step_time=1.0)
    write_metrics(tmp_path, "gsm8k-grpo-1", [0.04, 0.07, 0.06], step_time=1.0)
    (tmp_path / "gsm8k-sft").mkdir()
    sft = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)]
    (tmp_path / "gsm8k-sft" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sft))
    (tmp_path / "gsm8k-eval-0").mkdir()
    (tmp_path / "gsm8k-eval-0" / "metrics.json").write_text('{"eval_reward": 0.01}')
    (tmp_path / "gsm8k-test.jsonl").write_text('{"question": "", "answer": ""}\n')
    kept = tmp_path / "kept"
    learning_runs.main(learning_runs.parse(["draw", str(tmp_path), "--keep", str(kept)]))
    found = capsys.readouterr().out
    assert len(list(tmp_path.glob("learning_*.png"))) == 3
    assert (
        "0.020 ± 0.000 (3 seeds) to 0.650 ± 0.050 (3 seeds); steps 2; rollout and training differ by at most 0 nats"
        in found
    )
    lines = {line.split(" | ")[0]: line for line in found.splitlines()}
    # -0.01 with a standard error of sqrt(0.0025 + 0.0028) / sqrt(3); -0.24, of sqrt(0.0025 + 0.0001) / sqrt(3).
    assert "-0.010 ± 0.042 (standard error); within" in lines["| accuracy on nf4 less that on bf16"]
    assert "-0.240 ± 0.029 (standard error); beyond" in lines["| accuracy on int4 less that on bf16"]
    assert "90% of GRPO's after 100.0 tokens; 100% of GRPO's never" in lines["| its own teacher, as it was"]
    assert "0: 0.0100, 3: 0.0400" in lines["| GSM8K, supervised: steps and accuracy"]
    assert "0.0400 to 0.0600 after 2 steps, at most 0.0700" in lines["| GSM8K, GRPO, seed 1"]
    assert "0.055 ± 0.007 (2 seeds)" in lines["| GSM8K, GRPO, after the last step"]
    # What is kept says the same.
    learning_runs.main(learning_runs.parse(["draw", str(kept)]))
    assert capsys.readouterr().out.replace(str(kept), f"{tmp_path} --keep {kept}") == found
    assert not list(kept.glob("gsm8k-test*")) and set(curves.pictures(kept)) == {p.stem for p in kept.glob("*.png")}


def test_demonstrations_have_the_solution(imported):
    row = {"prompt": [{"role": "user", "content": "What is 9 + 4? Answer with the number."}], "answer": 13}
    shown = imported("learning_runs").with_demonstration(row)["shown"]
    assert [message["content"] for message in shown][1:4:2] == ["9", "20"]
    assert shown[2]["content"] == "31 - 11 = 20. What is 31 - 11? Answer with the number."
    assert shown[4]["content"] == "9 + 4 = 13. What is 9 + 4? Answer with the number."


def test_a_run_that_takes_turns_takes_what_is_free_before_what_is_lent(imported):
    planned_range, mib = imported("auto_memory").planned_range, 1 << 20
    regions, extra = {"weights": 1000 * mib, "activations": 3000 * mib, "kv": 9000 * mib}, {"operators": 500 * mib}

    def planned(available, takes_turns=True):
        plan = Plan(regions, {}, 1, extra, 0, 0, takes_turns)
        return [size // mib for size in planned_range(plan, available * mib)]

    # All of both; both, with a smaller cache; all but the driver's margin; training alone.
    assert planned(20_000) == [10_000, 13_500]
    assert planned(10_000) == [9488, 10_000 - 256]
    assert planned(4600) == [4500, 4500]
    assert planned(10_000, takes_turns=False) == [13_500] * 2


def test_random_runs_that_choose_their_activations(tmp_path, monkeypatch, capsys, imported):
    auto_memory = imported("auto_memory")
    runs = [auto_memory.drawn(0, index, auto_memory.ON_GPU) for index in range(30)]
    assert runs == [auto_memory.drawn(0, index, auto_memory.ON_GPU) for index in range(30)]
    assert runs != [auto_memory.drawn(1, index, auto_memory.ON_GPU) for index in range(30)]
    assert {chosen.shape for chosen in runs} == set(auto_memory.ON_GPU)
    assert len({chosen.train["optim"] for chosen in runs}) == 3 and len({repr(chosen.lora) for chosen in runs}) > 2
    assert {"optimizer_in_backward", "offload_optimizer", "master_weights"} <= {key for c in runs for key in c.train}
    monkeypatch.setattr(auto_memory, "STEPS", 1)
    with monkeypatch.context() as patched:
        for name in ("write_rows", "write_prompts"):
            patched.setattr(auto_memory, name, lambda *arguments: None)
        for chosen in runs:
            auto_memory.run_of(chosen, tmp_path / chosen.shape, tmp_path)
    monkeypatch.setattr(sys, "argv", ["auto_memory.py", "--device", "cpu", "--runs", "2"])
    with pytest.raises(SystemExit) as end:
        auto_memory.main()
    out = capsys.readouterr().out.splitlines()
    assert not end.value.code and [line[4:8] for line in out[1:3]] == ["sft ", "grpo"]
    assert "0 ended with an error; taken / planned 1.00" in out[-1] and out[-1].startswith("| 2 random runs")


def test_the_table_of_the_course_says_what_each_step_gained(imported):
    course = imported("kernel_course")
    results = [
        course.Result("gemm_1_threads", 4e6, 2e3, 32, "One."),
        course.Result("gemm_2_shared", 1e6, 1e3, 31, "Two."),
    ]
    lines = course.table("cuBLAS", 2e12, results).splitlines()
    assert lines[2:] == [
        "| [gemm_1_threads](../../examples/kernels/gemm_1_threads.py) | 0.5 | 0.1 % | 32 |  | One. |",
        "| [gemm_2_shared](../../examples/kernels/gemm_2_shared.py) | 2.0 | 0.1 % | 31 | 4.0 | Two. |",
        "| cuBLAS | 2000.0 | | | | |",
    ]
    names = [module.__name__.split(".")[-1] for kind in ("gemm", "attention") for module in course.steps(kind)]
    assert names[0] == "gemm_1_threads" and names[-1].startswith("attention_3")


def test_the_curve_of_the_calculator(imported, tmp_path, capsys):
    """Its runs are made, train, and are drawn: a step of each, by a model that has never seen the task."""
    tool_curve, tools = imported("tool_curve"), ROOT / "examples" / "tools"
    options = ["--steps", "1", "--sft-steps", "1", "--completions", "8", "--eval-rows", "4", "--no-template"]
    tool_curve.main(tool_curve.parse(["--model", str(tools / "model"), "--output", str(tmp_path), *options]))
    assert set(tool_curve.curves(tmp_path)) == {"with the calculator", "without a tool"}
    assert (tmp_path / "tool_curve.png").stat().st_size > 10_000
    assert "with the calculator: held-out accuracy 0.000 -> 0.000" in capsys.readouterr().out


def test_the_template_of_the_calculator_shows_tools(imported, tmp_path):
    example = imported("tool_curve").load_example()
    example.write_model(ROOT / "tests" / "golden" / "tokenizer", tmp_path)
    tokenizer, schemas = Tokenizer.from_folder(tmp_path), [tool_schema(example.calculate)]
    assert detect_format(tokenizer, schemas).name == "hermes"
    check_turns(tokenizer, schemas=schemas)
    row = example.supervised("12*34-567", calls=True)["messages"]
    text = tokenizer.apply_chat_template(row, tools=schemas, tokenize=False)
    assert '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12*34-567"}}\n</tool_call>' in text
    assert example.calculate(" -(2+3)*4//3 ") == "-7"
    for wrong in ("2**9", "f(1)", "1.5", "1" * 101):
        with pytest.raises(ValueError):
            example.calculate(wrong)
