"""Text from a model: continuous batching over a paged KV cache, drawn tokens with their log-probs.

llm.py            LLM.generate: prompts in, completions out; sleep, wake
scheduler.py      which tokens of which sequences the next step computes
groups.py         which sequences of a step begin with the same blocks
block_manager.py  who owns which blocks of the KV cache, and what they hold
cache.py          the memory of the KV cache
sequence.py       sampling parameters, sequences, the table of the running ones
runner.py         the arrays of one step, the model over the paged cache, CUDA graphs
sampler.py        hidden rows -> logits -> drawn tokens and their log-probs
"""

from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import Completion, RequestOutput, SamplingParams

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams"]
