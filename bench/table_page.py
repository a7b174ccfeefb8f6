"""The page and the picture of table.py's results."""

import statistics
from pathlib import Path

from table_cell import CEILINGS, GENERATIONS, RANK
from table_floor import Rates, generation_s, training_s

PAGE, PICTURE = "table.md", "table.png"
HEAD = """# The table

What does a GRPO step of a small model cost, phase by phase, and how far is that from what the GPU could do? This page
is written by `python bench/table.py`; [the README of the benches](../README.md#the-table) says how to repeat it.

A step draws completions in groups of {generations}, all at their full length, from random prompts, with random weights
in bfloat16, and takes one optimizer step on them. "all" trains all parameters, with float32 master weights unless the
column "how" says otherwise, "lora" an adapter of rank {rank} of all linear layers. Sampling and training are those of
every run: their log-probs are the same bits, and "difference" is the largest one that was found, in nats. Seconds are
medians of the steps after the first, whose completions are short where a step takes long ("how" says so); a cell that
was measured several times on a kind of GPU has all of them. "Rest" is what is neither generation nor training: rewards,
advantages, and writing the metrics. "Tokens/s" are tokens of completions a second, over the whole step. GiB are a GPU's
at most. "Peer" is the same step in torch on the same kind of GPU, on one; [below](#what-is-missing) is what has not
been measured.

In brackets: the share of the phase that its physical floor takes. In generation that is each prompt's computation
once, and weights, KV and states read once a decode step, or the arithmetic where it takes longer; in training 6 FLOP a
parameter a token (4 with an adapter) and attention's, a group's prompt once and nothing recomputed, and the optimizer's
state read and written once. What a phase takes besides is in generation launches, sampling, what the host does between
steps, and bandwidth that kernels of few rows do not reach; in training what is recomputed, kernels that are bound by
memory, and GEMMs below the rate of a large one. [`bench/step_timeline.py`](../step_timeline.py) names the kernels.
The floors are by these rates:

| GPU | a copy, GB/s | a large GEMM, TFLOP/s | |
| --- | --- | --- | --- |
{rates}
"""
COLUMNS = "| cell | step, s | generate, s | train, s | rest, s | tokens/s | GiB | difference | how | peer |"
COLORS = {"generate": ("#0072B2", "#9ecae1"), "train": ("#D55E00", "#fdc28c"), "rest": ("#bab0ac",)}


def medians_of(result):
    """{phase: median seconds} of a result, "step" and "rest", what is neither generation nor training, among them."""
    seconds = {name: statistics.median(values) for name, values in result["seconds"].items()}
    step = seconds.pop("step_time")
    phases = {name: seconds.get(name, 0.0) for name in ("generate", "train")}
    return {"step": step, **phases, "rest": step - sum(phases.values())}


def floors_of(cell, result, rates):
    """{phase: least seconds} of a cell that was measured with the result's keys."""
    keys = result["keys"]
    kept = keys.get("optim", "adamw_torch"), keys.get("master_weights", True)
    return {"generate": generation_s(cell, rates), "train": training_s(cell, rates, *kept)}


def rates_by_gpu(results):
    """{GPU: its Rates} of those that were measured."""
    found = [each for each in results if each["cell"] == CEILINGS and "failed" not in each]
    return {each["gpu"]: Rates(each["bytes_per_s"], each["flop_per_s"]) for each in found}


def joined(values, form="{:.3f}"):
    """Several values of one cell in increasing order."""
    return ", ".join(form.format(value) for value in sorted(values))


def row_of(cell, own, peers, rates):
    """A line of the page. own, peers: the cell's results that did not fail, at least one of either."""
    name = f"{cell.shape}, {cell.tuned}, {cell.completions} x ({cell.prompt} + {cell.length})"
    timed = [each for each in own if "seconds" in each]
    step = statistics.median(medians_of(each)["step"] for each in timed) if timed else None
    if timed:
        columns = [name, *columns_of(cell, timed, step, rates)]
    elif own:
        needs = f"does not fit: {own[-1]['does_not_fit']:.1f} GiB of {own[-1]['gpu_gib']:.0f}"
        columns = [name, needs, *[""] * 7]
    else:
        columns = [name, "not measured", *[""] * 7]
    return f"| {' | '.join([*columns, peer_of(cell, peers, step)])} |"


