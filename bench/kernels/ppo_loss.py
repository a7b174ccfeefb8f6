"""PPO's loss kernel against the memory floor of its arrays.

    python bench/kernels/ppo_loss.py                 a step of 64 completions of 512 tokens, 2^20 tokens, 2^22
    python bench/kernels/ppo_loss.py 65536

Derivatives and sums are compared with the reference before anything is timed. The rows of a micro-batch are its
completions in another order. Times are of a graph of calls on arrays of their own, together larger than L2. The floor
is the bytes that are read and written at the rate of a copy of 2 GiB. Beside it: a copy of as many bytes, timed in the
same way, which its start and its end keep from that rate, too. Bar: 1.2 times the floor, from FEWEST_TOKENS tokens on;
with fewer, start and end take most of the time.
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cupy
from harness import copy_gbs, copy_us, graph_time_us
from report import row

from rlnumba.config import PPOConfig
from rlnumba.kernels.rl.ppo_loss import (
    SUMS,
    PPOOutputs,
    RolloutArrays,
    TokenPredictions,
    ppo_loss,
    ppo_loss_blocks,
    ppo_loss_ref,
)
from rlnumba.runtime import device

BAR, FEWEST_TOKENS = 1.2, 1 << 21
LENGTH, CLOSE = 512, 1e-6
CACHE_BYTES = 60 << 20
FEWEST_SETS, MOST_SETS = 3, 96
CONFIG, SCALE = PPOConfig(), 1e-3


def inputs(tokens, seed):
    """Arrays of TokenPredictions, then of RolloutArrays, float32, on the host."""
    generator = np.random.default_rng(seed)
    completions = generator.permutation(-(-tokens // LENGTH))
    rows = (completions[:, None] * LENGTH + np.arange(LENGTH)).reshape(-1)
    rows = rows[rows < tokens].astype(np.int32)
    noise = generator.standard_normal((6, tokens), np.float32)
    old, old_values = -np.abs(noise[0]), noise[1]
    logprobs, values = old[rows] + np.float32(0.2) * noise[2], old_values[rows] + np.float32(0.2) * noise[3]
    return logprobs, np.abs(noise[2]), values, rows, old, noise[4], old_values, old_values + noise[5]


def call(tokens, seed):
    """(function that calls the operator, its arrays)."""
    given = [device.asarray(array) for array in inputs(tokens, seed)]
    outputs = cupy.empty(tokens, np.float32), cupy.empty(tokens, np.float32)
    partials = cupy.empty((ppo_loss_blocks(tokens), SUMS), np.float32)
    predictions, rollout, written = (
        TokenPredictions(*given[:4]),
        RolloutArrays(*given[4:]),
        PPOOutputs(*outputs, partials),
    )
    return lambda: ppo_loss(predictions, rollout, CONFIG, SCALE, written), [*given, *written]


def largest_error(tokens):
    """Of derivatives and sums, relative to the largest of each.

    Tokens are left out that are so close to a bound of the clipping that rounding decides whether they are clipped.
    """
    run, arrays = call(tokens, 0)
    run()
    found = [device.to_host(array).astype(np.float64) for array in arrays[-3:]]
    found[-1] = found[-1].sum(axis=0)
    given = inputs(tokens, 0)
    expected = ppo_loss_ref(TokenPredictions(*given[:4]), RolloutArrays(*given[4:]), CONFIG, SCALE)
    near = near_bound(*inputs(tokens, 0))
    differences = [np.abs(a - b) for a, b in zip(found, expected, strict=True)]
    for of_tokens in differences[:2]:
        of_tokens[near] = 0
    return max(float(d.max() / np.abs(b).max()) for d, b in zip(differences, expected, strict=True))


def near_bound(logprobs, entropy, values, rows, old_logprobs, advantages, old_values, returns):
    """(T,) bool: whether a token's ratio or value is within CLOSE of a bound of its clipping."""
    ratio_distance = np.abs(np.exp(logprobs.astype(np.float64) - old_logprobs[rows]) - 1)
    value_distance = np.abs(values.astype(np.float64) - old_values[rows])
    bounds = (ratio_distance, CONFIG.cliprange), (value_distance, CONFIG.cliprange_value)
    return np.any([np.abs(distance - bound) < CLOSE for distance, bound in bounds], axis=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", nargs="*", type=int, default=[32_768, 1 << 20, 1 << 22])
    sizes = parser.parse_args().tokens
    device.select("cuda")
    ceiling = copy_gbs()
    for tokens in sizes:
        error = largest_error(tokens)
        nbytes = sum(array.nbytes for array in call(tokens, 0)[1])
        sets = min(max(2 * CACHE_BYTES // nbytes + 1, FEWEST_SETS), MOST_SETS)
        us = graph_time_us([call(tokens, seed)[0] for seed in range(sets)])
        floor, copy = nbytes / ceiling / 1e3, copy_us(nbytes, sets)
        result = f"{us / floor:.2f} x the floor of {floor:.1f} us, {us:.1f} us; a copy of as many bytes {copy:.1f} us; "
        result += f"error {error:.1e}{'' if error < 1e-4 else '  WRONG'}"
        row(f"ppo_loss, {tokens} tokens, {nbytes / 1e6:.1f} MB", result, f"{BAR} x" if tokens >= FEWEST_TOKENS else "")
        cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
