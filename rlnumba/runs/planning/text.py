"""The text of a plan, as `rlnumba plan` and `--dry-run` print it."""

from rlnumba.engine.core import longest_sequence
from rlnumba.parallel.placement import gpus_of_ranks
from rlnumba.runs.planning.plan import GIB, OF_PHASES, amount
from rlnumba.runs.planning.savings import savings


def describe(planner, plan):
    """The lines that `rlnumba plan` prints: list of str."""
    regions = plan.regions | plan.extra
    lines = [f"{name:<20}{amount(size):>12}   {plan.notes.get(name, '')}".rstrip() for name, size in regions.items()]
    # The processes of the cpu device share its memory, and so may those of a GPU.
    num_processes = planner.num_sharing if planner.on_gpu else planner.run.num_ranks
    share = f"{num_processes * plan.total / planner.total_bytes:.0%} of {amount(planner.total_bytes)}"
    share += f" for all {num_processes} processes" if num_processes > 1 else ""
    if plan.takes_turns:
        lines += [f"{phase:<20}{amount(size):>12}   {_lacks(phase, regions)}" for phase, size in plan.phases.items()]
    lines.append(f"{'total':<20}{amount(plan.total):>12}   {share}")
    if plan.host:
        lines.append(f"{'host memory':<20}{amount(plan.host):>12}   moments and master, page-locked")
    part = f"1/{planner.run.num_ranks} of " if planner.run.num_ranks > 1 else ""
    only_model = planner.run.train.save_only_model
    copied, what = (plan.model, "the weights") if only_model else (plan.checkpoint, "weights, moments and master")
    what = f"a copy of {part}{what} while they are written"
    lines.append(f"{'host, checkpoint':<20}{amount(copied):>12}   {what}")
    lines += _describe_disk(planner.run, plan)
    lines += _describe_prompts(planner)
    if planner.run.deploy.num_infer_gpus:
        lines += ["", *_describe_inference(planner, plan)]
    found = savings(planner, plan)
    if found:
        lines += ["", "what would save memory, each alone:"]
        lines += [f"{amount(saved):>12}   {switch}" for switch, saved in found]
    return lines


def _describe_disk(run, plan):
    """The lines about what a run writes: list of str."""
    train, final = run.train, plan.final * plan.num_parts
    checkpoint = (plan.model if train.save_only_model else plan.checkpoint) * plan.num_parts
    kept = "all are kept" if train.save_total_limit is None else f"the newest {train.save_total_limit} are kept"
    limit = f"{kept} (train.save_total_limit)"
    return [
        f"{'disk, checkpoint':<20}{amount(checkpoint):>12}   each; {limit}",
        f"{'disk, final':<20}{amount(final):>12}   what is trained, without its state",
    ]


def _describe_prompts(planner):
    """The line that says which prompts a run of episodes is planned with: list of str, empty for other runs."""
    run = planner.run
    if not (run.generates and run.has_episodes):
        return []
    longest = max(planner.prompts(run.data.max_prompt_length)[0], default=0)
    without = ""
    if run.environment.specs:
        without = ", without what `reset` of an environment adds"
    elif run.data.has_tasks:
        without = ", as the tasks have them, without what a harness adds"
    limit = longest_sequence(planner.config, run.engine)
    return [f"{'prompts':<20}{longest:>5,} tokens   the longest{without}; a sequence has at most {limit:,}"]


def _lacks(phase, regions):
    """Those of the regions that a phase of a run whose phases take turns does without: str."""
    (others,) = (names for name, names in OF_PHASES.items() if name != phase)
    return f"all but {' and '.join(name for name in others if name in regions)}"


def _describe_inference(planner, plan):
    """The lines about inference processes: list of str."""
    deploy, regions = planner.run.deploy, planner.engine_regions(plan)
    size = deploy.tensor_parallel_size
    cut = f", {size} of them an engine, each with a part of the model" if size > 1 else ""
    where = ""
    if deploy.num_infer_nodes:
        where = f" on {deploy.num_infer_nodes} nodes of Ray, {deploy.engines_per_node} actors each"
    lines = [f"each of {deploy.num_infer_gpus} inference processes{where}{cut}:"]
    lines += [f"{name:<20}{amount(nbytes):>12}" for name, nbytes in regions.items() if nbytes]
    return [*lines, f"{'total':<20}{amount(sum(regions.values())):>12}"]


def describe_ranks(planner):
    """A line for each rank and inference process of a run, below the headings: GPU, role, GiB by region; list of str.

    An inference process has the engine's regions alone; where several are one engine, its role says which part it has.
    On Ray the nodes are said, too, and an engine is an actor; Ray chooses the GPUs of all nodes but this one, train 0.
    """
    run = planner.run
    num_infer, size = run.deploy.num_infer_gpus, run.deploy.tensor_parallel_size
    is_on_ray = run.deploy.launcher == "ray"
    plans = [planner.plan(rank=rank) for rank in range(run.num_ranks)]
    roles = ["train, generate" if run.generates and not num_infer else "train"] * run.num_ranks
    if run.deploy.cuts_rollout:
        roles = [f"{role} {rank % size + 1}/{size}" for rank, role in enumerate(roles)]
    per_node = run.num_ranks // run.deploy.num_train_nodes
    nodes = [f"train {rank // per_node}" for rank in range(run.num_ranks)]
    of_all = [
        (str(rank), nodes[rank], roles[rank], plan.regions | plan.extra, plan.total) for rank, plan in enumerate(plans)
    ]
    num_here = per_node + (0 if is_on_ray else num_infer)
    if num_infer:
        of_engine = planner.engine_regions(plans[0])
        roles = ["generate"] if size == 1 else [f"generate {part + 1}/{size}" for part in range(size)]
        for index in range(run.deploy.num_engines):
            who = "-", ""
            if is_on_ray:
                who = f"actor {index}", f"infer {index // run.deploy.engines_per_node}"
            of_all += [(*who, role, of_engine, sum(of_engine.values())) for role in roles]
    names = list(dict.fromkeys(name for *_, regions, _ in of_all for name in regions))
    rows = [["rank", "node", "GPU", "role", *names, "total"]]
    key = "deploy.num_train_gpus" + (" + deploy.num_infer_gpus" if num_infer and not is_on_ray else "")
    gpus = gpus_of_ranks(num_here, key) if planner.on_gpu else ["none"] * num_here
    gpus += ["any" if planner.on_gpu else "none"] * (len(of_all) - num_here)
    for (rank, node, role, regions, total), gpu in zip(of_all, gpus, strict=True):
        sizes = [*(regions.get(name, 0) for name in names), total]
        rows.append([rank, node, str(gpu), role, *(f"{size / GIB:.3f}" for size in sizes)])
    if not is_on_ray:
        rows = [[rank, *rest] for rank, _, *rest in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
