"""What a run writes: lines that are always JSON, files cut back at resume, pictures."""

import json
import os
import sys

import numpy as np
import pytest

from rlnumba.config import load_run
from rlnumba.errors import UserError
from rlnumba.reporting import files, metrics, plots
from rlnumba.reporting.files import cut_back, read_metrics, replacing
from rlnumba.reporting.metrics import MetricsWriter
from rlnumba.reporting.plots import plot, plot_apart, smooth
from rlnumba.runtime.environment import environment

pytestmark = pytest.mark.usefixtures("every_picture")


def completion(step, **more):
    return {"prompt": "p", "completion": f"c{step}", "finish_reason": "stop", "f": 1.0, "reward": 1.0, **more}


def test_a_full_disk_is_named(tmp_path):
    """Also where the line that does not fit is written again when the file is closed."""
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        with MetricsWriter(tmp_path, total_steps=3) as writer:
            writer.log(1, {"loss": 0.5})
            writer.flush()
            writer._metrics = open("/dev/full", "a")
            writer.log(2, {"loss": 0.25})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_a_full_disk_ends_a_run_at_one_of_its_next_steps(tmp_path):
    """Nothing is written after what could not be."""
    with MetricsWriter(tmp_path, total_steps=1000) as writer:
        kept, writer._metrics = writer._metrics, open("/dev/full", "a")
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            for step in range(1, 1000):
                writer.log(step, {"loss": 0.25})
        writer._metrics = kept
        writer.log(1000, {"loss": 0.25})
    assert read_metrics(tmp_path) == []


def test_every_line_is_json_and_a_step(tmp_path, capfd):
    with MetricsWriter(tmp_path, total_steps=3, logging_steps=2) as writer:
        writer.log(1, {"loss": np.float32(0.5), "kl": float("nan"), "count": np.int64(3), "inf": float("inf")})
        # A process that is killed now has lost nothing.
        writer.flush()
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
            "step": 1, "loss": 0.5, "kl": None, "count": 3, "inf": None,
        }  # fmt: skip
        writer.log(2, {"loss": 0.25})
        writer.log(3, {"loss": 0.125})
    assert [row["loss"] for row in read_metrics(tmp_path)] == [0.5, 0.25, 0.125]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 1/3", "loss 0.5"],
        ["step 2/3", "loss 0.25"],
        ["step 3/3", "loss 0.125"],
    ]


def test_the_step_is_the_runs_own(tmp_path, capfd):
    with MetricsWriter(tmp_path, total_steps=1) as writer:
        writer.completions(1, [completion(1) | {"step": 99}])
        writer.log(1, {"step": 99, "loss": 1.0})
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert json.loads((tmp_path / name).read_text())["step"] == 1


def test_a_picture_that_fails_does_not_hide_the_error_of_the_run(tmp_path, capfd):
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(UserError, match="the run's own"), MetricsWriter(tmp_path, total_steps=2) as writer:
        writer.log(1, {"loss": 1.0})
        raise UserError("the run's own")
    with pytest.raises(UserError, match="curves.png: cannot be written"), MetricsWriter(tmp_path, 2) as writer:
        writer.log(1, {"loss": 1.0})


def test_console_lines_every_logging_steps(tmp_path, capfd):
    with MetricsWriter(tmp_path, total_steps=7, logging_steps=3) as writer:
        for step in range(1, 8):
            writer.log(step, {"loss": step, "completions/mean_length": 2.0})
    shown = [line.split()[1] for line in capfd.readouterr().err.splitlines()]
    assert shown == ["1/7", "3/7", "6/7", "7/7"]


