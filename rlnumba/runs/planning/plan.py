"""The memory that a run will need, by region, before anything is loaded.

The run's own classes are made, and its largest micro-batch goes forward and backward, with arrays that have no memory
and operators that compute nothing (runtime/shapes.py). So the regions are those of memory.report() and of the metrics
memory/*, computed by the code that allocates. Only config.json, the tokenizer and the data are read.

On a GPU there is besides what no region counts: the operators' own arrays and the CUDA context, estimated here. A run
that generates and trains in turn lends one phase the memory of the other (runtime/mapped_memory.py), so what it needs
is the most of its phases.

Each of R ranks has what one has, but for its part of the optimizer's state and of the step's gradient. No part is
larger than the first, so the plan is that of rank 0 unless another one is asked for. Ranks that have the weights in
parts (deploy.zero_stage 3) have no engine beside inference processes; without these the engine has all layers besides.
"""

import dataclasses
import os
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np

from rlnumba import data
from rlnumba.engine.blocks.block_manager import blocks_needed
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE, CPU_CACHE_BYTES, GPU_MARGIN_BYTES
from rlnumba.engine.cache import BlockSizes, state_bytes_of
from rlnumba.engine.core import longest_sequence
from rlnumba.engine.parallel_size import weights_bytes
from rlnumba.engine.runner import Runner
from rlnumba.engine.scheduler import steps_of_group
from rlnumba.engine.speculation import longest_verified
from rlnumba.environments.agents import load_agents
from rlnumba.kernels.logprob import divergence
from rlnumba.kernels.logprob import ops as logprob
from rlnumba.model.hub import find_model, read_config
from rlnumba.model.lora import Places, lora_of_run
from rlnumba.model.quantized.copies import copies_bytes, with_copies
from rlnumba.model.shard import WHOLE, Shard
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import ROLLOUT_REGION as COPIES
from rlnumba.optim import CHUNK, STREAMS
from rlnumba.parallel.cut_weights import with_own_rows
from rlnumba.parallel.gathered_weights import with_gathered
from rlnumba.parallel.placement import num_sharing
from rlnumba.parallel.planned_rank import PlannedRank
from rlnumba.parallel.shared_gradients import staging_bytes
from rlnumba.parallel.tensor_parallel import TensorParallel
from rlnumba.parallel.transports.peer import arena_bytes
from rlnumba.runs import graphs, kept_data
from rlnumba.runs.loading import weights_of
from rlnumba.runs.planning.planned import BatchSizes, adapter_of, take_step
from rlnumba.runs.resolve import resolve
from rlnumba.runtime import device
from rlnumba.runtime.context import Context
from rlnumba.runtime.shapes import shapes_only
from rlnumba.trainers.every import TRAINERS

GIB = 2**30
# The CUDA context and the machine code of the kernels.
CONTEXT_BYTES = 600 << 20
# The region of weights that the engine shares with the policy, which are counted once.
SHARED = "weights that the engine reads"
# Regions of an inference process of an asynchronous run.
OF_INFERENCE = ("weights", COPIES, "adapter", "engine activations", "attention", "kv", "CUDA context")
# Prompts of prompt_run.sample_report.
REPORTED_PROMPTS = 4
# Regions whose memory a phase gives to the other one, where they take turns.
OF_PHASES = {"training": ("activations", "operators"), "generation": ("engine activations", COPIES, "kv")}


