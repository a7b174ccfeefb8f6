"""Draws the pictures of all pages: python docs/make_pictures.py [folder]

Those of the kernel pages are here, a function a picture, named in PICTURES; curves are in docs/learning_pictures.py.
Tile shapes, bytes and layouts come from the kernels' modules, or from the small functions below that tests/test_docs.py
holds against the instructions' twins.
"""

import ast
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from rlnumba.kernels.attention import sm90_backward_mainloop, sm90_config, softmax
from rlnumba.kernels.attention.sm90_decode.config import decode_config
from rlnumba.kernels.logprob.sm90 import chunk_columns
from rlnumba.kernels.logprob.sm90_kernel import LogprobConfig
from rlnumba.kernels.nn import rmsnorm
from rlnumba.kernels.nn.row_sum import TILE_COLUMNS
from rlnumba.kernels.philox import noise_key
from rlnumba.kernels.sampling import ops as sampling
from rlnumba.kernels.sampling import scan

FOLDER = pathlib.Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN, GREY, RED, PURPLE = "#4c78a8", "#f58518", "#54a24b", "#bab0ac", "#e45756", "#b279a2"
PALE = "#f2f0ee"
KIB = 1024
# Qwen3-0.6B, whose shapes the pages use: query heads of a key head, columns of a head, vocabulary, hidden size.
GROUP, HEAD_DIM, VOCABULARY, HIDDEN = 2, 128, 151_936, 1024


def box(axis, x, y, width, height, color, text="", alpha=0.85, size=9, edge="black"):
    axis.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=0.7, alpha=alpha))
    if text:
        axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(axis, start, end, text="", offset=(0, 0.15), color="black", size=8):
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=color, linewidth=1.1))
    if text:
        x, y = (start[0] + end[0]) / 2 + offset[0], (start[1] + end[1]) / 2 + offset[1]
        axis.text(x, y, text, fontsize=size, ha="center", color=color)


def note(axis, x, y, text, size=8, **options):
    axis.text(x, y, text, fontsize=size, **{"ha": "center", "va": "center", **options})


def bare(axis, left, right, bottom, top, title=""):
    axis.set_xlim(left, right)
    axis.set_ylim(bottom, top)
    axis.axis("off")
    if title:
        axis.set_title(title, fontsize=10)


def lane(axis, name, y, height=0.6):
    axis.text(-0.15, y + height / 2, name, ha="right", va="center", fontsize=9)


def kib(nbytes):
    return f"{nbytes / KIB:g} KiB"


