"""Draws the pictures of the kernel pages: python docs/make_pictures.py"""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

FOLDER = pathlib.Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN, GREY = "#4c78a8", "#f58518", "#54a24b", "#bab0ac"


def box(axis, x, y, width, height, color, text="", alpha=0.85, size=9):
    axis.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="black", linewidth=0.7, alpha=alpha))
    if text:
        axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(axis, start, end, text="", offset=(0, 0.15), color="black"):
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=color, linewidth=1.1))
    if text:
        x, y = (start[0] + end[0]) / 2 + offset[0], (start[1] + end[1]) / 2 + offset[1]
        axis.text(x, y, text, fontsize=8, ha="center", color=color)


def product_tiles():
    """What a block of the Hopper product holds, and who does what when."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), gridspec_kw={"width_ratios": [1, 1.25]})
    left.set_title("one block, one tile of C (128 x 256)", fontsize=10)
    for stage in range(4):
        box(left, 0.3 + stage * 0.75, 5.6, 0.68, 0.9, BLUE, f"A\n{stage}", size=8)
        box(left, 0.3 + stage * 0.75, 3.7, 0.68, 1.8, ORANGE, f"B\n{stage}", size=8)
    left.text(1.8, 6.7, "shared memory: 4 stages of 64 steps", ha="center", fontsize=8)
    box(left, 4.6, 5.2, 2.9, 1.0, GREEN, "warpgroup 1\n64 x 256 in registers", size=8)
    box(left, 4.6, 3.9, 2.9, 1.0, GREEN, "warpgroup 2\n64 x 256 in registers", size=8)
    box(left, 4.6, 2.2, 2.9, 0.8, GREY, "staged output, 2 x 16 KiB", size=8)
    box(left, 0.3, 2.2, 2.95, 0.8, GREY, "producer warp", size=8)
    arrow(left, (1.8, 3.0), (1.8, 3.65), "copy engine", (0.75, -0.05))
    arrow(left, (3.4, 5.4), (4.5, 5.6), "wgmma", (0, 0.2))
    arrow(left, (3.4, 4.6), (4.5, 4.4))
    arrow(left, (6.0, 3.85), (6.0, 3.05), "stmatrix", (0.6, 0))
    arrow(left, (6.0, 2.15), (6.0, 1.3), "copy engine to C", (0.0, -0.75))
    left.set_xlim(0, 8)
    left.set_ylim(0.4, 7.2)
    left.axis("off")
    right.set_title("in time: the next tile's copies and products hide the last tile's store", fontsize=10)
    lanes = {"producer": 3, "warpgroups": 2, "copy out": 1}
    for name, y in lanes.items():
        right.text(-0.2, y + 0.3, name, ha="right", va="center", fontsize=9)
    for i in range(16):
        color = BLUE if i < 8 else ORANGE
        box(right, i * 0.6, 3, 0.55, 0.6, color, str(i % 8), size=7, alpha=0.7)
    for i in range(8):
        box(right, 1.2 + i * 0.6, 2, 0.55, 0.6, BLUE, str(i), size=7, alpha=0.7)
        box(right, 6.6 + i * 0.6, 2, 0.55, 0.6, ORANGE, str(i), size=7, alpha=0.7)
    box(right, 6.05, 2, 0.5, 0.6, GREY, "", alpha=0.9)
    box(right, 6.6, 1, 1.6, 0.6, BLUE, "tile 1", size=8, alpha=0.7)
    right.text(6.3, 1.85, "to shared", fontsize=7, ha="center", va="top")
    right.text(
        4.8,
        0.3,
        "numbers: rounds of 64 steps; blue: tile 1, orange: tile 2",
        ha="center",
        fontsize=8,
    )
    right.set_xlim(-2.2, 11.6)
    right.set_ylim(0, 4.2)
    right.axis("off")
    figure.tight_layout()
    figure.savefig(FOLDER / "product_tiles.png", dpi=120)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    product_tiles()