@dataclass(frozen=True)
class Plan:
    """regions: {name: bytes}, the names those of memory.report() but for "reference" and "teacher", which that
    counts as weights.

    notes: {name: what the bytes follow from}. tokens: the largest micro-batch's. extra: {name: bytes} of the GPU that
    no region counts. host: bytes of pinned host memory. checkpoint: bytes of the host's memory while a checkpoint is
    written, and of the disk; of several ranks the part of each. final: bytes of the disk for what is trained alone, and
    a critic; model: for the policy, as a checkpoint of train.save_only_model has it; num_parts: how often
    the disk has these three, for all ranks. takes_turns: whether training and generation never need their regions at
    once. least_kv: bytes of the KV cache below which the longest sequence does not fit.
    """

    regions: dict
    notes: dict
    tokens: int
    extra: dict
    host: int
    checkpoint: int
    takes_turns: bool = False
    least_kv: int = 0
    final: int = 0
    model: int = 0
    num_parts: float = 1

    @property
    def phases(self):
        """{phase: bytes of the device's memory that it needs}: "training", and "generation" where they take turns."""
        found = self.regions | self.extra
        if not self.takes_turns:
            return {"training": sum(found.values())}
        of_phases = {phase: sum(found.get(name, 0) for name in names) for phase, names in OF_PHASES.items()}
        resident = sum(found.values()) - sum(of_phases.values())
        return {phase: resident + nbytes for phase, nbytes in of_phases.items()}

    @property
    def total(self):
        """Bytes of the device's memory that the run needs at one time."""
        return max(self.phases.values())

    @property
    def needed(self):
        """Bytes of the device's memory without which the run ends: a graph for which there is no memory is not made,
        and the KV cache, where it takes turns with training, is as large as there is room, but for a margin, if it
        holds a sequence."""
        graphs = self.extra.get("graphs", 0)
        if not self.takes_turns:
            return self.total - graphs
        kv = self.regions.get("kv", 0)
        # Beside a cache of a given number of blocks the engine leaves nothing.
        margin = 0 if kv == self.least_kv else GPU_MARGIN_BYTES
        least_generation = self.phases["generation"] - kv + self.least_kv + margin
        return max(self.phases["training"], least_generation) - graphs