def fragment_place(thread, word, of_b=False):
    """(line, k) of the first of the two values in a word of a thread's fragment; see kernels/ptx/sm80.py."""
    g, t = thread // 4, thread % 4
    lower, further = (word // 2, word % 2) if of_b else (word % 2, word // 2)
    return g + 8 * lower, 2 * t + 8 * further


def accumulator_place(thread, i):
    """(row, column) of accumulator i of a thread of a warp, or of a warpgroup for a product of 64 rows."""
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    return 16 * warp + g + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * t + i % 2


def swizzled(line, chunk):
    """Where a 16-byte chunk of a 128-byte line lies in the line; see kernels/ptx/sm90.py."""
    return chunk ^ (line & 7)


def product_tiles():
    """What a block of the sm90 GEMM holds in shared memory, and which warps work when."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), gridspec_kw={"width_ratios": [1, 1.25]})
    left.set_title("one block, one tile of C (128 x 256)", fontsize=10)
    for stage in range(4):
        box(left, 0.3 + stage * 0.75, 5.6, 0.68, 0.9, BLUE, f"A\n{stage}", size=8)
        box(left, 0.3 + stage * 0.75, 3.7, 0.68, 1.8, ORANGE, f"B\n{stage}", size=8)
    left.text(1.8, 6.7, "shared memory: 4 stages of 64 columns of K", ha="center", fontsize=8)
    box(left, 4.6, 5.2, 2.9, 1.0, GREEN, "warpgroup 1\n64 x 256 in registers", size=8)
    box(left, 4.6, 3.9, 2.9, 1.0, GREEN, "warpgroup 2\n64 x 256 in registers", size=8)
    box(left, 4.6, 2.2, 2.9, 0.8, GREY, "staged output, 2 x 16 KiB", size=8)
    box(left, 0.3, 2.2, 2.95, 0.8, GREY, "producer warp", size=8)
    arrow(left, (1.8, 3.0), (1.8, 3.65), "TMA", (0.5, -0.05))
    arrow(left, (3.4, 5.4), (4.5, 5.6), "wgmma", (0, 0.2))
    arrow(left, (3.4, 4.6), (4.5, 4.4))
    arrow(left, (6.0, 3.85), (6.0, 3.05), "stmatrix", (0.6, 0))
    arrow(left, (6.0, 2.15), (6.0, 1.3), "TMA store to C", (0.0, -0.75))
    bare(left, 0, 8, 0.4, 7.2)
    right.set_title("in time: the next tile's loads and wgmma overlap the last tile's store", fontsize=10)
    for name, y in {"producer": 3, "warpgroups": 2, "TMA store": 1}.items():
        lane(right, name, y)
    for i in range(16):
        color = BLUE if i < 8 else ORANGE
        box(right, i * 0.6, 3, 0.55, 0.6, color, str(i % 8), size=7, alpha=0.7)
    for i in range(8):
        box(right, 1.2 + i * 0.6, 2, 0.55, 0.6, BLUE, str(i), size=7, alpha=0.7)
        box(right, 6.6 + i * 0.6, 2, 0.55, 0.6, ORANGE, str(i), size=7, alpha=0.7)
    box(right, 6.05, 2, 0.5, 0.6, GREY, "", alpha=0.9)
    box(right, 6.6, 1, 1.6, 0.6, BLUE, "tile 1", size=8, alpha=0.7)
    right.text(6.3, 1.85, "to shared", fontsize=7, ha="center", va="top")
    note(right, 4.8, 0.3, "numbers: k blocks of 64; blue: tile 1, orange: tile 2")
    bare(right, -2.2, 11.6, 0, 4.2)
    return figure


def attention_tiles():
    """Which scores an item computes, and what a block holds of them."""
    config = sm90_config.attention_config(HEAD_DIM, "bfloat16", GROUP)
    keys, rows, segment = softmax.TILE_KEYS, sm90_config.TILE_ROWS, softmax.SEGMENT_KEYS
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 5.6), gridspec_kw={"width_ratios": [1.1, 1]})
    lengths, step = (9, 14), 1.0
    total = sum(lengths)
    start = 0
    for number, length in enumerate(lengths):
        for row in range(length):
            for key in range(row + 1):
                color = BLUE if key < row else GREY
                box(left, start + key, total - start - row - 1, step, step, color, alpha=0.25, edge="white")
        left.plot(
            [start, start + length, start + length, start, start],
            [total - start, total - start, total - start - length, total - start - length, total - start],
            color="black",
            linewidth=0.8,
        )
        note(left, start + length * 0.72, total - start - length * 0.22, f"sequence {number}")
        start += length
    row = 9
    for key in range(row + 1):
        y = total - lengths[0] - row - 1
        box(left, lengths[0] + key, y, step, step, ORANGE if key < row else RED, str(key), alpha=0.9, size=7)
    arrow(left, (7.3, total - lengths[0] - row - 0.5), (lengths[0] - 0.1, total - lengths[0] - row - 0.5))
    note(
        left,
        3.7,
        total - lengths[0] - row - 0.5,
        f"a work item: {rows} tokens of\n{config.consumers} query heads, one a\n"
        f"consumer; tiles of {keys}\nkeys from left to right",
        size=8,
    )
    note(left, 14.5, -1.0, f"keys of the packed batch, tiles of {keys}", size=9)
    left.text(-0.7, total / 2, f"queries, tiles of {rows}", rotation=90, ha="center", va="center", fontsize=9)
    note(left, 14.5, -2.2, "blue: all visible   grey, red: tiles on the diagonal, masked   white: never loaded")
    bare(left, -1.5, total + 0.5, -2.7, total + 0.5, "the scores of one head, of which only the lower triangle exists")

    parts = [
        (f"q of {config.consumers} heads", config.consumers * config.tile_bytes, GREEN),
        ("merged segments,\nthen the output", config.consumers * config.merged_bytes, GREY),
        (f"ring of {config.stages} tiles of k", config.stages * config.tile_bytes, BLUE),
        (f"ring of {config.stages} tiles of v", config.stages * config.tile_bytes, ORANGE),
    ]
    y, scale = 10.2, 9.0 / (sm90_config.SHARED_LIMIT)
    for name, nbytes, color in parts:
        height = nbytes * scale
        y -= height
        box(right, 0.2, y, 3.6, height, color, f"{name}\n{kib(nbytes)}", size=8, alpha=0.75)
    note(right, 2.0, 10.55, f"shared memory: {config.layout.nbytes:,} of {sm90_config.SHARED_LIMIT:,} bytes")
    box(right, 5.4, 8.5, 4.9, 1.3, GREY, "producer: two warps\nschedule, TMA, 56 registers", size=8)
    for consumer in range(2):
        y = 5.5 - consumer * 2.9
        box(right, 5.4, y, 4.9, 2.3, GREEN, "", alpha=0.35)
        note(
            right,
            7.85,
            y + 1.15,
            f"consumer {consumer}: head {'h + 1' if consumer else 'h'}, \n"
            f"232 registers a thread:\n"
            f"{HEAD_DIM // 2} accumulators of O\n{keys // 2} scores, then probabilities\n"
            f"{HEAD_DIM // 4} words of q, {keys // 4} of p\n16 row sums",
            size=8,
        )
    arrow(right, (5.3, 9.0), (3.9, 8.9))
    arrow(right, (3.9, 4.1), (5.3, 6.2), "wgmma", (-0.25, 0.25))
    arrow(right, (3.9, 2.1), (5.3, 3.6))
    note(right, 5.0, 0.35, f"after {segment:,} keys a segment ends: its sums are merged into the grey part, in order")
    bare(right, 0, 10.5, 0, 11, "one block on its SM")
    return figure


def attention_time():
    """Which unit is busy when, over a few tiles of keys."""
    figure, axis = plt.subplots(figsize=(11.5, 3.6))
    names = {"TMA": 5.2, "tensor cores": 3.9, "consumer 0, exponentials": 2.6, "consumer 1, exponentials": 1.3}
    for name, y in names.items():
        lane(axis, name, y, 0.8)
    for i in range(6):
        box(axis, i * 2.0, 5.2, 0.9, 0.8, BLUE, f"k{i}", size=8, alpha=0.6)
        box(axis, i * 2.0 + 0.95, 5.2, 0.9, 0.8, ORANGE, f"v{i}", size=8, alpha=0.6)
    for consumer, first, color in ((0, 1.2, GREEN), (1, 2.2, PURPLE)):
        y = 2.6 - 1.3 * consumer
        for i in range(5):
            x = first + 2.0 * i
            text = f"S{i}" if i == 0 else f"S{i} O{i - 1}"
            box(axis, x, 3.9, 0.95, 0.8, color, text, size=8, alpha=0.7)
            box(axis, x + 1.0, y, 0.95, 0.8, color, f"P{i}", size=8, alpha=0.7)
    note(
        axis,
        5.8,
        0.6,
        "S = Q K^T of a tile, P = its probabilities, O += P V of the tile before. A consumer issues both together,",
    )
    note(
        axis,
        5.8,
        0.15,
        "waits for S only and takes exponentials while the tensor cores finish O, then run the other consumer's.",
    )
    bare(axis, -3.0, 12.5, -0.1, 6.4, "in time (drawn, not measured)")
    return figure


def attention_backward():
    """One step of the backward, and the order in which blocks add to dq."""
    tile = sm90_backward_mainloop.AttentionBackwardConfig(HEAD_DIM, "bfloat16")
    queries = sm90_backward_mainloop.QUERIES
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.4), gridspec_kw={"width_ratios": [1.35, 1]})
    box(left, 0.1, 7.2, 2.2, 1.1, GREEN, f"K, V: {tile.keys} keys\n(stay)", size=8)
    box(left, 0.1, 4.3, 2.2, 1.1, BLUE, f"Q, dO: {queries} queries\n(a ring)", size=8)
    for i, (name, source, y) in enumerate((("S^T", "K Q^T", 7.2), ("dP^T", "V dO^T", 4.3))):
        box(left, 3.6, y, 1.9, 1.1, ORANGE, f"{i + 1}  {name} =\n{source}", size=8)
        arrow(left, (2.35, 7.6 - 2.9 * i), (3.55, y + 0.5))
    arrow(left, (2.35, 5.2), (3.55, 7.3))
    arrow(left, (2.35, 7.3), (3.55, 5.3))
    box(left, 6.4, 7.2, 1.8, 1.1, GREY, "P =\nexp2(S - lse)", size=8)
    box(left, 6.4, 4.3, 1.8, 1.1, GREY, "dS =\nP (dP - delta)", size=8)
    arrow(left, (5.55, 7.75), (6.35, 7.75))
    arrow(left, (5.55, 4.85), (6.35, 4.85))
    arrow(left, (7.3, 7.15), (7.3, 5.45))
    box(left, 9.4, 7.2, 2.5, 1.1, ORANGE, "3  dV += P^T dO\nin registers", size=8)
    box(left, 9.4, 4.3, 2.5, 1.1, ORANGE, "4  dK += dS^T Q\nin registers", size=8)
    arrow(left, (8.25, 7.75), (9.35, 7.75), "registers", (0, 0.2))
    arrow(left, (8.25, 4.85), (9.35, 4.85), "registers", (0, 0.2))
    box(left, 6.1, 1.6, 2.4, 1.1, GREY, f"dS of both,\n{kib(sm90_backward_mainloop.SCORE_BYTES)} shared", size=8)
    arrow(left, (7.3, 4.25), (7.3, 2.75), "stmatrix", (0.65, 0))
    box(left, 9.4, 1.6, 2.5, 1.1, ORANGE, "5  dQ = dS K\nof this key tile", size=8)
    arrow(left, (8.55, 2.15), (9.35, 2.15))
    arrow(left, (10.6, 1.55), (10.6, 0.75))
    note(left, 10.0, 0.4, f"bulk reduce-add in KV order,\n{kib(4 * tile.dq_row_size * queries)} each")
    note(
        left,
        2.8,
        1.9,
        f"orange: the five GEMMs on the tensor cores.\nEach consumer owns {tile.keys // 2} of the keys.",
    )
    bare(left, 0, 12.1, 0, 9, f"one step: {queries} queries of one head x {tile.keys} keys")

    count = 6
    for key in range(count):
        for query in range(2 * key, 2 * count):
            step = 2 * count - 1 - query
            box(
                right,
                key,
                query,
                0.94,
                0.94,
                [BLUE, ORANGE, GREEN, PURPLE, RED, GREY][key],
                str(step),
                size=7,
                alpha=0.6,
            )
    for key in range(count - 1):
        arrow(right, (key + 0.75, 2 * count - 0.25), (key + 1.25, 2 * count - 0.25))
    note(
        right, count / 2, 2 * count + 0.55, "dq of a row of tiles: added from left to right, one block after the other"
    )
    note(right, count / 2, -0.6, f"key tiles of {tile.keys}: a block each, in the order of their work indices")
    note(right, count / 2, -1.3, "numbers: a block's steps, from the last queries to the first")
    right.text(-0.4, count, f"query tiles of {queries}, last on top", rotation=90, ha="center", va="center", fontsize=8)
    bare(right, -1.2, count + 0.8, -1.8, 2 * count + 1.0, "the blocks of one key head of a sequence")
    return figure


def decode_units():
    """Decode: how contexts are split into work items, and what an item computes."""
    config = decode_config(HEAD_DIM, "bfloat16", GROUP, 16)
    segment, keys = softmax.SEGMENT_KEYS, softmax.TILE_KEYS
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.0), gridspec_kw={"width_ratios": [1.15, 1]})
    contexts = [2300, 2150, 2260, 700, 3500]
    scale = 1 / 400
    for number, context in enumerate(contexts):
        y = 5.6 - number * 1.05
        left.text(-0.15, y + 0.35, f"sequence {number}", ha="right", va="center", fontsize=8)
        for first in range(0, context, segment):
            length = min(segment, context - first)
            shared = number < 3 and first + segment <= 2048
            if shared and number:
                box(left, first * scale, y, length * scale, 0.7, "white", "(read above)", size=7)
                continue
            color, name = (GREEN, "one item for 3") if shared else (BLUE, "work item" if length > 140 else "")
            box(left, first * scale, y, length * scale, 0.7, color, name, size=7, alpha=0.6)
    for cut in range(segment, 3600, segment):
        left.plot([cut * scale] * 2, [1.0, 6.5], color=RED, linewidth=1, linestyle="--")
        note(left, cut * scale, 6.7, f"{cut:,}", color=RED)
    note(
        left,
        4.2,
        0.7,
        f"dashed: segments end at absolute positions, every {segment:,} keys. White: not read again, because sequences"
        "\n0 to 2 are a prefix group with 2,048 tokens in common. An item also belongs to one key head.\n"
        "Partials of a sequence merge in ascending order, by the block that finishes last.",
        va="top",
    )
    bare(left, -1.6, 9.4, -0.9, 7.0, "work items: a sequence, a key head and a segment")

    box(right, 0.2, 4.0, 2.0, 3.2, BLUE, f"K tile\n{keys} keys\nx {HEAD_DIM}", alpha=0.6)
    box(right, 2.6, 6.2, 0.7, 1.0, GREEN, "q", alpha=0.8)
    note(right, 2.95, 5.6, f"{GROUP} heads,\npadded\nto {config.rows}", va="top")
    note(right, 3.75, 6.0, "=", size=14)
    box(right, 4.2, 4.0, 0.7, 3.2, ORANGE, "S^T", alpha=0.7)
    note(right, 4.3, 3.7, f"{keys} x {config.rows}: keys\nare the 64 rows\nof wgmma's A", va="top")
    arrow(right, (5.1, 5.6), (6.4, 5.6), "online_softmax_step", (0, 0.2))
    box(right, 6.6, 4.0, 0.7, 3.2, GREY, "P^T", alpha=0.8)
    note(right, 6.9, 3.7, "through shared\nmemory, 16 bits", va="top")
    box(right, 7.9, 5.2, 2.0, 2.0, BLUE, f"V^T tile\n{HEAD_DIM} x {keys}", alpha=0.6)
    note(right, 8.9, 4.85, "(MN-major, as stored)")
    box(right, 8.5, 1.6, 0.8, 2.2, ORANGE, "O^T", alpha=0.7)
    note(right, 8.7, 1.3, f"{HEAD_DIM} x {config.rows} sums in registers")
    arrow(right, (8.9, 4.6), (8.9, 3.9))
    ring = config.stages * 2 * config.tile_bytes
    note(
        right,
        3.0,
        1.4,
        f"an SM holds {config.blocks} such blocks, each with {config.stages} tiles of k and v\n"
        f"({kib(ring)}): {kib(config.blocks * ring)} in flight",
    )
    bare(right, 0, 10.4, 0.4, 7.8, "one tile of a work item: S^T = K Q^T, O^T = V^T P^T")
    return figure


def log_prob_passes():
    """Which part of the (N, V) logits or gradient exists at a time, in the three forms."""
    tile = LogprobConfig("bfloat16", "forward")
    columns = chunk_columns(16_384, HIDDEN, VOCABULARY)
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.8))
    left, middle, right = axes
    for axis in axes:
        box(axis, 1.0, 1.6, 7.0, 4.4, PALE, alpha=1.0)
        axis.text(0.75, 3.8, "rows: tokens", rotation=90, ha="center", va="center", fontsize=8)
        note(axis, 4.5, 6.25, f"columns: a vocabulary of {VOCABULARY:,}")
    for row in range(4):
        for column in range(7):
            box(left, 1.0 + column, 4.9 - 1.1 * row, 1.0, 1.1, ORANGE if (row, column) == (1, 2) else PALE, alpha=0.8)
    note(left, 3.5, 4.35, f"{tile.rows} x\n{TILE_COLUMNS}", size=8)
    arrow(left, (3.5, 3.75), (3.5, 1.15))
    note(
        left,
        4.5,
        0.65,
        "a tile of logits exists in registers only; written are\n4 numbers a row: largest, sum, entropy's sum, argmax",
    )
    note(left, 4.5, -0.35, "1 GEMM of N D V", size=9)
    middle.add_patch(Rectangle((2.9, 1.6), 1.0, 4.4, facecolor=ORANGE, edgecolor="black", alpha=0.75))
    note(middle, 3.4, 3.8, "dz", size=10)
    arrow(middle, (4.1, 3.8), (5.4, 3.8))
    note(
        middle,
        4.5,
        0.65,
        f"at most {columns:,} columns of dz exist at a time, 16 bits each;\n"
        "then dW[chunk] += dz^T h, dh += dz W[chunk]",
    )
    note(middle, 4.5, -0.35, "1 GEMM for the logits again, 2 for the gradients", size=9)
    right.add_patch(Rectangle((1.0, 3.8), 7.0, 1.1, facecolor=ORANGE, edgecolor="black", alpha=0.75))
    note(right, 4.5, 4.35, "2^(z - r): dz but for a factor of the row", size=9)
    arrow(right, (4.5, 3.7), (4.5, 2.6))
    note(
        right,
        4.5,
        0.65,
        "a block of rows keeps the exponentials of all columns\nuntil its lse is known; no logit is computed twice",
    )
    note(right, 4.5, -0.35, "3 GEMMs in all, logp included", size=9)
    bare(left, 0, 9, -0.8, 6.8, "forward")
    bare(middle, 0, 9, -0.8, 6.8, "backward, dlogp known afterwards")
    bare(right, 0, 9, -0.8, 6.8, "one pass, dlogp known beforehand")
    return figure


def gumbel_argmax(axis, weights, noise, title, label, color):
    """Bars, their noise as arrows; returns the index of the largest sum."""
    ids = np.arange(len(weights))
    best = int(np.argmax(weights + noise))
    floor = weights.min() - 1.5
    axis.bar(ids, weights - floor, bottom=floor, color=color, width=0.7, alpha=0.8)
    for i in ids:
        style = {"arrowstyle": "-|>", "color": RED if i == best else "black", "lw": 1.3}
        axis.annotate("", (i, weights[i] + noise[i]), (i, weights[i]), arrowprops=style)
    axis.axhline(weights[best] + noise[best], color=RED, linewidth=0.9, linestyle="--")
    axis.set_xlabel(label, fontsize=9)
    axis.set_xticks(ids)
    axis.set_title(title, fontsize=10)
    return best


def sampling_gumbel():
    """A draw from ten segments of eight tokens; and the candidates of a row with filters."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4))
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1.5, (10, 8)).astype(np.float32)
    name = noise_key(1, [1, 2, 3]), 0, 3
    of_segments = sampling.noise_ref(len(logits), *name, sampling.SEGMENT_NOISE)
    weights = np.log(np.exp(logits).sum(axis=1))
    segment = gumbel_argmax(left, weights, of_segments, "segments: log sum exp s, and noise", "segment", BLUE)
    of_tokens = sampling.noise_ref(logits.size, *name).reshape(logits.shape)
    gumbel_argmax(
        middle, logits[segment], of_tokens[segment], f"tokens of segment {segment}: s, and noise", "token", ORANGE
    )

    row = np.concatenate([rng.normal(0, 1.5, 60_000), rng.normal(7, 1.0, 40)]).astype(np.float32)
    rank, top_k = int(scan.sample_rank(len(row), scan.EXPECTED_IF_FEW)), 40
    maxima = np.sort(rng.choice(row, (scan.MAXIMA, 16)).max(axis=1))[::-1]
    bound, threshold = maxima[rank], np.sort(row)[-top_k]
    edges = np.linspace(row.min(), row.max(), 60)
    right.hist(row[row < bound], edges, color=GREY)
    right.hist(row[row >= bound], edges, color=ORANGE)
    right.plot(maxima, np.full(len(maxima), 1.4), "|", color="black", markersize=9)
    right.axvline(bound, color="black", linewidth=1.0)
    right.axvline(threshold, color=RED, linewidth=1.0, linestyle="--")
    right.set_yscale("log")
    right.set_ylim(0.7, 4e4)
    right.set_xlim(right=row.max() + 4)
    listed = (row >= bound).sum()
    right.text(bound + 0.15, 1.2e4, f"bound, rank {rank} of the marks:\n{listed} candidates", fontsize=8)
    right.text(threshold + 0.15, 250, f"the threshold of\ntop-k {top_k}", fontsize=8, color=RED)
    right.set_xlabel(f"logit; marks: the largest of 16, {scan.MAXIMA} times", fontsize=9)
    right.set_ylabel("tokens", fontsize=9)
    right.set_title("a row with filters: bound, candidates, threshold", fontsize=10)
    return figure


