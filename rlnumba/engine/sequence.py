"""What is asked for (SamplingParams), what runs (Sequence, SequenceTable), what comes back (RequestOutput).

The running sequences are rows of a table of NumPy arrays, so that scheduling, the arrays of a step and
the bookkeeping after it are a few vectorised operations whatever the number of sequences.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from rlnumba.errors import ConfigError

# Logits divided by less might overflow float32. vLLM takes what is below for 0.
LOWEST_TEMPERATURE = 1e-5


def _is_int(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value):
    return (isinstance(value, float) or _is_int(value)) and math.isfinite(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are drawn and when it ends; the names and defaults are vLLM's.

    temperature: logits are divided by it before everything else; 0 takes the largest, the lowest id on ties.
    min_p, top_k, top_p: filters in this order, ties at a boundary all kept; 0 (also None), 0 (also -1) and
    1 switch them off. repetition_penalty: positive logits of seen tokens are divided by it, others
    multiplied, before the temperature (Keskar et al. 2019).
    max_tokens: drawn tokens at most. stop: strings that end a completion and are cut from its text.
    stop_token_ids: ids that end it as EOS does; ignore_eos: EOS ids do not end it.
    seed, n: completion i of n draws its token at position p by (seed, prompt token ids, i, p) alone.
    logprobs: whether the completions carry the log-probs of their tokens.
    Raises ConfigError naming the parameter and its value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    logprobs: bool = True

    def __post_init__(self):
        settle = object.__setattr__
        if self.min_p is None:
            settle(self, "min_p", 0.0)
        if isinstance(self.stop, str):
            settle(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            settle(self, name, tuple(getattr(self, name) or ()))
        if _is_int(self.top_k) and self.top_k == -1:
            settle(self, "top_k", 0)

        temperature = self.temperature
        usable = _is_number(temperature) and (temperature == 0 or temperature >= LOWEST_TEMPERATURE)
        self._require("temperature", usable, f"0, or a number >= {LOWEST_TEMPERATURE:g}")
        self._require("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        self._require("top_k", _is_int(self.top_k) and 0 <= self.top_k < 2**31, "an integer >= -1 (0 and -1: off)")
        self._require("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        penalty = self.repetition_penalty
        self._require("repetition_penalty", _is_number(penalty) and penalty > 0, "a number > 0")
        self._require("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1")
        self._require("stop", all(isinstance(text, str) and text for text in self.stop), "non-empty strings")
        ids = self.stop_token_ids
        self._require("stop_token_ids", all(_is_int(i) and 0 <= i < 2**31 for i in ids), "token ids")
        self._require("ignore_eos", isinstance(self.ignore_eos, bool), "true or false")
        self._require("seed", _is_int(self.seed) and 0 <= self.seed < 2**64, "an integer in [0, 2^64)")
        self._require("n", _is_int(self.n) and self.n >= 1, "an integer >= 1")
        self._require("logprobs", isinstance(self.logprobs, bool), "true or false")

    def _require(self, name, holds, expectation):
        if not holds:
            raise ConfigError(f"sampling: {name} must be {expectation}, got {getattr(self, name)!r}")


@dataclass
class Completion:
    """token_ids and their logprobs (of the distribution drawn from); finish_reason "stop" or "length".

    The token that stops a completion is the last of token_ids and not part of text.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str = ""


@dataclass
class RequestOutput:
    """The n completions of one prompt, drawn under the weights of policy_version."""

    prompt_token_ids: list[int]
    completions: list[Completion] = field(default_factory=list)
    policy_version: int = 0


class Sequence:
    """One completion on its way: what the scheduler moves between waiting, running and finished.

    prompt: (P,) int32. length_limit: tokens, prompt included, at which it ends. stop_ids: the ids that end
    it. key: (2,) uint32 noise key of its request. While it runs its tokens live in a row of the table;
    token_ids and logprobs (of every position, 0 in the prompt) are filled in when it leaves.
    """

    __slots__ = (
        "request", "index", "prompt", "prompt_key", "params", "key", "length_limit", "stop_ids",
        "token_ids", "logprobs", "finish_reason", "leads",
    )  # fmt: skip

    def __init__(self, request, index, prompt, params, key, length_limit, stop_ids=(), prompt_key=None):
        self.request, self.index = request, index
        self.prompt, self.params, self.key = prompt, params, key
        self.prompt_key = prompt.tobytes() if prompt_key is None else prompt_key
        self.length_limit, self.stop_ids = length_limit, stop_ids
        self.token_ids = prompt
        self.logprobs = np.zeros(len(prompt), np.float32)
        self.finish_reason = None
        self.leads = False

    @property
    def completion_ids(self):
        return self.token_ids[len(self.prompt) :]

    @property
    def completion_logprobs(self):
        return self.logprobs[len(self.prompt) :]


@dataclass
class SequenceTable:
    """The running sequences, a row each; R rows, of at most max_length tokens and W blocks.

    token_ids, logprobs: (R, max_length). length: tokens there are; num_computed: those of them whose K and V
    are in the cache. block_tables (R, W): blocks of the cache, num_blocks of them in use; hashes (R, W): of
    the full ones, num_hashed of them known, num_registered of them told to the block manager. The rest: what
    the sampler and the end of a sequence need.
    """

    rows: int
    max_length: int
    block_size: int
    stop_width: int = 0

    token_ids: np.ndarray = field(init=False)
    logprobs: np.ndarray = field(init=False)
    block_tables: np.ndarray = field(init=False)
    hashes: np.ndarray = field(init=False)
    stop_ids: np.ndarray = field(init=False)
    keys: np.ndarray = field(init=False)
    sequences: list = field(init=False)

    def __post_init__(self):
        R, width = self.rows, -(-self.max_length // self.block_size)
        # Not zeroed: pages that no sequence reaches are then never touched.
        self.token_ids = np.empty((R, self.max_length), np.int32)
        self.logprobs = np.empty((R, self.max_length), np.float32)
        self.block_tables = np.zeros((R, width), np.int32)
        self.hashes = np.zeros((R, width), np.uint64)
        self.stop_ids = np.full((R, self.stop_width), -1, np.int32)
        self.keys = np.zeros((R, 2), np.uint32)
        self.sequences = [None] * R
        counters = "prompt_length length length_limit num_computed num_blocks num_hashed num_registered"
        for name in counters.split():
            setattr(self, name, np.zeros(R, np.int64))
        for name in ("sample_index", "top_k"):
            setattr(self, name, np.zeros(R, np.int32))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            setattr(self, name, np.zeros(R, np.float32))
        self.has_stop_strings = np.zeros(R, bool)

    def put(self, row, sequence):
        """Give a sequence a row; nothing of it is computed yet."""
        params, length = sequence.params, len(sequence.token_ids)
        self.sequences[row] = sequence
        self.token_ids[row, :length] = sequence.token_ids
        self.logprobs[row, :length] = sequence.logprobs
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(sequence.stop_ids)] = sequence.stop_ids
        self.keys[row] = sequence.key
        self.prompt_length[row] = len(sequence.prompt)
        self.length[row] = length
        self.length_limit[row] = sequence.length_limit
        self.num_computed[row] = self.num_blocks[row] = self.num_hashed[row] = self.num_registered[row] = 0
        self.sample_index[row] = sequence.index
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.has_stop_strings[row] = bool(params.stop)

    def take(self, row):
        """Clear a row and return its sequence with the tokens it has by now."""
        sequence, length = self.sequences[row], self.length[row]
        sequence.token_ids = self.token_ids[row, :length].copy()
        sequence.logprobs = self.logprobs[row, :length].copy()
        self.sequences[row] = None
        return sequence
