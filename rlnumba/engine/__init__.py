"""Text from a model: continuous batching over a paged KV cache, sampled tokens with their log-probs.

core.py           Engine: add_request, step, abort, synchronize, update_weights, sleep, wake
llm.py            LLM.generate: prompts in, completions out
adapters.py       low-rank adapters that come and go while the engine runs
async_llm.py      AsyncLLM: the same for asyncio
scheduler.py      which tokens of which sequences the next step computes
blocks/           the cache's blocks: how many, whose, what is shared, what windows and states keep
cache.py          the memory of the KV cache
sequence.py       sampling parameters, sequences, the table of the running ones
run_ahead.py      decode steps launched before the results of the last ones are read
speculation.py    which drafts steps verify, and when that is faster than decode
episodes.py       prompts with several completions, and episodes of several turns, which are coroutines
ngram.py          drafts by n-gram lookup in a request's prompt and completions
requests/         what ends a completion and the text that it has
steps/            the arrays of one step, their shapes, their upload, attention over the cache
runner.py         one step: the model over the paged cache, sampling, CUDA graphs
sampler.py        hidden states -> logits -> sampled tokens and their log-probs
check.py          do rollout and training agree, bit by bit
"""

from rlnumba.engine.adapters import LoRARequest
from rlnumba.engine.async_llm import AsyncLLM
from rlnumba.engine.core import Engine, PromptError, StepOutput
from rlnumba.engine.llm import LLM
from rlnumba.engine.requests.structured_outputs import StructuredOutputsParams
from rlnumba.engine.sequence import Completion, RequestOutput, SamplingParams
