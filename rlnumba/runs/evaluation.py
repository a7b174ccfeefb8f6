"""Evaluation of a policy that generates: n completions of every held-out prompt, with sampling parameters of their own.

c          how many of a prompt's n completions pass: their value is at least eval.pass_threshold
avg@n      the mean of c / n over the prompts
pass@k     the mean of 1 - C(n - c, k) / C(n, k): the chance that one of k completions drawn from the n passes,
           for k = 1, 2, 4, ... below n and n itself (Chen et al. 2021, arXiv 2107.03374, eq. 1)
"""

import numpy as np

from rlnumba.engine.sequence import SamplingParams
from rlnumba.runs.run_folder import Clock
from rlnumba.sampling.samples import draw_samples, generation_metrics


def eval_params(run, params):
    """The SamplingParams of a run's evaluation: `params`, those of training, but for what [eval] sets."""
    own = run.eval
    changed = {"temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k}
    changed |= {"max_tokens": own.max_completion_length, "n": own.num_generations}
    return SamplingParams(**vars(params) | {name: value for name, value in changed.items() if value is not None})


def generate(llm, rewards, prompts, params, trainer_state, status=None):
    """The Generation of all held-out prompts. params: SamplingParams."""
    indices = range(len(prompts.prompts))
    return draw_samples(llm, rewards, prompts, indices, params, trainer_state, Clock(), status)


def metrics_of(generation, names, run):
    """{"eval_reward": ..., "eval_pass@k": ..., ...} of a Generation. names: the reward functions'."""
    found = generation_metrics(generation, names)
    by_function = {"": [[s.reward for s in group] for group in generation.groups]}
    if len(names) > 1:
        for k, name in enumerate(names):
            by_function[f"rewards/{name}/"] = [[s.values[k] for s in group] for group in generation.groups]
    for prefix, values in by_function.items():
        passed = (np.array(values, np.float64) >= run.eval.pass_threshold).sum(axis=1)
        n = run.eval.num_generations
        found[f"{prefix}avg@{n}"] = float(np.mean(passed / n))
        for k in ks(n):
            found[f"{prefix}pass@{k}"] = float(np.mean([pass_at_k(n, int(c), k) for c in passed]))
    return {f"eval_{name}": value for name, value in found.items()}


def ks(n):
    """The k of pass@k for n completions: 1, 2, 4, ... and n."""
    return [*(1 << i for i in range(n.bit_length()) if 1 << i < n), n]


def pass_at_k(n, c, k):
    """1 - C(n - c, k) / C(n, k): float, from a product that does not overflow."""
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
