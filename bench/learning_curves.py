"""Curves of bench/learning_runs.py: their rows and pictures, from the runs of a folder or from what is kept of them."""

import json
import math
import statistics

# Metrics that a picture or a row reads.
KEPT = (
    *("reward", "eval_reward", "loss", "eval_loss", "num_tokens", "epoch", "step_time", "entropy", "teacher_kl"),
    *("completions/mean_length", "completions/clipped_ratio", "sampling/sampling_logp_difference/max"),
)
DISTILLED = {
    "arithmetic-grpo": "GRPO, rewards",
    "arithmetic-distill": "distill: the teacher's predictions",
    "arithmetic-teacher": "GRPO, [teacher]",
}
SELF_TAUGHT = {
    "arithmetic-self": "its own teacher, as it was",
    "arithmetic-self-jsd": "its own teacher, as it was, beta 0.5",
    "arithmetic-self-ema": "its own teacher, a moving average",
}
# t of Student's distribution at 0.975, by degrees of freedom: two-sided 95 %.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}


def rows_of(folder, name):
    """The metrics of a run, FOLDER/name/metrics.jsonl or what `--keep` has made of it: list of dicts, [] without."""
    from rlnumba.reporting.files import read_metrics

    kept = folder / f"{name}.jsonl"
    if (folder / name / "metrics.jsonl").exists():
        return read_metrics(folder / name)
    return list(map(json.loads, kept.read_text().splitlines())) if kept.exists() else []


def points(rows, metric, over="step"):
    """(values of `over`, values of a metric) of the rows that have it; `over` is 0 before the first step."""
    found = [(row.get(over, 0), row[metric]) for row in rows if row.get(metric) is not None]
    return tuple(map(list, zip(*found, strict=True))) if found else ([], [])


def names_in(folder, pattern):
    """Names of the runs of a folder, by a glob pattern: sorted list."""
    names = {path.parent.name for path in folder.glob(f"{pattern}/metrics.jsonl")}
    return sorted(names | {path.stem for path in folder.glob(f"{pattern}.jsonl")})


def adapter_runs(folder):
    """{format of the base: {seed: rows}} of the runs of `adapters`, bf16 first."""
    found = {"bf16": {}}
    for name in names_in(folder, "adapter-*-*"):
        _, form, seed = name.split("-")
        if points(rows_of(folder, name), "eval_reward")[0]:
            found.setdefault(form, {})[int(seed)] = rows_of(folder, name)
    return {form: runs for form, runs in found.items() if runs}


def gsm8k_grpo_runs(folder):
    """{seed: rows} of GRPO in `gsm8k`."""
    names = names_in(folder, "gsm8k-grpo-*")
    return {int(name.rpartition("-")[2]): rows_of(folder, name) for name in names}


def sft_accuracy(folder):
    """[(supervised step, held-out accuracy)] of `gsm8k`, of those that are there."""
    found = dict(zip(*points(rows_of(folder, "gsm8k-sft"), "accuracy"), strict=True))
    for path in folder.glob("gsm8k-eval-*/metrics.json"):
        found[int(path.parent.name.rpartition("-")[2])] = json.loads(path.read_text())["eval_reward"]
    steps = points(rows_of(folder, "gsm8k-sft"), "loss")[0]
    for rows in gsm8k_grpo_runs(folder).values():
        before, values = points(rows, "eval_reward")
        if steps and before[:1] == [0]:
            found[steps[-1]] = values[0]
    return sorted(found.items())


def keep(folder, target):
    """Write NAME.jsonl of each run of a folder to another one: the metrics of KEPT, numbers with five digits."""
    target.mkdir(parents=True, exist_ok=True)
    for name in sum((names_in(folder, pattern) for pattern, _ in PICTURES.values()), []):
        rows = {row["step"]: row for row in rows_of(folder, name)}
        if name == "gsm8k-sft":
            for step, accuracy in sft_accuracy(folder):
                rows[step] = rows.get(step, {"step": step}) | {"accuracy": accuracy}
        with open(target / f"{name}.jsonl", "w") as file:
            for step in sorted(rows):
                values = {each: rows[step].get(each) for each in (*KEPT, "accuracy")}
                own = {each: float(f"{value:.5g}") for each, value in values.items() if value is not None}
                file.write(json.dumps({"step": step} | own) + "\n")