def columns_of(cell, timed, step, rates):
    """The columns of a cell's own results with seconds, but for its name: list of str. step: their median."""
    last = timed[-1]
    medians, floors = [medians_of(each) for each in timed], floors_of(cell, last, rates)
    columns = [joined(each["step"] for each in medians)]
    for phase in ("generate", "train"):
        median = statistics.median(each[phase] for each in medians)
        columns.append(f"{joined(each[phase] for each in medians)} ({floors[phase] / median:.0%})")
    columns.append(joined(each["rest"] for each in medians))
    columns.append(f"{cell.completions * cell.length / step:,.0f}")
    columns += [f"{max(each['gib'] for each in timed):.1f}", f"{max(each['difference'] for each in timed):.2g}"]
    kept = (last.get("activations") or "").split(": ")[:2]
    keys = ", ".join(f"{key} = {value}" for key, value in last["keys"].items() if key != "max_tokens_per_micro_batch")
    short = f"after a step of {last['warmup_tokens']} tokens" if "warmup_tokens" in last else None
    return [*columns, "; ".join(filter(None, [": ".join(kept), keys, short]))]


def peer_of(cell, peers, step):
    """The column of a cell's peers: str. step: seconds of the cell's own step, None where it was not measured."""
    if not peers:
        return "not measured" if cell.gpus == 1 else ""
    said = []
    for kind in dict.fromkeys(each["kind"] for each in peers):
        steps = [medians_of(each)["step"] for each in peers if each["kind"] == kind]
        slower = "" if step is None else f", {statistics.median(steps) / step:.1f} times as long"
        said.append(f"{kind}: {joined(steps)} s{slower}")
    return "; ".join(said)


def rates_lines(gpus, by_gpu):
    """Lines of a table of the rates by which floors are computed, those of other GPUs named as such: list of str."""
    lines = []
    for gpu in gpus:
        rates, said = by_gpu.get(gpu, Rates()), "" if gpu in by_gpu else "not measured: an H200's"
        lines.append(f"| {gpu} | {rates.bytes_per_s / 1e9:,.0f} | {rates.flop_per_s / 1e12:,.0f} | {said} |")
    return lines


def counts_line(gpu, count, cells, results):
    """A line that counts what a kind of GPU has of the cells of `count` GPUs: str. results: its own."""
    of = {cell.name: [each for each in results if each["cell"] == cell.name] for cell in cells if cell.gpus == count}
    own = [[each for each in found if each["kind"] == "rlnumba"] for found in of.values()]
    timed = [sum("seconds" in each for each in found) for found in own]
    unfit = sum(any("does_not_fit" in each for each in found) for found, n in zip(own, timed, strict=True) if not n)
    peers = sum(any(each["kind"] != "rlnumba" and "seconds" in each for each in found) for found in of.values())
    counts = len(of), sum(n > 0 for n in timed), sum(n > 1 for n in timed), unfit
    beside = peers if count == 1 else ""
    return f"| {count} x {gpu} | {' | '.join(map(str, counts))} | {len(of) - counts[1] - unfit} | {beside} |"


def missing_lines(cells, results):
    """What has not been measured, has failed, or was measured on some machines alone: lines of the page."""
    lines = ["## What is missing\n", "| GPUs | cells | measured | twice | do not fit | missing | with a peer |"]
    lines.append("| --- |" + " --- |" * 6)
    counts = dict.fromkeys(cell.gpus for cell in cells)
    for gpu in dict.fromkeys(each["gpu"] for each in results):
        own = [each for each in results if each["gpu"] == gpu]
        lines += [counts_line(gpu, count, cells, own) for count in counts]
    good = {each["cell"] for each in results if each["kind"] == "rlnumba" and "failed" not in each}
    groups = {}
    for cell in cells:
        group = f"{cell.gpus} GPU{'s' if cell.gpus > 1 else ''}, {cell.completions} x ({cell.prompt} + {cell.length})"
        groups.setdefault(group, []).append(cell)
    without = {group: [each for each in found if each.name not in good] for group, found in groups.items()}
    if count := sum(map(len, without.values())):
        lines += ["", f"On no machine, {count} of {len(cells)}:\n"]
    for group, found in without.items():
        names = ", ".join(f"{each.shape} {each.tuned}" for each in found)
        if found:
            lines.append(f"- {group}: {f'all {len(found)}' if len(found) == len(groups[group]) else names}")
    if failed := failures(cells, results):
        lines += ["", "Failed, and not measured since:\n", *failed]
    return [*lines, ""]


def failures(cells, results):
    """A line for each cell, kind and GPU whose results have all failed: list of str."""
    names, latest, good = {cell.name for cell in cells}, {}, set()
    for each in (each for each in results if each["cell"] in names):
        key = each["cell"], each["kind"], each["gpu"]
        if "failed" in each:
            latest[key] = each["failed"]
        else:
            good.add(key)
    return [
        f"- `{name}`, {kind}, on {gpu}: {' '.join(why.split())}"
        for (name, kind, gpu), why in latest.items()
        if (name, kind, gpu) not in good
    ]


