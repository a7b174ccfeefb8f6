"""The physical floor of the phases of a GRPO step: what a GPU has to read and to compute, at its measured rates.

Generation: each prompt is computed once; a decode step reads the weights and the KV of its contexts, a prompt's once
for its group, and the states of linear attention. Training: 6 FLOP a parameter a token, 4 with an adapter, and 3.5
times the forward's attention; a group's prompt once, the LM head on completions alone, nothing recomputed; the
optimizer's state is read and written once. Several GPUs have equal parts of the sequences, and of the state. For models
without windows.
"""

from typing import NamedTuple

import numpy as np
from shapes import SHAPES

from rlnumba.engine.cache import block_bytes_of, page_pools_of
from rlnumba.model.config import ModelConfig
from rlnumba.model.weights import parameters
from rlnumba.runs.micro_batch import cost_of
from rlnumba.runtime import device

BLOCK = 16
# Bytes of a parameter's state: m, v and master by train.optim and train.master_weights.
STATE_BYTES = {("adamw_torch", True): 12, ("adamw_bf16", True): 8, ("adamw_8bit", True): 6, ("adamw_8bit", False): 2}


class Rates(NamedTuple):
    """What a GPU was measured to do: bytes a second of a copy, read and written, and FLOP a second of a large GEMM."""

    bytes_per_s: float = 4.3e12
    flop_per_s: float = 7e14


class Work:
    """What a model of a shape has to multiply. layers, head: multiplications of a token, each by a parameter; linear,
    quadratic: the layers' forward of L tokens takes linear L + quadratic L^2."""

    def __init__(self, shape):
        self.config = config = ModelConfig.from_dict(SHAPES[shape])
        self.layers = sum(block.products(config) for blocks in config.blocks for block in blocks)
        self.head = config.vocab_size * config.hidden_size
        self.parameters = sum(each.size for each in parameters(config))
        one, two = cost_of([1], config), cost_of([2], config)
        self.quadratic = (two - 2 * one) / 2
        self.linear = one - self.quadratic

    def forward(self, length):
        """Multiplications of the layers' forward of a sequence."""
        return self.linear * length + self.quadratic * length**2


def generation_s(cell, rates):
    """The least seconds of a generation of a Cell (table.py), on each of its GPUs at once."""
    work = Work(cell.shape)
    sequences, groups = cell.completions // cell.gpus, cell.groups // cell.gpus
    # The first token of a completion follows from the prompt's last row.
    steps = np.arange(1, cell.length, dtype=np.float64)
    prompts = 2 * groups * (work.forward(cell.prompt) + work.head) / rates.flop_per_s
    return prompts + float(decode_steps_s(work, groups, sequences, cell.prompt, steps, rates).sum())


def decode_steps_s(work, groups, sequences, prompt, steps, rates):
    """The least seconds of decode steps: array, as steps, each sequence's tokens behind its group's prompt."""
    bf16, contexts = device.dtype("bfloat16"), prompt + steps
    kv_bytes = block_bytes_of(work.config, BLOCK, bf16) / BLOCK
    # Of the two planes of a state a step reads the upper one; both once in 64 steps, which is left out.
    state_bytes = sum(pool.block_bytes for pool in page_pools_of(work.config, bf16)) / 2
    read = 2 * (work.layers + work.head) + state_bytes * sequences
    read = read + kv_bytes * (groups * prompt + sequences * steps)
    flop = 2 * sequences * (work.head + work.forward(contexts + 1) - work.forward(contexts))
    return np.maximum(read / rates.bytes_per_s, flop / rates.flop_per_s)


def training_s(cell, rates, optim="adamw_torch", master_weights=True):
    """The least seconds of the training phase of a Cell, on each of its GPUs at once."""
    work, trains_all = Work(cell.shape), cell.tuned == "all"
    sequences, groups = cell.completions // cell.gpus, cell.groups // cell.gpus
    tokens = groups * cell.prompt + sequences * cell.length
    prompt, whole = work.forward(cell.prompt), work.forward(cell.prompt + cell.length)
    # What is no parameter's: attention's scores, and the states of linear attention.
    others = groups * prompt + sequences * (whole - prompt) - work.layers * tokens
    flop = (6 if trains_all else 4) * (work.layers * tokens + work.head * sequences * cell.length) + 7 * others
    seconds = flop / rates.flop_per_s
    if trains_all:
        # The gradient is read, the weights are written.
        moved = 2 * STATE_BYTES[optim, master_weights] + 4 + 2
        seconds += work.parameters * moved / cell.gpus / rates.bytes_per_s
    return seconds
