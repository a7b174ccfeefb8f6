"""Tensor-parallel inference: each rank has a shard of the model (model/shard.py); the bits are those of one rank.

    every layer     qkv of own heads -> attention -> GATHER -> own columns of o + residual -> GATHER
                    gate and up of own columns -> SwiGLU -> GATHER -> own columns of down + residual -> GATHER
    head            logits of own tiles -> GATHER -> whole rows

Gathers copy, and no rank adds what another one has computed: there are no sums over ranks, whose order would have to
be that of one rank's GEMM. Norms are computed on whole rows, by all ranks.

Two ways to run ranks:

    generation      rank 0 has the engine; the others replay its steps, whose arrays it sends (lead, follow)
    scoring         all ranks do the same calls

On the cpu device a rank is a process, and whole rows of logits reach every rank: the order of a row's sums runs through
all of its tiles there (kernels/nn/row_sum_cpu.py).
"""

import numpy as np

from rlnumba.distributed.launch import launch
from rlnumba.engine.check import Agreement, compare, draw_rollouts
from rlnumba.engine.core import Engine
from rlnumba.engine.llm import LLM
from rlnumba.kernels.gemm.ops import linear
from rlnumba.kernels.logprob import slices
from rlnumba.kernels.logprob.chunked import forward_rows, logp_of_logits
from rlnumba.model.config import LM_HEAD
from rlnumba.model.layers import PackedAttention
from rlnumba.model.shard import Shard
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model, pack
from rlnumba.runtime import device

# What ranks other than 0 read of a step's arrays (runner.step_arrays); the others are for sampling.
ARRAYS = (
    *("input_ids", "position_ids", "slot_mapping", "block_tables", "cu_seqlens", "context_lens"),
    *("shared_prefix_lens", "group_sizes", "rows"),
)


class TensorParallel:
    """What the ranks of a Communicator do together in the forward of one model: Transformer.ranks.

    vocab_size: of the model. All ranks call each method at the same time, but for lead and end.
    """

    def __init__(self, communicator, vocab_size):
        self.communicator, self.vocab_size = communicator, vocab_size
        self.rank, self.count = communicator.rank, communicator.world_size

    def gather_columns(self, part, out):
        """Write and return out (N, C), whose columns are those of the ranks' parts (N, C / count), in their order."""
        arrived = device.xp().empty((self.count, *part.shape), part.dtype)
        self.communicator.gather(part, arrived)
        out.reshape(part.shape[0], self.count, part.shape[1])[...] = arrived.transpose(1, 0, 2)
        return out

    def own_columns(self, x):
        """A copy (N, C / count) of this rank's columns of x (N, C)."""
        columns = x.shape[1] // self.count
        return device.xp().ascontiguousarray(x[:, self.rank * columns : (self.rank + 1) * columns])

    def logits(self, hidden, lm_head, out):
        """Write the logits (N, V) float32 of hidden states (N, D). lm_head: this rank's rows of the head."""
        rows, xp = len(hidden), device.xp()
        tokens = [Shard(rank, self.count).tokens(self.vocab_size) for rank in range(self.count)]
        widest = max(each.stop - each.start for each in tokens)
        sent, arrived = xp.empty(rows * widest, np.float32), xp.empty((self.count, rows * widest), np.float32)
        linear(hidden, lm_head, sent[: rows * len(lm_head)].reshape(rows, len(lm_head)))
        self.communicator.gather(sent, arrived)
        for each, part in zip(tokens, arrived, strict=True):
            width = each.stop - each.start
            out[:, each] = part[: rows * width].reshape(rows, width)

    def linear_logp(self, hidden, lm_head, ids, temperature, logp, lse, entropy, top1):
        """kernels.logprob.ops.linear_logp, with its bits. lm_head: this rank's rows of the head."""
        step = forward_rows(self.vocab_size)
        z = device.xp().empty((min(step, len(hidden)), self.vocab_size), np.float32)
        for rows, count in slices(len(hidden), step):
            self.logits(hidden[rows], lm_head, z[:count])
            of_rows = (array[rows] for array in (logp, lse, entropy, top1))
            logp_of_logits(z[:count], ids[rows], temperature, *of_rows)

    def lead(self, arrays, shape, num_blocks):
        """Let the other ranks do a step, too: Runner.follow's arguments. Rank 0 alone, the others `follow`."""
        arrays = {name: arrays[name] for name in ARRAYS if name in arrays}
        self.communicator.objects((arrays, shape, num_blocks))

    def end(self):
        """Let the other ranks return from `follow`. Rank 0 alone."""
        self.communicator.objects(None)