def quad_color(thread):
    return matplotlib.colormaps["tab10"](thread // 4 % 8)


def fragments():
    """Who holds what of the 16-bit operands of mma.sync, and of the sums."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 6.0))
    titles = (
        "A: 16 rows x 16 k, four words a lane",
        "B: 16 columns x 16 k, four words a lane",
        "C: 16 x 16 sums, eight a lane",
    )
    for axis, title, of_b in zip(axes, titles, (False, True, None), strict=True):
        for thread in range(32):
            if of_b is None:
                cells = [(*accumulator_place(thread, i), str(i)) for i in range(8)]
            else:
                cells = []
                for word in range(4):
                    line, k = fragment_place(thread, word, of_b)
                    cells += [(line, k, f"w{word}"), (line, k + 1, f"w{word}")]
            for row, column, name in cells:
                box(
                    axis,
                    column,
                    15 - row,
                    1,
                    1,
                    quad_color(thread),
                    f"{thread}\n{name}",
                    size=6,
                    alpha=0.55,
                    edge="white",
                )
        axis.plot([8, 8], [0, 16], color="black", linewidth=1)
        axis.plot([0, 16], [8, 8], color="black", linewidth=1)
        bare(axis, -1.2, 16.2, -1.6, 16.2, title)
        axis.text(-0.6, 8, "rows" if not of_b else "columns of B", rotation=90, ha="center", va="center", fontsize=8)
        note(axis, 8, -0.8, "columns" if of_b is None else "k")
    note(axes[1], 8, -1.5, "upper: number of the lane; lower: its word (A, B) or accumulator (C)")
    return figure


def swizzle():
    """A TMA box in shared memory, and the rows of an accumulator of a warpgroup."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.9), gridspec_kw={"width_ratios": [1, 1, 1.1]})
    for axis, permuted in ((left, False), (middle, True)):
        for line in range(8):
            for chunk in range(8):
                at = swizzled(line, chunk) if permuted else chunk
                box(axis, at, 7 - line, 0.96, 0.92, ORANGE if chunk == 2 else PALE, f"{line}.{chunk}", size=7)
        axis.text(-0.35, 4, "8 lines of 128 bytes", rotation=90, ha="center", va="center", fontsize=8)
        note(axis, 4, -0.4, "banks 0-3, 4-7, ... 28-31: 16 bytes each")
    note(left, 4, -1.1, "chunk 2 of eight lines: all in the same four banks,\nan 8-way bank conflict", va="top")
    note(
        middle,
        4,
        -1.1,
        "chunk c of line r lies at c ^ (r & 7):\nchunk 2 of eight lines: all banks, no conflict",
        va="top",
    )
    bare(left, -0.8, 8.2, -2.1, 8.2, "a TMA box as a matrix (line.chunk)")
    bare(middle, -0.8, 8.2, -2.1, 8.2, "the same box in shared memory")
    for warp in range(4):
        box(right, 0, 12 - 4 * warp, 10, 3.9, [BLUE, ORANGE, GREEN, PURPLE][warp], "", alpha=0.25)
        right.text(
            -0.3, 14 - 4 * warp, f"warp {warp}\nrows {16 * warp}-{16 * warp + 15}", ha="right", va="center", fontsize=8
        )
    thread = 37
    for i in range(8):
        row, column = accumulator_place(thread, i)
        box(right, column * 10 / 16, 16 - (row + 1) * 0.25, 10 / 16, 0.25, RED, "", alpha=0.95)
        note(right, (column + 0.5) * 10 / 16, 16 - (row + 1) * 0.25 + (0.42 if i % 4 < 2 else -0.25), str(i), size=7)
    note(right, 5, -0.5, f"red: accumulators 0 to 7 of thread {thread} (columns 0 to 15)")
    note(right, 5, -1.2, "rows g and g + 8 of its warp, two columns of every eight")
    bare(right, -2.2, 10.3, -2.1, 16.6, "64 x n accumulators of wgmma, 128 threads")
    return figure


def row_ownership():
    """Which columns of a row a lane of rmsnorm owns, against one column a lane at a time."""
    shape = rmsnorm.share_row(HIDDEN, 2, 8, *rmsnorm.FORWARD)
    figure, axis = plt.subplots(figsize=(12, 4.2))
    chunk = shape.threads * shape.vector
    width = 11.0 / HIDDEN
    axis.text(-0.1, 4.35, f"a row: {HIDDEN:,} columns\nof 16 bits", ha="right", va="center", fontsize=8)
    for number in range(shape.chunks):
        box(axis, number * chunk * width, 4.0, chunk * width, 0.7, PALE, f"load {number}: {2 * chunk} bytes", size=8)
    for number in range(shape.chunks):
        x = (number * chunk + 5 * shape.vector) * width
        box(axis, x, 4.0, shape.vector * width * 1.4, 0.7, RED, alpha=0.9)
    note(
        axis,
        5.5,
        5.0,
        f"red: what lane 5 of warp 0 owns, {shape.vector} neighbouring columns of every {chunk};"
        f" all {shape.chunks} loads of {shape.threads // 32} warps are under way before the first is used",
    )
    axis.text(-0.1, 2.35, "load 0 of\nwarp 0, enlarged", ha="right", va="center", fontsize=8)
    for thread in range(32):
        color = RED if thread == 5 else BLUE
        box(axis, thread * 11 / 32, 2.0, 11 / 32, 0.7, color, str(thread), size=7, alpha=0.6)
    note(axis, 5.5, 1.7, "16 bytes a lane: the warp's 512 bytes are one request, 4 lines of 128 bytes, each used whole")
    axis.text(-0.1, 0.55, "2 bytes a lane\ninstead", ha="right", va="center", fontsize=8)
    for number in range(8):
        box(axis, number * 11 / 8, 0.2, 11 / 8 - 0.05, 0.7, GREY, f"request {number}: 64 bytes", size=7, alpha=0.6)
    note(axis, 5.5, -0.1, "eight times as many instructions and requests under way for the same bytes")
    bare(axis, -1.7, 11.2, -0.4, 5.3, f"rmsnorm: {shape.threads // 32} warps read a row")
    return figure


# Microseconds of the parts of a layer in the persistent decoder kernel: one sequence of 128 tokens, Qwen3-0.6B's shape
# on an H200, mean of the blocks without and with attention (docs/persistent-decoder.md).
DECODER_LAYER = {
    "without attention": (("norm", 0.3), ("qkv", 1.0), ("wait", 3.1), ("o", 1.8), ("wait", 1.6), ("norm", 0.3),
                          ("gate, up", 1.15), ("wait", 1.5), ("down", 2.6), ("wait", 1.3)),
    "with attention": (("norm", 0.3), ("qkv", 1.0), ("attention", 2.8), ("o", 1.9), ("wait", 1.5), ("norm", 0.3),
                       ("gate, up", 1.15), ("wait", 1.4), ("down", 2.6), ("wait", 1.5)),
}  # fmt: skip


def persistent_decoder():
    """A layer in the persistent decoder kernel: what the blocks compute, and what their producers load meanwhile."""
    colors = {"norm": PURPLE, "attention": RED, "wait": PALE}
    figure, axis = plt.subplots(figsize=(12, 4.2))
    for y, (name, parts) in zip((4.4, 3.2), DECODER_LAYER.items(), strict=True):
        lane(axis, f"blocks {name}", y, 0.8)
        at = 0.0
        for part, microseconds in parts:
            text = "" if part in ("wait", "norm") else part
            box(axis, at, y, microseconds, 0.8, colors.get(part, GREEN), text, size=8, alpha=0.75)
            at += microseconds
    lane(axis, "producer: weights of", 2.0, 0.8)
    loads = ("o", 0.9, BLUE), ("gate, up", 3.9, BLUE), ("down", 2.0, ORANGE), ("the next qkv", 2.6, ORANGE)
    at = 0.4
    for name, microseconds, color in loads:
        box(axis, at, 2.0, microseconds, 0.8, color, name, size=8, alpha=0.6)
        at += microseconds + (1.6 if name == "gate, up" else 0.1)
    lane(axis, "exchange", 0.9, 0.6)
    for start, name in ((1.3, "q, k, v"), (4.1, "attended"), (6.2, "h"), (9.3, "silu(gate) up"), (13.3, "x")):
        arrow(axis, (start, 0.9), (start + 0.9, 1.5), color=GREY)
        note(axis, start + 0.45, 0.62, name, size=8)
    axis.plot([0, 14.6], [0.25, 0.25], color="black", linewidth=0.8)
    for tick in range(0, 15, 2):
        axis.plot([tick, tick], [0.2, 0.3], color="black", linewidth=0.8)
        note(axis, tick, 0.0, f"{tick} us", size=8)
    bare(
        axis, -3.2, 15.0, -0.2, 5.5, "One layer; pale: waiting for what other blocks write. Loads: drawn, not measured"
    )
    return figure


def package_imports():
    """{package or module of rlnumba: what of rlnumba it imports}, by the names right below rlnumba."""
    root = FOLDER.parent.parent / "rlnumba"
    imports = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).with_suffix("").parts[0]
        if name.startswith("__"):
            continue
        targets = imports.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rlnumba":
                targets.update(node.module.split(".")[1:2] or [alias.name for alias in node.names])
    return {name: targets & set(imports) - {name} for name, targets in imports.items()}


