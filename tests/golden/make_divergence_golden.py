"""Makes divergence.npz: TRL's GKDTrainer.generalized_jsd_loss and its gradient by the student's logits, in float64.

    python tests/golden/make_divergence_golden.py        (torch 2.13, trl 1.16)

For each beta and temperature: losses of the rows, which TRL's function gives without a reduction, summed over the
vocabulary, and the gradient of their sum weighted by dloss.
"""

import pathlib

import numpy as np
import torch
from trl.experimental.gkd import GKDTrainer

ROWS, VOCABULARY = 5, 37
CASES = [(0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.1, 0.7), (0.9, 2.0), (0.0, 0.9), (1.0, 0.9)]


def main():
    rng = np.random.default_rng(0)
    found = {"cases": np.array(CASES), "dloss": rng.uniform(0.1, 1.0, ROWS)}
    for name in ("student", "teacher"):
        found[name] = 4 * rng.standard_normal((ROWS, VOCABULARY))
    # A row where both are alike, and one where the teacher is sure.
    found["teacher"][1], found["teacher"][2, 3] = found["student"][1], 40.0
    for index, (beta, temperature) in enumerate(CASES):
        student = torch.tensor(found["student"], requires_grad=True)
        terms = GKDTrainer.generalized_jsd_loss(
            student, torch.tensor(found["teacher"]), beta=beta, temperature=temperature, reduction="none"
        )
        losses = terms.sum(dim=-1)
        (losses * torch.tensor(found["dloss"])).sum().backward()
        found[f"loss{index}"], found[f"dlogits{index}"] = losses.detach().numpy(), student.grad.numpy()
    np.savez_compressed(pathlib.Path(__file__).with_name("divergence.npz"), **found)


if __name__ == "__main__":
    main()