def difference(first, second):
    """(mean of the second less that of the first, its standard error, whether 95 % of such differences of equal means
    are at least as large); the latter two are None where a list has one value."""
    gain = statistics.mean(second) - statistics.mean(first)
    if min(len(first), len(second)) < 2:
        return gain, None, None
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (first, second)))
    return gain, error, abs(gain) <= STUDENT.get(len(first) + len(second) - 2, 2.0) * error


def spread(values):
    """ "0.650 ± 0.012 (3 seeds)": mean and standard deviation."""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation} ({len(values)} seed{'s' * (len(values) > 1)})"


def print_adapters(folder):
    """Print a row for each format of the base, and whether it agrees with bf16."""
    from report import row

    ends = {}
    for form, runs in adapter_runs(folder).items():
        curves = [points(rows, "eval_reward")[1] for rows in runs.values()]
        ends[form] = [curve[-1] for curve in curves]
        steps = sorted({points(rows, "reward")[0][-1] for rows in runs.values() if points(rows, "reward")[0]})
        apart = [points(rows, "sampling/sampling_logp_difference/max")[1] for rows in runs.values()]
        value = f"held-out accuracy {spread([curve[0] for curve in curves])} to {spread(ends[form])}; "
        value += (
            f"steps {', '.join(map(str, steps))}; rollout and training differ by at most {max(map(max, apart)):g} nats"
        )
        row(f"GRPO with an adapter on the base in {form}", value)
    for form in list(ends)[1:] if "bf16" in ends else []:
        gain, error, agrees = difference(ends["bf16"], ends[form])
        value = f"{gain:+.3f}"
        if error is not None:
            value += f" ± {error:.3f} (standard error); {'within' if agrees else 'beyond'} the noise of seeds (95 %)"
        row(f"accuracy on {form} less that on bf16", value)


def print_distilled(folder):
    """Print a row for each run of `distill`: accuracy at its ends, and tokens until GRPO's last accuracy."""
    from report import row

    goal = points(rows_of(folder, "arithmetic-grpo"), "eval_reward")[1][-1:]
    for name, label in (DISTILLED | SELF_TAUGHT).items():
        tokens, accuracy = points(rows_of(folder, name), "eval_reward", "num_tokens")
        if not tokens:
            continue
        value = f"held-out accuracy {accuracy[0]:.3f} to {accuracy[-1]:.3f}, {tokens[-1]:,} tokens"
        for share in (0.9, 1.0) if goal else ():
            found = [n for n, each in zip(tokens, accuracy, strict=True) if each >= share * goal[0]]
            value += f"; {share:.0%} of GRPO's {'after ' + format(found[0], ',') + ' tokens' if found else 'never'}"
        row(label, value)


def print_gsm8k(folder):
    """Print a row for each phase of `gsm8k`."""
    from report import row

    accuracy = sft_accuracy(folder)
    if accuracy:
        row("GSM8K, supervised: steps and accuracy", ", ".join(f"{step}: {each:.4f}" for step, each in accuracy))
    runs, last = gsm8k_grpo_runs(folder), []
    for seed, rows in runs.items():
        steps, values = points(rows, "eval_reward")
        if not steps:
            continue
        last.append(values[-1])
        best = max(values)
        value = f"held-out accuracy {values[0]:.4f} to {values[-1]:.4f} after {steps[-1]} steps, at most {best:.4f}"
        times = points(rows, "step_time")[1]
        value += f"; {statistics.median(times):.3f} s a step, {sum(times):.0f} s" if times else ""
        row(f"GSM8K, GRPO, seed {seed}", value)
    if len(last) > 1:
        row("GSM8K, GRPO, after the last step", spread(last))


def panel(axis, title, label, **keys):
    """Title, labels and grid of a panel."""
    axis.set_title(title, fontsize=10)
    axis.set(xlabel=label, **keys)
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)


def curve(axis, found, window=1, **style):
    """A line of (values of x, values of y), smoothed; none of no values."""
    from rlnumba.reporting.plots import smooth

    if found[0]:
        axis.plot(found[0], smooth(found[1], window), **style)