def layers():
    """The package's layers: what is drawn higher imports what is drawn lower; packages of one layer may do so, too."""
    imports = package_imports()

    def height(name, importers=frozenset()):
        importers |= {name}
        return 1 + max((height(target, importers) for target in imports[name] - importers), default=-1)

    heights = {name: height(name) for name in imports}
    rows = [[name for name in imports if heights[name] == each] for each in sorted({*heights.values()})]
    figure, axis = plt.subplots(figsize=(9, 0.9 * len(rows)))
    width, centers = 1.5, {}
    for y, names in enumerate(rows):
        for i, name in enumerate(sorted(names)):
            x = (i - (len(names) - 1) / 2) * 2.1
            centers[name] = x, y
            box(axis, x - width / 2, y, width, 0.5, BLUE, name, alpha=0.45, size=10)
    for name, targets in imports.items():
        for target in targets:
            (x, y), (x_below, y_below) = centers[name], centers[target]
            if y == y_below:
                continue
            near = y - y_below == 1
            axis.plot([x, x_below], [y, y_below + 0.5], color="black", alpha=0.5 if near else 0.12, linewidth=0.8)
    bare(axis, -4.6, 4.6, -0.1, len(rows) - 0.3, "A package imports only what is drawn below it, or beside it")
    return figure


