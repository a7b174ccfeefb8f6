"""bench/table.py: cells are measured once, those that do not fit do not run, the page says what is there."""

import argparse
import json
import shutil

import pytest

from rlnumba.data.prefix_tree import PrefixRule
from tests.test_bench import imported  # noqa: F401

OPTIONS = "--device cpu --dtype float32 --shapes tiny --prompts 16 --lengths 8 --gpus 1 --completions 16".split()


def fake_result(options):
    return {
        "seconds": {"step_time": [2.0, 1.0], "generate": [1.5, 0.5], "train": [0.25, 0.25]},
        "gib": 3.5,
        "difference": 0.0,
    }


@pytest.fixture
def table(imported, monkeypatch):  # noqa: F811
    """The module, whose cells are not measured but recorded in `taken`."""
    module, taken = imported("table"), []
    monkeypatch.setattr(module, "in_own_process", lambda function, folder, *rest: folder.mkdir())

    def measured(self, name, folder, seconds, *arguments):
        taken.append(name)
        if name == module.CEILINGS:
            return {"bytes_per_s": 2e12, "flop_per_s": 5e14}
        return {"failed": "once"} if taken.count(name) == 1 and "lora" in name else fake_result(self.options)

    monkeypatch.setattr(module.Table, "measured", measured)
    return module, taken


def test_cells_are_measured_once(table, tmp_path, capsys):
    module, taken = table
    assert module.main([str(tmp_path), *OPTIONS]) == 0
    assert sorted(taken) == ["tiny_all_16x16+8_1gpu", "tiny_lora_16x16+8_1gpu"]
    # The one that failed alone, and then none; in a folder of its own both, unless the other one is named, too.
    module.main([str(tmp_path), *OPTIONS])
    assert taken[2:] == ["tiny_lora_16x16+8_1gpu"]
    module.main([str(tmp_path), *OPTIONS])
    module.main([str(tmp_path / "other"), str(tmp_path), *OPTIONS])
    assert len(taken) == 3
    module.main([str(tmp_path), *OPTIONS, "--again", "--cells", "*_all_*"])
    assert taken[3:] == ["tiny_all_16x16+8_1gpu"]
    capsys.readouterr()
    module.main([str(tmp_path / "late"), *OPTIONS, "--budget", "5"])
    assert len(taken) == 4 and "2 cells are left" in capsys.readouterr().out


def test_cells_that_another_kind_of_gpu_has(table, tmp_path):
    module, taken = table
    cells = [str(tmp_path), *OPTIONS, "--dtype", "bfloat16", "--cells", "*_all_*", "--gpu-memory", "4", "--gpu-name"]
    module.main([*cells, "small GPU"])
    assert taken.pop() == "tiny_all_16x16+8_1gpu"
    module.main([*cells, "other GPU", "--anywhere"])
    assert taken.count("tiny_all_16x16+8_1gpu") == 0
    module.main([*cells, "other GPU"])
    assert taken.count("tiny_all_16x16+8_1gpu") == 1


def test_an_estimate_is_the_last_measured_step(table, imported, tmp_path):  # noqa: F811
    module, _ = table
    options = module.arguments_of([str(tmp_path), *OPTIONS, "--cells", "*_all_*"])
    module.main([str(tmp_path), *OPTIONS, "--cells", "*_all_*"])
    (cell,) = module.cells_of(options)
    measured = module.Table(options, module.Machine(options))
    # A warm-up and two steps of 1.5 s, the median of 2.0 and 1.0.
    assert measured.estimate_s(cell) == module.START_S + 3 * 1.5
    other = imported("table_cell").Cell.of(cell.name.replace("_all_", "_lora_"))
    assert measured.estimate_s(other) != measured.estimate_s(cell)