def test_resume_cuts_files_back(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    with MetricsWriter(tmp_path, total_steps=4, log_completions=True) as writer:
        for step in (1, 2, 3):
            writer.log(step, {"loss": 1.0 / step})
            writer.completions(step, [completion(step), completion(step)])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    with MetricsWriter(tmp_path, total_steps=4, start_step=2, log_completions=True) as writer:
        assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
        writer.log(3, {"loss": 9.0})
        writer.completions(3, [completion(3)])
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 9.0)]
    kept = [json.loads(line)["step"] for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert kept == [1, 1, 2, 2, 3]
    assert sorted(p.name for p in (tmp_path / "completions").iterdir()) == [
        f"completions_0000{step}.parquet" for step in (1, 2, 3)
    ]
    # A run that starts afresh keeps nothing of the one before.
    MetricsWriter(tmp_path, total_steps=4).close(draw=False)
    assert read_metrics(tmp_path) == [] and not (tmp_path / "completions.jsonl").read_text()
    assert not list((tmp_path / "completions").iterdir())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_tables_of_completions_that_a_resumed_run_keeps(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    with MetricsWriter(tmp_path, total_steps=3, log_completions=True) as writer:
        for step in (1, 2, 3):
            writer.completions(step, [completion(step)])
    folder = tmp_path / "completions"
    assert len(list(folder.iterdir())) == 3
    (folder / "completions_mine.parquet").write_text("")
    (folder / ".completions_00001.parquet.partial").write_text("killed")
    with MetricsWriter(tmp_path, total_steps=3, start_step=2):
        pass
    kept = ["completions_00001.parquet", "completions_00002.parquet", "completions_mine.parquet"]
    assert sorted(path.name for path in folder.iterdir()) == kept


def test_completions(tmp_path, capfd):
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "user", "content": "1+1?"}]
    rows = [completion(1, prompt=messages, advantage=0.5), completion(1, reward=float("nan"), advantage=-0.5)]
    with MetricsWriter(tmp_path, total_steps=1, log_completions=True, num_to_print=1) as writer:
        writer.completions(1, rows)
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 1, **rows[0]} and lines[1] == {"step": 1, **rows[1], "reward": None}
    table = parquet.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pylist()
    assert [row["advantage"] for row in table] == [0.5, -0.5] and json.loads(table[0]["prompt"]) == messages
    shown = capfd.readouterr().err
    assert shown == "--- step 1, f 1, reward 1, advantage 0.5\nuser: 1+1?\n>>> c1\n"


def test_whatever_rewards_log_is_written(tmp_path, capfd):
    parquet = pytest.importorskip("pyarrow.parquet")
    logged = [{"mixed": 1, "odd": {2}, "half": "\ud800"}, {"mixed": "a", "odd": None, "half": "b"}]
    with MetricsWriter(tmp_path, total_steps=1, log_completions=True) as writer:
        writer.completions(1, [completion(1, **more) for more in logged])
        writer.log(1, {"loss": 1.0})
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [[row[name] for name in logged[0]] for row in rows] == [[1, "{2}", "\ud800"], ["a", None, "b"]]
    table = parquet.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
    assert table["mixed"] == ["1", '"a"'] and table["odd"] == ["{2}", None] and table["half"] == ['"\\ud800"', '"b"']


@pytest.mark.parametrize("arguments", [{}, {"x": {}}, {"x": 10**30}])
def test_calls_of_any_arguments_are_written(tmp_path, arguments):
    """Such as those of a tool without any, for which Parquet has no type."""
    parquet = pytest.importorskip("pyarrow.parquet")
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    with MetricsWriter(tmp_path, total_steps=1, log_completions=True) as writer:
        writer.completions(1, [completion(1) | {"completion": turns}])
    table = parquet.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
    assert json.loads(table["completion"][0]) == turns


def test_a_failed_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write("new")
        1 / 0  # noqa: B018
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with replacing(path) as file:
        file.write("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    for bad in (tmp_path, path / "below", tmp_path / "no" / "folder"):
        with pytest.raises(UserError, match="cannot be written"), replacing(bad):
            pass
    with pytest.raises(UserError, match="/dev/full: cannot be written: No space left"), replacing("/dev/full") as file:
        file.write("new")


def test_a_line_is_one_for_every_reader():
    row = {"text": "a\u2028b\u2029c\x85d\n日本\x0b\x1c"}
    line = files.to_line(row)
    assert len(line.splitlines()) == 1 and "日本" in line and json.loads(line) == row


def test_numbers_that_are_not_finite_are_null_or_kept_at_any_depth():
    row = {"a": {"b": [1.0, float("inf")]}, "c": float("-inf"), "d": 3}
    with_numpy = {"a": {"b": np.array([1.0, np.inf])}, "c": np.float32(-np.inf), "d": np.int64(3)}
    for each in (row, with_numpy):
        assert json.loads(files.to_line(each)) == {"a": {"b": [1.0, None]}, "c": None, "d": 3}
        assert json.loads(files.to_line(each, keeps_nan=True)) == row


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run: cannot be written to: Not a directory"):
        files.make_folder(tmp_path / "file" / "run")


def test_config_toml_names_the_environment_and_reads_back(tmp_path):
    source = tmp_path / "run.toml"
    source.write_text(f'model = "m"\noutput_dir = "{tmp_path}/run"\n[data]\ntrain = "t.jsonl"\n')
    run = load_run("sft", source)
    files.write_config(run, environment())
    written = tmp_path / "run" / "config.toml"
    assert load_run("sft", written) == run
    header = [line for line in written.read_text().splitlines() if line.startswith("# ")]
    assert any(line.startswith("# numpy ") for line in header) and any(line.startswith("# device ") for line in header)


def test_smooth():
    values = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    np.testing.assert_array_equal(smooth(values, 1), values)
    np.testing.assert_allclose(smooth(values, 3), [1.5, 1.5, 3.0, 4.5, 4.5], rtol=0, atol=1e-12)


def test_plot(tmp_path):
    rng = np.random.default_rng(0)
    for name, slope in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "metrics.jsonl", "w") as file:
            for step in range(1, 41):
                reward = slope * step / 100 + 0.1 * rng.standard_normal()
                row = {"step": step, "reward": reward, "reward_std": 0.2, "loss": None if step == 7 else 0.1, "kl": 0.0}
                file.write(files.to_line({**row, "grad_norm": 1.0 / step, "entropy": 2.0}))
    plot([tmp_path / "a"], tmp_path / "one.png")
    plot([tmp_path / "a", tmp_path / "b"], tmp_path / "two.png")
    from matplotlib import image

    for name in ("one.png", "two.png"):
        picture = image.imread(tmp_path / name)
        assert picture.shape[0] > 300 and picture.shape[1] > 900 and picture.std() > 0.05
    assert not list(tmp_path.glob(".*"))