def curves_of_seeds(axis, runs, metric, window=1, **style):
    """A thin line for each of {seed: rows}, and their mean as far as all seeds go."""
    found = [points(rows, metric) for rows in runs.values()]
    if len(found) > 1:
        for each in found:
            curve(axis, each, window, color=style["color"], alpha=0.35, linewidth=0.8)
    steps = min((steps for steps, _ in found), key=len, default=[])
    values = [values[: len(steps)] for _, values in found]
    curve(axis, (steps, list(map(statistics.mean, zip(*values, strict=True)))), window, **style)


def adapters_figure(folder):
    """Reward of the steps and held-out accuracy, a thin line a seed and their mean."""
    from rlnumba.reporting.plots import COLORS

    figure, (reward, accuracy) = panels(2)
    for color, (form, runs) in zip(COLORS, adapter_runs(folder).items(), strict=False):
        label = f"{form}, {len(runs)} seed{'s' * (len(runs) > 1)}"
        for axis, metric, window in ((reward, "reward", 9), (accuracy, "eval_reward", 1)):
            curves_of_seeds(axis, runs, metric, window, color=color, linewidth=2, label=label)
    panel(reward, "reward of the completions of a step", "step", ylim=(0, 1))
    panel(accuracy, "right answers to held-out questions, greedy", "step", ylim=(0, 1))
    return figure


def distill_figure(folder):
    """Held-out accuracy over tokens: with a teacher, and with the model as its own."""
    from rlnumba.reporting.plots import COLORS

    figure, axes = panels(2)
    colors = dict(zip(DISTILLED | SELF_TAUGHT, COLORS, strict=False))
    beside = dict(list(DISTILLED.items())[:1])
    titles = ("a teacher that GRPO has trained", "the model as its own teacher")
    for axis, labels, title in zip(axes, (DISTILLED, beside | SELF_TAUGHT), titles, strict=True):
        for name, label in labels.items():
            found = points(rows_of(folder, name), "eval_reward", "num_tokens")
            curve(axis, found, color=colors[name], marker="o", markersize=3, linewidth=1.6, label=label)
        panel(axis, title, "tokens of prompts and completions", ylim=(0, 1), ylabel="right answers, held out, greedy")
    return figure


def gsm8k_figure(folder):
    """Loss and accuracy of the supervised run, then reward and accuracy of GRPO, a thin line a seed and their mean."""
    from rlnumba.reporting.plots import COLORS

    figure, (loss, supervised, grpo) = panels(3)
    dots = {"color": COLORS[1], "marker": "o", "markersize": 3}
    rows = rows_of(folder, "gsm8k-sft")
    curve(loss, points(rows, "loss"), 9, color=COLORS[0], label="training")
    curve(loss, points(rows, "eval_loss"), **dots, label="held out")
    panel(loss, "supervised: loss, nats a token", "step")
    accuracy = sft_accuracy(folder)
    curve(supervised, tuple(zip(*accuracy, strict=True)) or ([], []), **dots)
    panel(supervised, "supervised: right answers, held out, greedy", "step", ylim=(0, None))
    runs = gsm8k_grpo_runs(folder)
    curves_of_seeds(grpo, runs, "reward", 9, color=COLORS[0], label="reward of a step, temperature 1")
    curves_of_seeds(grpo, runs, "eval_reward", **dots, label="held out, greedy")
    of_seeds = f", the mean of {len(runs)} seeds" if len(runs) > 1 else ""
    panel(grpo, f"GRPO: right answers{of_seeds}", "step", ylim=(0, None))
    return figure


def panels(count):
    """(figure, its axes side by side)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.4 + 3.9 * count, 3.4), layout="constrained")
    return figure, figure.subplots(1, count)


def pictures(folder):
    """{name: function that draws it} of those whose runs are in a folder: dict."""
    return {
        f"learning_{name}": (lambda make=make: make(folder))
        for name, (pattern, make) in PICTURES.items()
        if names_in(folder, pattern)
    }


# Picture -> a pattern of the names of its runs, and the function that draws it.
PICTURES = {
    "quantized": ("adapter-*-*", adapters_figure),
    "distill_arithmetic": ("arithmetic-*", distill_figure),
    "gsm8k": ("gsm8k-[sg]*", gsm8k_figure),
}