def gradient_fold():
    """Six micro-batches on two ranks: who computes which gradient, and how the rounds are added."""
    figure, axis = plt.subplots(figsize=(9, 3.6))
    colors, width = (BLUE, ORANGE), 2.6
    for rank, color in enumerate(colors):
        note(axis, -0.25, 3.35 - rank, f"rank {rank}", ha="right", size=10)
        note(axis, -0.25, 0.95 - 0.7 * rank, f"its part of A\non rank {rank}", ha="right")
        for which in range(3):
            k = 2 * which + rank
            box(axis, which * (width + 0.5), 3.05 - rank, width, 0.6, color, f"forward, backward: $g_{k}$", alpha=0.5)
    for which in range(3):
        x, first = which * (width + 0.5), 2 * which
        for rank, color in enumerate(colors):
            before = "" if which == 0 else "(A + "
            text = f"A = {before}$g_{first}${')' if which else ''} + $g_{first + 1}$"
            box(axis, x + 0.3, 0.7 - 0.7 * rank, width, 0.5, color, text, alpha=0.3)
            start = (x + width, 3.35) if rank == 0 else (x + width / 2, 2.05)
            arrow(axis, start, (start[0] + 0.15, 1.2), color="grey")
    bare(axis, -1.7, 9.4, -0.2, 3.9, "After each round, all its gradients are added in the order of their numbers")
    return figure


