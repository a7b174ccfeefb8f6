"""The benches that run without a GPU can be started, whatever has been renamed in the package since they last ran."""

import argparse
import importlib
import importlib.util
import json
import pathlib
import sys

import pytest

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