def test_what_does_not_fit_is_recorded_and_does_not_run(table, tmp_path, capsys):
    module, taken = table
    gpu = ["--gpu-memory", "4", "--gpu-name", "small GPU"]
    module.main([str(tmp_path), *OPTIONS, *gpu, "--dtype", "bfloat16"])
    assert taken == ["ceilings", "tiny_lora_16x16+8_1gpu", "tiny_all_16x16+8_1gpu"]
    gpu[1] = "1"
    module.main([str(tmp_path), *OPTIONS, *gpu, "--dtype", "bfloat16", "--again"])
    assert len(taken) == 3 and "tiny_all_16x16+8_1gpu: does not fit: 1.1 GiB" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[-1]["gpu_gib"] == 1 and 1 < lines[-1]["does_not_fit"] < 1.2


def test_the_page_has_all_results_and_what_is_missing(table, tmp_path):
    module, _ = table
    two = [*OPTIONS, "--gpus", "1", "2"]
    for folder in ("first", "second"):
        module.main([str(tmp_path / folder), *OPTIONS, "--cells", "*_all_*"])
    module.main([str(tmp_path / "first"), *OPTIONS, "--cells", "*_all_*", "--peer", "transformers"])
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    assert module.main([*folders, *two, "--page", "--page-folder", str(tmp_path)]) == 0
    page = (tmp_path / "table.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("| tiny, all, 16 x (16 + 8)"))
    cells = [each.strip() for each in line.split("|")]
    # Twice medians of 2.0 and 1.0; 16 x 8 tokens in 1.5 s.
    assert cells[2] == "1.500, 1.500" and cells[3].startswith("1.000, 1.000 (") and cells[5] == "0.250, 0.250"
    assert cells[6:9] == ["85", "3.5", "0"] and cells[10] == "transformers: 1.500 s, 1.0 times as long"
    assert "| 1 x cpu | 2 | 1 | 1 | 0 | 1 | 1 |" in page and "| 2 x cpu | 2 | 0 | 0 | 0 | 2 |  |" in page
    assert "On no machine, 3 of 4:\n\n- 1 GPU, 16 x (16 + 8): tiny lora\n- 2 GPUs, 16 x (16 + 8): all 2\n" in page
    assert "| cpu | 4,300 | 700 | not measured: an H200's |" in page
    assert (tmp_path / "table.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="no result of these cells"):
        module.main([str(tmp_path / "none"), *two, "--page", "--page-folder", str(tmp_path)])


def test_the_page_names_the_machine_of_each_figure_and_what_failed(table, imported, tmp_path):  # noqa: F811
    """Two kinds of GPU, of which one has a peer's step alone, and a cell that was measured after it had failed."""
    module, cells = table[0], ["tiny_all_16x16+8_1gpu", "tiny_lora_16x16+8_1gpu"]
    measured = fake_result(None) | {"keys": {"optim": "adamw_8bit"}, "activations": "activations: all are kept: 1 GiB"}

    def line(cell, gpu, kind="rlnumba", **found):
        about = {
            "cell": cell,
            "kind": kind,
            "gpu": gpu,
            "commit": "c",
            "date": found.pop("date", "2026-01-01T00:00:00"),
        }
        return json.dumps(about | found | {"command": "python bench/table.py x"}) + "\n"

    rates = {"bytes_per_s": 2e12, "flop_per_s": 5e14}
    lines = [
        line("ceilings", "big", "gpu", **rates),
        line(cells[0], "big", failed="no memory\n"),
        line(cells[0], "big", date="2026-01-02T00:00:00", **measured),
        line(cells[0], "small", does_not_fit=9.0, gpu_gib=8.0),
        line(cells[1], "small", "trl", note="trl: of a test", **fake_result(None)),
        line(cells[1], "big", failed="no memory\n"),
    ]
    for folder in ("first", "copied"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "results.jsonl").write_text("".join(lines))
    folders = [str(tmp_path / "first"), str(tmp_path / "copied")]
    assert module.main([*folders, *OPTIONS, "--page", "--page-folder", str(tmp_path)]) == 0
    page = (tmp_path / "table.md").read_text()
    big, small = page[page.index("## 1 x big") :].split("## 1 x small")
    assert "| tiny, all, 16 x (16 + 8) | 1.500 | 1.000 (" in big and "tiny, lora" not in big
    assert "| 0 | activations: all are kept; optim = adamw_8bit | not measured |" in big
    assert "| tiny, all, 16 x (16 + 8) | does not fit: 9.0 GiB of 8 |" in small
    assert "| tiny, lora, 16 x (16 + 8) | not measured |  |  |  |  |  |  |  | trl: 1.500 s |" in small
    assert "| big | 2,000 | 500 |  |" in page and "| small | 4,300 | 700 | not measured: an H200's |" in page
    assert "| 1 x big | 2 | 1 | 0 | 0 | 1 | 0 |" in page and "| 1 x small | 2 | 0 | 0 | 1 | 1 | 1 |" in page
    assert "On no machine, 1 of 2:\n\n- 1 GPU, 16 x (16 + 8): tiny lora\n" in page
    failed = page[page.index("Failed, and not measured since:") :].split("##")[0]
    assert failed.count("- `") == 1 and "- `tiny_lora_16x16+8_1gpu`, rlnumba, on big: no memory" in failed
    table_page = imported("table_page")
    figure = table_page.picture(
        module.cells_of(module.arguments_of([*folders, *OPTIONS])), list(map(json.loads, lines))
    )
    assert [each.get_text() for each in figure.axes[0].get_yticklabels()] == ["tiny_all_16x16+8_1gpu, big"]


def test_floors_of_a_step(imported):  # noqa: F811
    """By hand, for one decode step and for a training step of a model of attention."""
    cells, floor, shapes = (imported(name) for name in ("table_cell", "table_floor", "shapes"))
    keys = shapes.SHAPES["tiny"]
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"] * keys["head_dim"]
    kv = keys["num_key_value_heads"] * keys["head_dim"]
    layers = keys["num_hidden_layers"] * hidden * (2 * heads + 2 * kv + 3 * keys["intermediate_size"])
    head = hidden * keys["vocab_size"]
    work = floor.Work("tiny")
    assert (work.layers, work.head) == (layers, head)
    assert work.parameters == layers + head + hidden * (1 + 2 * keys["num_hidden_layers"])
    # 16 completions in two groups, of prompts of 32 tokens, and one decode step after the first token.
    cell = cells.Cell("tiny", "all", 16, 32, 2, 1)
    prompt = layers * 32 + keys["num_hidden_layers"] * heads * 32**2
    kv_bytes = 2 * 2 * kv * keys["num_hidden_layers"]
    read = 2 * (layers + head) + kv_bytes * (2 * 32 + 16)
    bound_by_bytes = floor.Rates(1e3, 1e18)
    assert floor.generation_s(cell, bound_by_bytes) == pytest.approx(read / 1e3)
    bound_by_flop = floor.Rates(1e18, 1e3)
    step = 16 * (layers + head + keys["num_hidden_layers"] * heads * (34**2 - 33**2))
    assert floor.generation_s(cell, bound_by_flop) == pytest.approx(2 * (2 * (prompt + head) + step) / 1e3)
    pairs = keys["num_hidden_layers"] * heads * (2 * 32**2 + 16 * (34**2 - 32**2))
    flop = 6 * (layers * (2 * 32 + 16 * 2) + head * 16 * 2) + 7 * pairs
    assert floor.training_s(cell, bound_by_flop) == pytest.approx(flop / 1e3)
    of_adapter = 4 * (flop - 7 * pairs) / 6 + 7 * pairs
    assert floor.training_s(cell._replace(tuned="lora"), bound_by_flop) == pytest.approx(of_adapter / 1e3)
    moved = work.parameters * (2 * 6 + 6)
    assert floor.training_s(cell, bound_by_bytes, "adamw_8bit") == pytest.approx(moved / 1e3)
    assert floor.training_s(cell._replace(gpus=2), bound_by_bytes) == pytest.approx(work.parameters * 30 / 2 / 1e3)


def test_a_cell_is_a_run_of_grpo(imported, tmp_path):  # noqa: F811
    module, cells = imported("table"), imported("table_cell")
    options = module.arguments_of([str(tmp_path), *OPTIONS, "--steps", "1"])
    cell = cells.Cell.of("tiny_all_16x16+8_1gpu")
    assert cell == cells.Cell("tiny", "all", 16, 16, 8, 1) and cell.name == "tiny_all_16x16+8_1gpu"
    imported("shapes").write_model(tmp_path / "model", "tiny", "cpu")
    for path in module.QUICKSTART.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    module.write_prompts(tmp_path / "prompts.jsonl", 2 * cell.groups, cell.prompt)
    found = cells.measure(cell, tmp_path, options, {"max_tokens_per_micro_batch": 128})
    assert found["difference"] == 0.0 and found["gib"] > 0
    assert {name: len(values) for name, values in found["seconds"].items()}.items() >= {
        "step_time": 1, "generate": 1, "train": 1
    }.items()  # fmt: skip
    assert not (tmp_path / "run" / "final").exists()
    assert isinstance(options, argparse.Namespace)
    # The same with a short first step: of the second one alone.
    shutil.rmtree(tmp_path / "run")
    found = cells.measure(cell, tmp_path, options, {"max_tokens_per_micro_batch": 128}, 4)
    assert found["difference"] == 0.0 and len(found["seconds"]["step_time"]) == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["completions/mean_length"] for row in rows] == [4, 8]


def test_micro_batches_are_equal_parts_of_a_step(imported):  # noqa: F811
    cells = imported("table_cell")
    of = [cells.Cell("qwen3-0.6b", "all", 64, 128, 512, gpus) for gpus in (1, 2)]
    # 8 groups of 8 completions of 640 tokens, of which a group has 112 once.
    assert [cells.equal_parts(cell, 40960, None) for cell in of] == [40960, 20480]
    assert [cells.equal_parts(cell, 40960, PrefixRule(16)) for cell in of] == [34688, 17344]
    # A group does not fit: as many tokens as there may be. Three parts of three groups at most.
    assert cells.equal_parts(of[0], 4096, PrefixRule(16)) == 4096
    assert cells.equal_parts(of[0], 13008, PrefixRule(16)) == 13008
    assert cells.equal_parts(of[1], 13008, PrefixRule(16)) == 2 * 4336


def test_long_steps_follow_a_short_one(table, imported, tmp_path, monkeypatch):  # noqa: F811
    module, _ = table
    cells, rates = imported("table_cell"), imported("table_floor").Rates()
    short, long = (cells.Cell("qwen3-0.6b", "all", 64, 128, 512, 1), cells.Cell("qwen3-8b", "all", 256, 128, 2048, 1))
    assert module.warmup_tokens_of(short, rates) is None and module.warmup_tokens_of(long, rates) == 64
    options = module.arguments_of([str(tmp_path), "--steps", "1"])
    assert module.estimate_s(long, options, rates) < module.START_S + 1.1 * module.step_s(long, rates)
    monkeypatch.setattr(module, "LONG_STEP_S", 0)
    assert module.main([str(tmp_path), *OPTIONS, "--cells", "*_all_*"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["warmup_tokens"] for line in lines] == [64]
    assert module.main([str(tmp_path), *OPTIONS, "--page", "--page-folder", str(tmp_path)]) == 0
    assert "after a step of 64 tokens" in (tmp_path / "table.md").read_text()


def test_kernels_of_a_training_step(imported):  # noqa: F811
    timeline = imported("training_timeline")
    step = [(0, 10_000, "gemm"), (5_000, 20_000, "norm"), (30_000, 40_000, "gemm")]
    assert timeline.busy_ms(step) == 0.03
    assert timeline.by_name([step, step, []]) == [("gemm", 2, 0.02), ("norm", 1, 0.015)]


def test_the_largest_kernels_of_a_step(imported):  # noqa: F811
    step = [(5.0, 4.0, "head"), *[(2.0, 1.0, "gemm"), (1.0, 3.0, "attention"), (0.5, 0.5, "norm")] * 3]
    found = imported("step_timeline").largest([step, step])
    assert found == [("gemm", 6.0), ("head", 5.0), ("attention", 3.0)]