def test_runs_of_one_name_have_names_that_differ(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(plots, "_draw", lambda axis, runs, *arguments: found.append([name for name, _ in runs]))
    for parent in ("a", "b"):
        (tmp_path / parent / "run").mkdir(parents=True)
        (tmp_path / parent / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    plot([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "two.png")
    assert found == [["a/run", "b/run"]]


@pytest.mark.filterwarnings("error")
def test_values_that_are_no_numbers_are_left_out(tmp_path):
    odd = [1.0, "text", [1.0], None, 10**400, 1e308, -1e308, float("inf")]
    rows = [{"step": step, "loss": value, "grad_norm": value} for step, value in enumerate(odd, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot([tmp_path], tmp_path / "odd.png")
    np.testing.assert_array_equal(plots._series(rows, "loss")[1], [1.0] + [np.nan] * 7)


def test_another_process_draws_the_same(tmp_path):
    with pytest.raises(UserError, match="metrics.jsonl: no such file"):
        plot_apart([tmp_path], tmp_path / "x.png")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n')
    plot([tmp_path], tmp_path / "here.png")
    writer = MetricsWriter(tmp_path, 2, 2, draws_apart=True, report_to=[])
    writer.close()
    assert (tmp_path / "curves.png").read_bytes() == (tmp_path / "here.png").read_bytes()


def test_a_run_draws_its_curves_again_apart(tmp_path):
    (tmp_path / "config.toml").write_text("")
    for _ in range(2):
        writer = MetricsWriter(tmp_path, 2, 0, draws_apart=True, report_to=[])
        writer.log(1, {"loss": 1.0})
        writer.draw()
        writer.flush()
        writer.close()
        assert (tmp_path / "curves.png").stat().st_size > 1000
        os.truncate(tmp_path / "curves.png", 0)


def test_a_picture_that_fails_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "SECONDS_BETWEEN_PLOTS", 0.0)
    (tmp_path / "curves.png").mkdir()
    writer = MetricsWriter(tmp_path, 2, 0, report_to=[])
    for step in (1, 2):
        writer.log(step, {"loss": 1.0})
        writer.flush()
    assert capsys.readouterr().err.count("curves.png was not drawn: ") == 2
    (tmp_path / "curves.png").rmdir()
    writer.close()
    assert (tmp_path / "curves.png").exists()


def test_plot_errors(tmp_path):
    with pytest.raises(UserError, match="metrics.jsonl: no such file"):
        plot([tmp_path], tmp_path / "x.png")
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss"\n{"step": 3}\n')
    with pytest.raises(UserError, match="metrics.jsonl:2: not JSON"):
        plot([tmp_path], tmp_path / "x.png")
    file.write_text('{"step": 1, "loss": 1.0}\n[]\n')
    with pytest.raises(UserError, match="metrics.jsonl:2: must be an object with a step"):
        plot([tmp_path], tmp_path / "x.png")
    file.write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "x.png").mkdir()
    with pytest.raises(UserError, match="x.png: cannot be written"):
        plot([tmp_path], tmp_path / "x.png")
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(UserError, match="no/x.png: cannot be written"):
        plot([tmp_path], tmp_path / "no" / "x.png")
    file.write_text('{"step": 1, "other": 1.0}\n')
    with pytest.raises(UserError, match="nothing to draw"):
        plot([tmp_path], tmp_path / "x.png")


def test_cut_back_without_a_file(tmp_path):
    cut_back(tmp_path / "metrics.jsonl", 3)
    assert not list(tmp_path.iterdir())


def test_live_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with MetricsWriter(tmp_path, total_steps=2) as writer:
        writer.status("generating 3/8")
        writer.log(1, {"reward": 0.5})
        writer.print("[a note]")
        writer.log(2, {"reward": 0.75})
    assert "[a note]" in capfd.readouterr().err