class Planner:
    """Plans of one run and of variants of it. on_gpu: whether for a GPU of total_bytes, else for the cpu device.

    keeps_data: whether what is read is kept for the run itself, which begins next
    (kept_data.py). Raises UserError for a model, a tokenizer or data that the run could not read, and for parameters of
    sampling that it could not take.
    """

    def __init__(self, run, on_gpu, total_bytes, keeps_data=False):
        run = resolve(run, on_gpu, total_bytes)
        # Each of the processes that share a GPU has a part of its memory.
        self.num_sharing = num_sharing(run.num_ranks + run.deploy.num_infer_gpus)
        self.trainer, self.run = TRAINERS[run.trainer], run
        self.on_gpu, self.total_bytes = on_gpu, total_bytes
        self.keeps_data = keeps_data
        folder = find_model(run.model, weights=False)
        self.config, self.tokenizer = read_config(folder), Tokenizer.from_folder(folder)
        self.prompts, self._rows = cache(self._prompts), {}

    def plan(self, run=None, rank=0):
        """The Plan of `run`, a variant of the run, or of the run itself, for one of its ranks."""
        run = run or self.run
        communicator = PlannedRank(rank, run.num_ranks) if run.num_ranks > 1 else None
        dtype, step = self.dtype_of(run), step_of(self, run)
        with shapes_only(gpu_properties() if self.on_gpu else None) as peaks:
            taken = take_step(self.config, dtype, run, step, communicator)
            shards_layers = run.deploy.zero_stage == 3 and communicator is not None
            has_engine = step.prompts and not (shards_layers and run.deploy.num_infer_gpus)
            workspace = _generate(self, dtype, run, step.prompts, communicator) if has_engine else 0
            for_teachers = []
            if run.teacher_draws and shards_layers:
                configs = step.models.teachers or [self.config]
                for_teachers = [_gathered_bytes(run, config, dtype, communicator) for config in configs]
            operators, of_graphs = (
                self._operators(dtype, step, taken, most) for most in (taken.largest.rows, taken.graph_tokens)
            )
        tokens = step.tokens
        regions, notes = dict(peaks), {}
        host = regions.pop("host", 0)
        regions.pop(SHARED, None)
        itemsize = device.dtype(dtype).itemsize
        parameters, kinds = regions["weights"] // itemsize, dtype
        if run.quantization is not None:
            parameters = weights_bytes(self.config, dtype, WHOLE) // itemsize
            kinds = f"linear layers {run.quantization.format_name}, others {dtype}"
        notes["weights"] = f"{parameters:,} parameters, {kinds}"
        if shards_layers:
            twice = "" if run.lora is not None else " twice"
            notes["weights"] += f": 1/{run.num_ranks} of all{twice}, and a layer, embedding and head"
            notes["reference"] = f"1/{run.num_ranks} of all, and a layer, embedding and head"
        if for_teachers:
            # Engines draw one after the other; arrays of the cpu device are not lent.
            together = max if self.on_gpu else sum
            regions[COPIES] = together([regions.get(COPIES, 0), *for_teachers])
        if COPIES in regions:
            form = run.engine.quantization
            copied = f"linear layers in {form}" if run.rollout_is_quantized else "all layers, gathered"
            if run.deploy.cuts_rollout:
                matrices = "all matrices of layers" if shards_layers else "q, k, v, gate and up"
                copied = f"1/{run.deploy.ranks_of_engine} of the rows of {matrices}"
            notes[COPIES] = f"{copied}, which the engine reads"
        notes["grads"] = "float32"
        if communicator is not None:
            notes["grads"] += f" of one micro-batch, and of the step 1/{run.num_ranks}"
            if taken.folds_layers:
                notes["grads"] = f"float32 of two layers' matrices and the rest, and of the step 1/{run.num_ranks}"
        elif run.train.accumulates_gradients and self.trainer.trains_lm_head and run.lora is None:
            notes["grads"] += ", once more for the head of one micro-batch"
        if run.train.optimizer_in_backward:
            notes["grads"] = f"{dtype} of a layer's matrices, float32 of embedding, heads and norms"
        moments = [run.train.optim, *(["master"] if itemsize == 2 and run.train.master_weights else [])]
        notes["moments"] = " and ".join(moments) + (f", 1/{run.num_ranks}" if communicator is not None else "")
        notes["moments"] += ", in host memory but for two chunks" if host else ""
        if host and self.on_gpu:
            chunks = sum(STREAMS * host * min(CHUNK, each) for each in taken.trained)
            regions["moments"] = chunks // sum(taken.trained)
        notes["activations"] = f"{tokens:,} tokens in a micro-batch, {run.train.kept_activations}"
        if run.train.kept_activations == "selective":
            notes["activations"] += f" but for {', '.join(run.train.recompute_modules)}"
            if run.train.recompute_num_layers:
                notes["activations"] += f", minimal in {run.train.recompute_num_layers} layers"
        extra = {}
        if self.on_gpu and communicator is not None:
            # A policy and a critic use it in turn.
            shared = (regions["grads"] - 4 * sum(taken.trained)) // len(taken.trained)
            regions["peer"] = arena_bytes(run.num_ranks) + staging_bytes(shared, run.num_ranks)
            if 1 < run.deploy.ranks_of_engine < run.num_ranks:
                regions["peer"] += arena_bytes(run.deploy.ranks_of_engine)
            notes["peer"] = "what other GPUs write into, and copies of their gradients"
        if workspace:
            regions["attention"] = workspace
            notes["attention"] = "results of parts of long sequences, which are merged"
        if self.on_gpu:
            extra = {"operators": operators, "CUDA context": CONTEXT_BYTES}
            notes["operators"] = "chunks of logits, float32 sums of attention's backward"
            has_all = not (taken.folds_layers or shards_layers)
            has_graphs = has_all and self.trainer.has_graphs and graphs.has_graphs(run.train, run.lora)
            if has_graphs and step.fewest <= taken.graph_tokens:
                extra["graphs"] = min(of_graphs, graphs.POOL_BYTES)
                notes["graphs"] = "the same arrays once more, for micro-batches that are replayed"
        least_kv = 0
        if has_engine:
            of_engine = Shard(0, run.deploy.ranks_of_engine).config_of(self.config)
            least_kv = self._add_kv(regions, notes, run, dtype, step.prompts, of_engine, extra.get("graphs", 0))
        order = ["weights", COPIES, "adapter", "reference", "teacher", "grads", "moments", "activations"]
        order += ["engine activations", "attention", "kv"]
        names = sorted(regions, key=lambda name: order.index(name) if name in order else len(order))
        regions = {name: regions[name] for name in names if regions[name]}
        # Between micro-batches the engine needs its memory, too; and arrays of the cpu device are not lent.
        is_interleaved = run.generates_beside and not run.deploy.num_infer_gpus
        lends = has_engine and self.on_gpu and not is_interleaved and run.engine.enable_sleep_mode is not False
        written = {
            "checkpoint": taken.checkpoint,
            "final": taken.final,
            "model": taken.model,
            "num_parts": taken.num_parts,
        }
        return Plan(regions, notes, tokens, extra, host, takes_turns=bool(lends), least_kv=least_kv, **written)

    def _operators(self, dtype, step, taken, most_rows):
        """Bytes of the operators' own arrays in a micro-batch of at most so many rows of a Step; to be called within
        shapes_only. taken: the Step's Taken."""
        largest, models = taken.largest, step.models
        rows, logits, at_once = (min(n, most_rows) for n in (largest.rows, largest.logits, largest.at_once))
        # Of sequences that share prefixes there are at most as many.
        sequences = max(largest.sequences, 2 * step.sequences if taken.shares else step.sequences)
        sizes = BatchSizes(rows, sequences, logits, at_once, largest.is_filtered)
        configs = [self.config, *([] if models.critic is None else [models.critic]), *models.teachers]
        found = max(operator_bytes(sizes, config, dtype, taken.shares) for config in configs)
        if models.compares_heads:
            itemsize = device.dtype(dtype).itemsize
            found = max(found, divergence.operator_bytes(logits, self.config.vocab_size, itemsize))
        return found

    def engine_regions(self, plan):
        """{name: bytes} of what each process of an inference engine has: the engine's regions of a Plan of the run, and
        of several processes their parts. Memory for new weights counts for all of them, and the first has it."""
        run, shard, dtype = self.run, Shard(0, self.run.deploy.tensor_parallel_size), self.dtype_of(self.run)
        prompts, itemsize = step_of(self, run).prompts, device.dtype(dtype).itemsize
        found = {name: size for name, size in (plan.regions | plan.extra).items() if name in OF_INFERENCE}
        sent = plan.regions["weights" if run.lora is None else "adapter"]
        has_own_engine = "engine activations" in found
        if not has_own_engine:
            sent = weights_bytes(self.config, dtype, WHOLE) if run.lora is None else sent
            with shapes_only(gpu_properties() if self.on_gpu else None) as peaks:
                workspace = _generate(self, dtype, run, prompts)
            found["engine activations"] = peaks["engine activations"]
            found |= {COPIES: peaks[COPIES]} if COPIES in peaks else {}
            found |= {"attention": workspace} if workspace else {}
        is_pushed = run.weights_transport(sent, self.total_bytes if self.on_gpu else 0) == "peer"
        if shard.count == 1 and not is_pushed and has_own_engine:
            return found
        regions = {name: size for name, size in found.items() if name not in ("kv", "CUDA context")}
        regions["weights"] = weights_bytes(self.config, dtype, shard, run.quantization)
        if run.rollout_is_quantized:
            regions[COPIES] = copies_bytes(self.config, run.engine.quantization, shard)
        if run.lora is not None:
            regions["adapter"] = Places.of(self.config, lora_of_run(run.lora, self.config), shard).size * itemsize
        if is_pushed:
            regions["new weights"] = sent
        self._add_kv(regions, {}, run, dtype, prompts, shard.config_of(self.config))
        if self.on_gpu:
            regions |= {"peer": arena_bytes(shard.count)} if shard.count > 1 else {}
            regions["CUDA context"] = CONTEXT_BYTES
        return regions

    def dtype_of(self, run):
        """The name of the dtype of weights and activations."""
        return run.train.dtype or (self.config.dtype if self.on_gpu else "float32")

    def _add_kv(self, regions, notes, run, dtype, prompts, config, expected=0):
        """The KV cache: on a GPU what gpu_memory_utilization leaves, at most what all sequences can use.

        config: the model's, or that of the part of it that a process has. expected: bytes that the engine leaves for
        the graphs of training. Returns the bytes that the longest sequence needs, or all where their number is given.
        """
        engine = run.engine
        seqs = min(engine.max_num_seqs, engine.max_num_batched_tokens)
        sizes = BlockSizes.of(config, BLOCK_SIZE, device.dtype(dtype), seqs, engine.max_num_batched_tokens)
        verified = max(longest_verified(engine), 1)
        state_bytes = state_bytes_of(config, seqs, device.dtype(dtype), verified)
        limit = longest_sequence(config, engine)

        def blocks_of(prompt):
            return blocks_needed(min(prompt + run.train.max_completion_length, limit), BLOCK_SIZE)

        least = blocks_of(max(prompts))
        if engine.num_gpu_blocks_override is not None:
            least = blocks = engine.num_gpu_blocks_override
            notes["kv"] = f"engine.num_gpu_blocks_override = {blocks}"
        elif self.on_gpu:
            # The cache is sized before the first training phase.
            others = sum(regions.values()) - regions.get("activations", 0) + GPU_MARGIN_BYTES + CONTEXT_BYTES
            # Each of the processes that share a GPU has a part of its memory.
            own_bytes = self.total_bytes // self.num_sharing
            share = int(own_bytes * engine.gpu_memory_utilization) - regions["weights"] - regions.get("new weights", 0)
            own = regions["engine activations"] + regions.get("attention", 0) + state_bytes + regions.get(COPIES, 0)
            room = min(share - own, own_bytes - others - state_bytes)
            left = min(room, own_bytes - others - state_bytes - expected)
            of_sequence = min(sizes.blocks_in(room), blocks_needed(limit, BLOCK_SIZE))
            most = engine.max_num_seqs * (blocks_needed(limit, BLOCK_SIZE) + 1)
            blocks = max(min(max(sizes.blocks_in(left), of_sequence), most), 0)
            notes["kv"] = f"{blocks * BLOCK_SIZE:,} tokens, engine.gpu_memory_utilization = "
            notes["kv"] += f"{engine.gpu_memory_utilization}"
        else:
            prompts, numerator, denominator = drawn_at_once(self, run, prompts)
            wanted = run.train.generation.num_drawn_each * sum(blocks_of(n) + 1 for n in prompts)
            wanted = -(-wanted * numerator // denominator)
            wanted = min(wanted, engine.max_num_seqs * (least + 1))
            blocks = max(least, min(wanted, sizes.blocks_in(CPU_CACHE_BYTES)))
            notes["kv"] = f"{blocks * BLOCK_SIZE:,} tokens"
        regions["kv"] = sizes.nbytes(blocks) + state_bytes
        return sizes.nbytes(least) + state_bytes

    def _prompts(self, max_prompt_length):
        """(the lengths of all prompts of a run with `[rewards]`, a list; tokens that all of them begin with)."""
        of_data = dataclasses.replace(self.run.data, max_prompt_length=max_prompt_length)
        limit = longest_sequence(self.config, self.run.engine)
        arguments = of_data.train, of_data, self.tokenizer, limit, self.config.vocab_size
        # The schemas of tools are part of each prompt.
        with closing(load_agents(self.run, self.tokenizer)) if self.run.has_episodes else nullcontext() as agents:
            tools, given = agents and agents.prompt_tools, self.run.given_limit
            found = data.load_prompts(*arguments, tools=tools, completion_limit=given)
        if self.keeps_data and of_data == self.run.data:
            kept_data.keep(kept_data.prompts_key(self.run, limit), found)
        ids = [list(prompt.prompt_token_ids) for prompt in found.prompts]
        # All prompts begin with what the first and the last in alphabetical order begin with.
        common = len(os.path.commonprefix([min(ids), max(ids)])) if ids else 0
        return list(map(len, ids)), common

    def rows(self, run):
        """The rows of a run whose trainer has a file of them, read once for all variants that read the same."""
        key = kept_data.rows_key(run)
        if key not in self._rows:
            self._rows[key] = self.trainer.load_rows(run.data.train, run, self, self.tokenizer)
            if self.keeps_data and key == kept_data.rows_key(self.run):
                kept_data.keep(key, self._rows[key])
        return self._rows[key]


def gpu_properties():
    """The device.Properties of the GPU of plans: of this process's, or where it has none of an H200."""
    return device.properties() if device.name() == "cuda" else device.GPUS["h200"]


def _generate(planner, dtype, run, prompts, communicator=None):
    """Let the engine's largest step reserve its activations: bytes of attention's workspace on a GPU.

    communicator: the Communicator of the ranks that train, or None.
    """
    config, engine, parts = planner.config, run.engine, run.deploy.ranks_of_engine
    model = Transformer(config, weights_of(run, communicator)(config, dtype, region=SHARED))
    model.adapter = adapter_of(run, config, dtype, SHARED)
    seqs, tokens = engine.max_num_seqs, engine.max_num_batched_tokens
    if not planner.on_gpu:
        # Each of several ranks has its share of the completions, and rank 0 draws those of the report at the end.
        n = run.train.generation.num_drawn_each
        prompts, numerator, denominator = drawn_at_once(planner, run, prompts)
        seqs = min(seqs, -(-n * len(prompts) * numerator // denominator))
        full, rest = divmod(seqs, n)
        # The rest that is no whole group may be of two.
        sizes = [n] * full + [rest - rest // 2, rest // 2][: min(rest, 2)]
        lengths, common = planner.prompts(run.data.max_prompt_length)
        steps = sizes, [1] * REPORTED_PROMPTS
        tokens = min(
            tokens, max(_first_steps(engine, lengths, each, common, config.has_linear_attention) for each in steps)
        )
    limit = longest_sequence(config, engine)
    # With "auto" other devices have no steps with drafts.
    verified = longest_verified(engine) if planner.on_gpu or engine.speculative_method == "ngram" else 0
    if parts > 1:
        model.ranks = TensorParallel(PlannedRank(communicator.rank % parts, parts), config.vocab_size)
    model = with_gathered(with_copies(with_own_rows(model), engine.quantization))
    runner = Runner(model, Context(), BLOCK_SIZE, tokens, min(seqs, tokens), limit, True, verified)
    if runner.copies is not None:
        runner.refresh()
    runner.reserve_activations()
    if not planner.on_gpu:
        return 0
    blocks = engine.num_gpu_blocks_override
    if blocks is None:
        blocks = int(planner.total_bytes * engine.gpu_memory_utilization) // runner.block_bytes
    return runner.workspace_bytes(blocks * BLOCK_SIZE, engine.enforce_eager)


def _gathered_bytes(run, config, dtype, communicator):
    """Bytes of the layers that an engine of a model in parts gathers. To be called within shapes_only."""
    weights = weights_of(run, communicator, is_trained=False)(config, dtype, region=SHARED)
    return with_gathered(Transformer(config, weights)).weights.own_bytes


def drawn_at_once(planner, run, prompts):
    """(lengths of the longest prompts whose groups are drawn at one time, a list; numerator and denominator of the
    share of their completions that an engine of the ranks that train has).

    prompts: the lengths of the longest ones of one generation.
    """
    if not run.generates_beside or run.deploy.num_infer_gpus:
        return prompts, run.deploy.ranks_of_engine, run.num_ranks
    options, generation = run.asynchronous, run.train.generation
    # Generations that have room, and those that the staleness allows.
    count = max(options.queue_maxsize // generation.num_completions_each // len(prompts), 1)
    if "cap" in options.staleness:
        count = min(count, options.max_staleness + 1)
    lengths, _ = planner.prompts(run.data.max_prompt_length)
    epochs = -(-count * len(prompts) // len(lengths))
    # Each rank has whole groups.
    return sorted(lengths * epochs, reverse=True)[: count * len(prompts) : run.num_ranks], 1, 1


def _first_steps(engine, lengths, sizes, common, has_states):
    """Tokens of the largest step that begins groups of so many completions each.

    lengths: those of all prompts, of which the groups have those that make most tokens; common: their first tokens in
    common. has_states: whether a sequence resumes at states of linear attention alone.
    """
    caching, found = engine.enable_prefix_caching, []
    unique, counts = np.unique(lengths, return_counts=True)
    # Several epochs of few prompts.
    counts *= -(-len(sizes) // len(lengths))

    def tokens(length, size, index):
        # Completions that began in the first step have a token in the second.
        return (*steps_of_group(length, size, BLOCK_SIZE, caching, has_states), size)[index]

    for index in range(2):
        order = np.argsort([-tokens(length, sizes[0], index) for length in unique.tolist()], kind="stable")
        chosen, total = np.repeat(unique[order], counts[order]).tolist(), 0
        for number, (length, size) in enumerate(zip(chosen, sizes, strict=False)):
            # Full blocks of the first prompt, with which the others begin; its states are not there before the step
            # ends.
            shares = caching and number and index == 0 and not has_states
            cached = min(common, length - 1) // BLOCK_SIZE * BLOCK_SIZE if shares else 0
            total += tokens(length, size, index) - cached
        found.append(total)
    return max(found)


def operator_bytes(sizes, config, dtype, shares=False):
    """Bytes of the arrays that operators make for themselves in a micro-batch of BatchSizes.

    dtype: its name, of the activations. shares: whether sequences may have prefixes in the rows of others.
    """
    # The blocks run one after another.
    blocks = [block for blocks in config.blocks for block in blocks]
    of_blocks = config, dtype, sizes.rows, sizes.sequences, shares
    in_blocks = max(block.operator_bytes(*of_blocks) for block in blocks)
    of_head = config.hidden_size, config.vocab_size, device.dtype(dtype), sizes.is_filtered
    return in_blocks + logprob.operator_bytes(sizes.logits, sizes.at_once, *of_head)


def step_of(planner, run):
    """The Step of a Planner's trainer for `run`, a variant of its run."""
    return planner.trainer.planned_step(planner, run)


def amount(nbytes):
    """Bytes as text: GiB with two places, below 0.1 GiB MiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / (1 << 20):.2f} MiB"