def follow(model, config):
    """Do the steps of rank 0's engine until it calls `end`. config: its EngineConfig."""
    runner = Engine(model, None, config).runner
    while (step := model.ranks.communicator.objects(None)[0]) is not None:
        runner.follow(*step)


def on_ranks(function, count, folder, dtype, heads, *arguments):
    """function(model, *arguments) on `count` ranks, each with its shard of the model in a folder: the result of rank 0.

    function, arguments: what can be pickled; progress, the last of them, is None on other ranks. dtype, heads: as of
    load_model. Raises RankError for the first rank that fails.
    """
    return launch(_with_shard, count, function, folder, dtype, heads, arguments)[0]


def _with_shard(communicator, function, folder, dtype, heads, arguments):
    """What each rank does."""
    shard = Shard(communicator.rank, communicator.world_size)
    model = load_model(folder, dtype, heads, shard=shard)
    model.ranks = TensorParallel(communicator, model.config.vocab_size)
    if shard.rank:
        *arguments, _ = arguments
        function(model, *arguments, None)
        return None
    return function(model, *arguments)


def generate(model, tokenizer_folder, config, prompts, params, progress=None):
    """LLM.generate on all ranks: its result on rank 0. tokenizer_folder: None for no texts."""
    if model.ranks.rank:
        return follow(model, config)
    llm = LLM(model, tokenizer_folder and Tokenizer.from_folder(tokenizer_folder), config)
    outputs = llm.generate(prompts, params, progress)
    model.ranks.end()
    return outputs


def check_agreement(count, folder, dtype=None, max_tokens=48, temperature=1.0, seed=0, progress=None):
    """engine.check.check_agreement of a rollout on `count` ranks with the training forward of one: Agreement.

    Beside the log-probs, whole rows of logits are compared, those of each sequence's last token.
    """
    rollouts, rows = on_ranks(_rollouts, count, folder, dtype, LM_HEAD, max_tokens, temperature, seed, progress)
    model = load_model(folder, dtype)
    tokens, equal, largest, worst = compare(model, rollouts, temperature)
    rows_differ = last_logits(model, rollouts).tobytes() != rows.tobytes()
    operator = None
    if worst is not None:
        operator = f"the forward on {count} ranks (without --tp, check names an operator that differs on one)"
    elif rows_differ:
        operator = f"the logits of other tokens, on {count} ranks"
    return Agreement(tokens, equal, largest, operator)


def _rollouts(model, max_tokens, temperature, seed, progress):
    """(rollouts of rank 0's engine, last_logits of them) on each rank."""
    rollouts = None
    if model.ranks.rank:
        follow(model, None)
    else:
        rollouts = draw_rollouts(LLM(model), max_tokens, temperature, seed, progress)
        model.ranks.end()
    rollouts = model.ranks.communicator.objects(rollouts)[0]
    return rollouts, last_logits(model, rollouts)


def last_logits(model, rollouts):
    """The logits (B, V) float32, on the host, after the last token of each rollout (engine.check.Rollout)."""
    batch, xp = pack([each.token_ids for each in rollouts]), device.xp()
    attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen, model.config.scale)
    hidden = model.forward(batch.input_ids, batch.position_ids, attention)
    logits = xp.empty((len(rollouts), model.config.vocab_size), np.float32)
    model.logits(xp.ascontiguousarray(hidden[batch.cu_seqlens[1:] - 1]), logits)
    return device.to_host(logits)