def page_of(cells, results):
    """The page's text. cells: all of the table; results: the lines of its folders."""
    by_gpu, names = rates_by_gpu(results), {cell.name for cell in cells}
    of_cells = [each for each in results if each["cell"] in names]
    gpus = list(dict.fromkeys(each["gpu"] for each in of_cells))
    rates = "\n".join(rates_lines(gpus, by_gpu))
    lines = [HEAD.format(generations=GENERATIONS, rank=RANK, rates=rates)]
    good = [each for each in of_cells if "failed" not in each]
    for gpu in gpus:
        for count in dict.fromkeys(cell.gpus for cell in cells):
            rows = []
            for cell in (each for each in cells if each.gpus == count):
                of_cell = [each for each in good if each["cell"] == cell.name and each["gpu"] == gpu]
                own = [each for each in of_cell if each["kind"] == "rlnumba"]
                peers = [each for each in of_cell if each["kind"] != "rlnumba"]
                if of_cell:
                    rows.append(row_of(cell, own, peers, by_gpu.get(gpu, Rates())))
            if rows:
                lines += [f"## {count} x {gpu}\n", COLUMNS, "| --- |" + " --- |" * (COLUMNS.count("|") - 2), *rows, ""]
    if notes := sorted({each["note"] for each in good if "note" in each}):
        lines += ["What to know of some of them:\n", *(f"- {note}" for note in notes), ""]
    lines += [f"![Seconds of a step by phase, with the floor of each]({PICTURE})\n", *missing_lines(cells, of_cells)]
    lines += [
        "## How it was measured\n",
        "| GPU | commit | date | command | cells |",
        "| --- | --- | --- | --- | --- |",
    ]
    calls = {}
    for each in good:
        key = each["gpu"], each["commit"], each["date"][:10], each["command"]
        calls[key] = calls.get(key, 0) + 1
    lines += [
        f"| {gpu} | {commit} | {date} | `{command}` | {count} |"
        for (gpu, commit, date, command), count in calls.items()
    ]
    return "\n".join(lines) + "\n"


def picture(cells, results):
    """A figure: a bar of each measured cell and kind of GPU, its phases one behind the other, and dark in each what its
    floor takes."""
    from matplotlib.figure import Figure

    by_gpu, bars = rates_by_gpu(results), []
    timed = [each for each in results if each["kind"] == "rlnumba" and "seconds" in each]
    for gpu in dict.fromkeys(each["gpu"] for each in timed):
        for cell in cells:
            own = [each for each in timed if each["cell"] == cell.name and each["gpu"] == gpu]
            if own:
                # Of several measurements the newest.
                floors = floors_of(cell, own[-1], by_gpu.get(gpu, Rates()))
                bars.append((f"{cell.name}, {gpu}", cell, medians_of(own[-1]), floors))
    figure = Figure(figsize=(10, 1.4 + 0.17 * len(bars)), layout="constrained")
    axis = figure.subplots()
    # Without the share of the height that is left empty above and below by default.
    axis.set_ylim(-0.7, len(bars) - 0.3)
    for at, (_, cell, medians, floors) in enumerate(bars):
        # A token of each sequence, so that cells of all sizes are one picture.
        begin, scale = 0.0, 1e6 / (cell.completions * cell.length)
        for phase, colors in COLORS.items():
            width = medians[phase] * scale
            axis.barh(at, width, left=begin, color=colors[-1], label=phase if at == 0 else None)
            if phase in floors:
                label = f"{phase}, its floor" if at == 0 else None
                axis.barh(at, min(floors[phase] * scale, width), left=begin, color=colors[0], label=label)
            begin += width
    axis.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="microseconds of a step for each token of its completions")
    axis.spines[["top", "right"]].set_visible(False)
    if bars:
        figure.legend(frameon=False, fontsize=8, ncols=5, loc="outside lower center")
    return figure


def write(cells, results, folder):
    """Write the page and its picture to a folder: the page's path. Raises SystemExit without results."""
    if not any(each["cell"] in {cell.name for cell in cells} for each in results):
        raise SystemExit("table.py: the folders have no result of these cells")
    picture(cells, results).savefig(Path(folder) / PICTURE, dpi=110, facecolor="white")
    (Path(folder) / PAGE).write_text(page_of(cells, results))
    return Path(folder) / PAGE