def tensor_parallel():
    """What two ranks compute of a layer, and what is gathered between."""
    figure, axis = plt.subplots(figsize=(10, 2.9))
    steps = [
        ("norm,\nqkv of its heads,\nattention", 1.75),
        ("its columns of\no_proj, residual", 1.6),
        ("norm, its columns\nof gate and up,\nSwiGLU", 1.75),
        ("its columns of\ndown_proj, residual", 1.7),
    ]
    x = 0.0
    for text, width in steps:
        for rank, color in enumerate((BLUE, ORANGE)):
            box(axis, x, 1.25 - 1.25 * rank, width, 0.95, color, text, alpha=0.4, size=8)
        box(axis, x + width + 0.2, 0, 0.45, 2.2, GREY, alpha=0.6)
        axis.text(x + width + 0.425, 1.1, "gather", rotation=90, ha="center", va="center", fontsize=9)
        x += width + 0.85
    for rank in (0, 1):
        note(axis, -0.15, 1.72 - 1.25 * rank, f"rank {rank}", ha="right", size=10)
    bare(axis, -0.8, x, -0.15, 2.5, "Every matrix is cut by output columns: columns are copied, sums stay whole")
    return figure


def async_pipeline():
    """Five generations, synchronous on all GPUs, and asynchronous with max_staleness 2 on half of them each."""
    figure, axis = plt.subplots(figsize=(10, 3.1))
    # Until the last long completion of each has ended, on all GPUs and on half of them: few are left by then.
    generated, on_half, trained, staleness = (4.0, 2.2, 5.0, 2.6, 3.0), 1.25, 1.0, 2
    now = 0.0
    for k, seconds in enumerate(generated):
        box(axis, now, 2.4, seconds, 0.6, BLUE, f"generate {k}", alpha=0.5)
        box(axis, now + seconds, 2.4, trained, 0.6, ORANGE, f"{k}", alpha=0.6)
        now += seconds + trained
    note(axis, -0.2, 2.7, "synchronous,\nall GPUs", ha="right", size=9)
    # Each generation begins when the one before has half of its completions, and is old enough for its cap.
    begins, ends, updates, last = [], [], [], 0.0
    for k, seconds in enumerate(generated):
        room = begins[-1] + 0.4 * on_half * generated[k - 1] if k else 0.0
        begins.append(max(room, updates[k - staleness - 1] if k > staleness else 0.0))
        ends.append(begins[k] + on_half * seconds)
        start = max(ends[k], last)
        last = start + 2 * trained
        updates.append(last)
        y = 1.5 - 0.36 * (k % 3)
        box(axis, begins[k], y, on_half * seconds, 0.35, BLUE, f"generate {k}", alpha=0.5, size=8)
        box(axis, start, -0.3, 2 * trained, 0.6, ORANGE, f"train {k}", alpha=0.6)
        arrow(axis, (last, 0.3), (last, 0.68), f"v{k + 1}", offset=(0.25, -0.05), color="grey")
    note(axis, -0.2, 1.3, "asynchronous,\ninference GPUs", ha="right", size=9)
    note(axis, -0.2, 0.0, "training GPUs", ha="right", size=9)
    bare(
        axis, -2.6, now + 0.5, -0.6, 3.3, "Generations overlap, and new weights (v) reach completions that are running"
    )
    return figure


PICTURES = {
    function.__name__: function
    for function in (
        product_tiles,
        attention_tiles,
        attention_time,
        attention_backward,
        decode_units,
        log_prob_passes,
        sampling_gumbel,
        fragments,
        swizzle,
        row_ownership,
        persistent_decoder,
        gradient_fold,
        tensor_parallel,
        async_pipeline,
        layers,
    )
}


def main(folder=FOLDER):
    """Write every picture to a folder."""
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw()
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=110, facecolor="white", bbox_inches="tight", pad_inches=0.1)
        plt.close(figure)
    sys.path.append(str(pathlib.Path(__file__).parent))
    import learning_pictures

    learning_pictures.write(folder)


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
