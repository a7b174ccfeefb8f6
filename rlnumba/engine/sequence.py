"""Requests (SamplingParams), their state inside the engine (Sequence, SequenceTable) and their results (Completion, and
StepOutput for a step).

The running sequences are rows of a table of NumPy arrays, so that a step is scheduled and recorded by a few vectorised
operations whatever their number.
"""

import secrets
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rlnumba.config.keys import fits_float32, refuse_unknown
from rlnumba.engine.requests.lazy_list import LazyList, LogprobList
from rlnumba.engine.requests.logprobs import ALL
from rlnumba.engine.requests.structured_outputs import StructuredOutputsParams
from rlnumba.engine.requests.token_rules import place_of, widened
from rlnumba.errors import ConfigError, shown
from rlnumba.kernels.delta_rule.arithmetic import BLOCK as STATE_BLOCK

# Logits divided by less might overflow float32. vLLM treats lower temperatures as 0.
LOWEST_TEMPERATURE = 1e-5


def _is_int(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_token_id(value):
    return _is_int(value) and 0 <= value < 2**31


def _num_listed(value):
    return -1 if value is None else ALL if value == -1 else int(value)


def _is_number(value):
    value = float(value) if isinstance(value, np.floating) else value
    return (isinstance(value, float) or _is_int(value)) and fits_float32(value)


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request: how its tokens are sampled and when it ends. The names and defaults are vLLM's.

    temperature: logits are divided by it; 0 takes the largest, the lowest id on ties. min_p, top_k, top_p: filters in
    this order, ties at a boundary all kept; 0 (also None), 0 (also -1) and 1 switch them off. repetition_penalty:
    positive logits of seen tokens are divided by it, others multiplied, before the temperature (Keskar et al. 2019).
    presence_penalty, frequency_penalty: subtracted from the logits of tokens of the completion so far, once and for
    each occurrence, after the repetition penalty. max_tokens: sampled tokens at most. min_tokens: before so many, no
    stop id is drawn and no stop string looked for. stop: strings that end a completion and are cut from its text, not
    from its token_ids. stop_token_ids: ids that end it as EOS does; ignore_eos: EOS ids do not end it. seed, n,
    first_index: the noise of completion i of n at position p depends on (seed, prompt token ids, first_index + i, p)
    alone; without a seed (None) each request has another one. greedy_last: whether the last of the n completions is
    drawn at temperature 0 (the baseline of ReMax). logprobs: whether the completions carry the log-probs of their
    tokens, True (False is an empty list, None is None); a number: a dict a token, of its own Logprob and those of
    so many of the likeliest tokens, -1 all. prompt_logprobs: the same of the tokens of the prompt but the first, by the
    model's own logits, without temperature; None: none. logit_thresholds: whether they carry the smallest logit that
    the filters kept for each token, with which training has the distribution sampled from.
    logit_bias: {token id: number in [-100, 100]}, added to the logits before the penalties. allowed_token_ids: no
    others are drawn. bad_words: texts of which the last token is not drawn where it would complete one, with a space
    before it or not. structured_outputs: StructuredOutputsParams or a dict of them, the grammar of the text, which
    min_tokens does not prolong. skip_special_tokens: whether special tokens have no text; include_stop_str_in_output:
    whether the text ends with what stopped it. truncate_prompt_tokens: the last tokens of the prompt that are kept; -1:
    as many as leave room for max_tokens. Raises ConfigError naming the parameter and its value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = 0
    n: int = 1
    first_index: int = 0
    greedy_last: bool = False
    logprobs: bool | int | None = True
    logit_thresholds: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __new__(cls, *values, **keys):
        refuse_unknown(cls.__name__, keys, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self):
        set_field = object.__setattr__
        if self.min_p is None:
            set_field(self, "min_p", 0.0)
        if isinstance(self.stop, str):
            set_field(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            self._require(name, value is None or isinstance(value, list | tuple), "a list")
            set_field(self, name, tuple(value or ()))
        if _is_int(self.top_k) and self.top_k == -1:
            set_field(self, "top_k", 0)

        temperature = self.temperature
        valid = _is_number(temperature) and (temperature == 0 or temperature >= LOWEST_TEMPERATURE)
        self._require("temperature", valid, f"0, or a number >= {LOWEST_TEMPERATURE:g}")
        self._require("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        self._require("top_k", _is_int(self.top_k) and 0 <= self.top_k < 2**31, "an integer >= -1 (0 and -1: off)")
        self._require("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        penalty = self.repetition_penalty
        self._require("repetition_penalty", _is_number(penalty) and penalty > 0, "a number > 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and -2 <= value <= 2, "in [-2, 2]")
        self._require("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1")
        within = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        self._require("min_tokens", within, f"an integer in [0, max_tokens], which is {self.max_tokens}")
        self._require("stop", all(isinstance(text, str) and text for text in self.stop), "non-empty strings")
        ids = self.stop_token_ids
        self._require("stop_token_ids", all(map(_is_token_id, ids)), "token ids")
        seeded = self.seed is not None
        self._require("seed", not seeded or (_is_int(self.seed) and 0 <= self.seed < 2**64), "an integer in [0, 2^64)")
        self._require("n", _is_int(self.n) and self.n >= 1, "an integer >= 1")
        first = self.first_index
        self._require("first_index", _is_int(first) and 0 <= first < 2**31 - self.n, "an integer in [0, 2^31 - n)")
        for name, booleans in (("logprobs", "true, false, "), ("prompt_logprobs", "")):
            value = getattr(self, name)
            valid = value is None or (_is_int(value) and -1 <= value < ALL) or (booleans and isinstance(value, bool))
            self._require(name, valid, f"{booleans}null, or an integer >= -1")
        names = "ignore_eos", "logit_thresholds", "skip_special_tokens", "include_stop_str_in_output", "greedy_last"
        for name in names:
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        length = self.truncate_prompt_tokens
        valid = length is None or (_is_int(length) and (length >= 1 or length == -1))
        self._require("truncate_prompt_tokens", valid, "an integer >= 1, or -1")
        if isinstance(self.structured_outputs, Mapping):
            set_field(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        valid = isinstance(self.structured_outputs, StructuredOutputsParams | None)
        self._require("structured_outputs", valid, "StructuredOutputsParams, or a table of them")
        self._check_token_rules()

    def _check_token_rules(self):
        """Check logit_bias, allowed_token_ids and bad_words; a dict of biases becomes pairs."""
        set_field, bias, allowed = object.__setattr__, self.logit_bias, self.allowed_token_ids
        if isinstance(bias, Mapping):
            bias = tuple(bias.items())
        bias = () if bias is None else bias
        valid = isinstance(bias, tuple) and all(isinstance(each, tuple) and len(each) == 2 for each in bias)
        self._require("logit_bias", valid, "a table of token ids and numbers in [-100, 100]")
        # JSON has no numbers for keys.
        bias = tuple((int(i) if isinstance(i, str) and i.isdecimal() else i, value) for i, value in bias)
        valid = all(_is_token_id(i) and _is_number(value) and -100 <= value <= 100 for i, value in bias)
        self._require("logit_bias", valid, "a table of token ids and numbers in [-100, 100]")
        set_field(self, "logit_bias", tuple(dict(bias).items()))
        if allowed is not None:
            valid = isinstance(allowed, list | tuple) and len(allowed) > 0 and all(map(_is_token_id, allowed))
            self._require("allowed_token_ids", valid, "a list of token ids, not empty")
            set_field(self, "allowed_token_ids", tuple(allowed))
        valid = all(isinstance(text, str) and text.strip() for text in self.bad_words)
        self._require("bad_words", valid, "texts that are not empty")
        for name in ("logit_bias", "allowed_token_ids", "bad_words"):
            if self.logit_thresholds and getattr(self, name):
                raise ConfigError(f"sampling: logit_thresholds are of logits without {name}: set one of the two")

    @property
    def has_token_rules(self):
        """Whether logits are changed by logit_bias, allowed_token_ids or bad_words."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words)

    @property
    def num_logprobs(self):
        """The number of likeliest tokens that each drawn one is listed with, -1 where none is listed: int."""
        return -1 if isinstance(self.logprobs, bool) else _num_listed(self.logprobs)

    @property
    def num_prompt_logprobs(self):
        """The same of the prompt's tokens."""
        return _num_listed(self.prompt_logprobs)

    def of_completion(self, index):
        """The parameters of completion `index` of the n: they themselves, or at temperature 0 if it is greedy."""
        return replace(self, temperature=0.0) if self.greedy_last and index == self.n - 1 else self

    def seeded(self):
        """The parameters themselves, or without a seed those with one that is drawn now."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def _require(self, name, valid, expectation):
        if not valid:
            raise ConfigError(f"sampling: {name} must be {expectation}, got {shown(getattr(self, name))}")


@dataclass(frozen=True)
class EpisodeRecord:
    """The record of an episode.

    prompt_token_ids: its first context; num_turns: of the policy; num_context_tokens: sum of the lengths of all turns'
    contexts; value: what its coroutine returned. row_lengths: where it has several conversations, each of which is a
    sequence of its own, the tokens of each, prompt included; () for one.
    """

    prompt_token_ids: list[int]
    num_turns: int
    num_context_tokens: int
    value: object = None
    row_lengths: list[int] = ()


@dataclass
class Completion:
    """One completion: token_ids, and of each token its log-prob and the policy version that it was sampled from.

    logprobs: those of the distribution sampled from (after temperature and filters). finish_reason: "stop", "length"
    or, of one that was cut short, "abort". The token that stops a completion is the last of token_ids and not part of
    text. index: among those of its prompt. stop_reason: the stop string or the id of stop_token_ids that ended it, None
    for EOS and the other reasons. thresholds: array of the smallest logit that the filters kept for each token, -inf
    without filters; None unless logit_thresholds asked for it. num_cached_tokens: tokens of the prompt whose K and V
    were in the cache when it began. top_logprobs: what logprobs are then, a dict {id: Logprob} a token; None unless a
    number of them was asked for. prompt_logprobs: those of the prompt's tokens, the first None, where they were asked
    for, with completion 0.

    mask: (T,) bool, whether each token was drawn, None where all were: others are the environment's, with log-prob 0
    and the policy version of the token before. episode: the EpisodeRecord of several turns, or None.

    routed_experts: (P + T - 1, L, k) int16, the experts of the L mixtures that have computed each token of the prompt
    and the completion, but for the last one, which nothing follows, by descending weight; -1 for the last tokens of
    an episode's other conversations. None unless the engine returns them.
    """

    token_ids: list[int] = LazyList(np.int32)
    logprobs: list[float] = LogprobList(np.float32)
    finish_reason: str
    text: str = ""
    policy_versions: list[int] = LazyList(np.int32, default=())
    thresholds: np.ndarray | None = None
    index: int = 0
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    mask: np.ndarray | None = None
    episode: EpisodeRecord | None = None
    top_logprobs: list[dict] | None = None
    prompt_logprobs: list[dict | None] | None = None
    routed_experts: np.ndarray | None = None

    @property
    def cumulative_logprob(self):
        """The log-prob of the completion: float, or None where logprobs are None."""
        if type(self).__dict__["logprobs"].is_none(self):
            return None
        return float(self.array("logprobs").sum(dtype=np.float64))

    @property
    def num_tokens(self):
        return len(self.token_ids if self._token_ids is None else self._token_ids)

    def drawn(self, name):
        """token_ids, logprobs, policy_versions or thresholds of the drawn tokens, as an array."""
        values = self.thresholds if name == "thresholds" else self.array(name)
        return values if self.mask is None else values[self.mask]

    @property
    def num_drawn(self):
        """Tokens that were drawn: int."""
        return self.num_tokens if self.mask is None else int(np.count_nonzero(self.mask))

    def array(self, name):
        """token_ids, logprobs or policy_versions as an array, int32 or float32, which is not to be written."""
        return vars(type(self))[name].array_of(self)

    def __reduce__(self):
        # Bytes take a tenth of the time that arrays do.
        columns = [self.array(name).tobytes() for name in ("token_ids", "logprobs", "policy_versions")]
        if type(self).__dict__["logprobs"].is_none(self):
            columns[1] = None
        values = self.finish_reason, self.text, self.thresholds, self.index, self.stop_reason, self.num_cached_tokens
        values = *values, self.mask, self.episode, self.top_logprobs, self.prompt_logprobs, self.routed_experts
        return _completion_of, (columns, *values)


def _completion_of(columns, finish_reason, text, thresholds, *rest):
    """The Completion that __reduce__ has taken apart; rest: index and what follows, as far as they were saved."""
    dtypes = np.int32, np.float32, np.int32
    token_ids, logprobs, versions = (
        None if column is None else np.frombuffer(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)
    )
    return Completion(token_ids, logprobs, finish_reason, text, versions, thresholds, *rest)


class NewToken(NamedTuple):
    """A token sampled in a step, for completion `index` of a request."""

    request_id: Hashable
    index: int
    token_id: int
    logprob: float


class FinishedCompletion(NamedTuple):
    """Completion `index` of a request, which ended in this step."""

    request_id: Hashable
    index: int
    completion: Completion


class StepOutput(NamedTuple):
    """The tokens that a step sampled, and the completions that ended with it.

    sequences (D,) object, token_ids (D,) int32, logprobs (D,) float32: an entry for each of the D tokens that were
    sampled from the weights of policy_version, those of completions that ended included. A sequence whose drafts were
    accepted has several, one after the other. listings: of each token, as requests/logprobs.py has them, None where no
    request asks for any.
    """

    finished: list[FinishedCompletion]
    sequences: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_version: int
    listings: np.ndarray | None = None

    def without(self, request_id):
        """The output without the tokens and completions of a request."""
        return self._part(lambda each: each.request_id != request_id)

    def only(self, request_id):
        """The part of it that belongs to a request."""
        return self._part(lambda each: each.request_id == request_id)

    def _part(self, is_kept):
        """The part of it for whose sequences and FinishedCompletions is_kept is true."""
        kept = [i for i, sequence in enumerate(self.sequences) if is_kept(sequence)]
        finished = [completion for completion in self.finished if is_kept(completion)]
        columns = self.sequences[kept], self.token_ids[kept], self.logprobs[kept]
        listings = None if self.listings is None else self.listings[kept]
        return StepOutput(finished, *columns, self.policy_version, listings)

    @property
    def num_tokens(self):
        """Tokens that were sampled: int."""
        return len(self.token_ids)

    @property
    def new_tokens(self):
        """The sampled tokens one by one: list of NewToken."""
        columns = self.sequences, self.token_ids.tolist(), self.logprobs.tolist()
        return [NewToken(s.request_id, s.index, token, logprob) for s, token, logprob in zip(*columns, strict=True)]


@dataclass
class RequestOutput:
    """The n completions of one prompt, also under vLLM's name `outputs`; prompt: its text, if it was given as one.

    request_id: the index of the prompt in the call, as a text. finished: whether it has all completions.
    """

    prompt_token_ids: list[int]
    completions: list[Completion] = field(default_factory=list)
    prompt: str | None = None
    request_id: str = ""

    @property
    def finished(self):
        return all(completion is not None and completion.finish_reason for completion in self.completions)

    @property
    def prompt_logprobs(self):
        """None, or of each token of the prompt a dict {id: Logprob}, None for the first: list."""
        return self.completions[0] and self.completions[0].prompt_logprobs

    @property
    def outputs(self):
        return self.completions

    def __getitem__(self, name):
        """text or token_ids of the first completion, which are an output of nano-vllm."""
        if name not in ("text", "token_ids"):
            raise TypeError(f"an output has ['text'] and ['token_ids'], got [{name!r}]; all else is in its completions")
        return getattr(self.completions[0], name)


class Sequence:
    """One unfinished completion of a request, which the scheduler moves between waiting and running.

    adapter: (adapter_id, -1 for none; cache_salt of its blocks); adapter_slot: the engine's. prompt: (P,) int32;
    philox_key: (2,) uint32, of the request's noise; length_limit: tokens, prompt included, at which it ends; stop_ids:
    ids that end it. While it runs its tokens are in row `row` of the table (None: it waits); token_ids, logprobs (of
    every position, 0 in the prompt) and policy_versions (of sampled tokens; arrays) are up to date when it leaves the
    row. is_prefix_leader: whether the sequences of the same prompt wait for it to compute the prompt.
    num_cached_tokens: those of the prompt that the cache held when it was first admitted; None before. retains_blocks:
    whether its blocks are retained at its end; continues: whether it is a further turn of an episode.
    """

    def __init__(self, request_id, index, prompt, params, philox_key, length_limit, stop_ids=(), adapter=(-1, "")):
        # The TokenRules of the request, if it has any; listings of its tokens, and of its prompt's, in their order.
        self.rules, self.listings, self.prompt_listings = None, [], []
        # Its GrammarState, if the request has a grammar; experts of its first tokens, where the engine returns them.
        self.grammar = self.routed_experts = None
        self.request_id, self.index, (self.adapter_id, self.cache_salt) = request_id, index, adapter
        self.adapter_slot = -1
        # Sequences of one key share the blocks of the prompt.
        self.prompt_key = *adapter, prompt.tobytes()
        self.prompt, self.params, self.philox_key = prompt, params, philox_key
        self.length_limit, self.stop_ids = length_limit, stop_ids
        self.token_ids = prompt
        self.logprobs = np.zeros(len(prompt), np.float32)
        # A value a token, like logprobs; empty unless the request wants them.
        self.thresholds = np.zeros(len(prompt) if params.logit_thresholds else 0, np.float32)
        self.policy_versions = np.zeros(0, np.int32)
        self.finish_reason = self.row = self.num_cached_tokens = None
        self.is_prefix_leader = self.retains_blocks = self.continues = False

    @property
    def num_to_score(self):
        """Tokens of the prompt after which the next one is to be listed: the first completion's, until all are."""
        is_asked = self.params.num_prompt_logprobs >= 0 and self.index == 0
        return len(self.prompt) - 1 if is_asked and len(self.prompt_listings) < len(self.prompt) - 1 else 0

    @property
    def completion_ids(self):
        return self.token_ids[len(self.prompt) :]

    @property
    def completion_logprobs(self):
        return self.logprobs[len(self.prompt) :]

    @property
    def completion_thresholds(self):
        return self.thresholds[len(self.prompt) :]


class SequenceTable:
    """The running sequences, one a row: R = num_rows rows of max_length tokens, which grow with what is put into them.

    token_ids, logprobs, thresholds: (R, max_length). length: tokens of a sequence; num_computed: those of them whose K
    and V are in the cache. block_tables (R, W): its num_blocks blocks of the cache, the first num_registered of which
    the block manager can match; last_hash: that of the last of these. sequences (R,): Sequence or None. The rest: what
    the sampler and the end of a sequence need.
    """

    def __init__(self, num_rows, block_size, max_length=0):
        R = num_rows
        self.num_rows, self.block_size, self.max_length = R, block_size, max_length
        width = -(-max_length // block_size)
        # Not zeroed: the pages of positions that no sequence reaches take no physical memory.
        self.token_ids = np.empty((R, max_length), np.int32)
        self.logprobs = np.empty((R, max_length), np.float32)
        self.thresholds = np.empty((R, max_length), np.float32)
        self.block_tables = np.zeros((R, width), np.int32)
        # Pages of linear attention's states, and where a sequence begins at one (blocks/state_pages.py).
        self.state_tables = np.zeros((R, -(-max_length // STATE_BLOCK)), np.int32)
        self.resumed_at = np.full(R, -1)
        # The RowWindows of a model with windows (blocks/row_windows.py).
        self.windows = None
        self.last_hash = np.zeros(R, np.uint64)
        self.stop_ids = np.full((R, 0), -1, np.int32)
        # As TokenRules, of the rows with has_bias, has_allowed and has_bad_words; others change nothing.
        self.bias_ids, self.bias = np.full((R, 0), -1, np.int32), np.zeros((R, 0), np.float32)
        self.allowed, self.bad_words = np.full((R, 0), -1, np.int32), np.full((R, 0, 0), -1, np.int32)
        self.philox_key = np.zeros((R, 2), np.uint32)
        self.sequences = np.full(R, None)
        counters = "prompt_length length length_limit num_computed num_blocks num_registered num_to_score"
        columns = {
            np.int64: counters,
            np.int32: "sample_index top_k min_tokens adapter_slot num_logprobs",
            bool: "has_stop_strings logit_thresholds has_bias has_allowed has_bad_words has_grammar",
        }
        columns[np.float32] = "temperature top_p min_p repetition_penalty presence_penalty frequency_penalty"
        for dtype, names in columns.items():
            for name in names.split():
                setattr(self, name, np.zeros(R, dtype))
        # The columns that are SamplingParams' under the same name.
        names = "temperature top_k top_p min_p logit_thresholds repetition_penalty presence_penalty"
        names = *names.split(), "frequency_penalty", "num_logprobs"
        self.of_params = [(name, getattr(self, name)) for name in names]

    def _reserve(self, length, num_stop_ids):
        """Widen the arrays to hold rows of `length` tokens and num_stop_ids stop ids."""
        if length > self.max_length:
            # At least twice as long, so that requests of rising lengths copy the table a few times only.
            wide = SequenceTable(self.num_rows, self.block_size, max(length, 2 * self.max_length))
            for name in ("token_ids", "logprobs", "thresholds", "block_tables", "state_tables"):
                old, new = getattr(self, name), getattr(wide, name)
                new[:, : old.shape[1]] = old
                setattr(self, name, new)
            self.max_length = wide.max_length
        if num_stop_ids > self.stop_ids.shape[1]:
            added = np.full((self.num_rows, num_stop_ids - self.stop_ids.shape[1]), -1, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, added], axis=1)

    def put(self, row, sequence):
        """Write a sequence to a row; none of its tokens is computed yet."""
        params, length = sequence.params, len(sequence.token_ids)
        self._reserve(sequence.length_limit, len(sequence.stop_ids))
        self.sequences[row], sequence.row = sequence, row
        self.token_ids[row, :length] = sequence.token_ids
        self.logprobs[row, :length] = sequence.logprobs
        if params.logit_thresholds:
            self.thresholds[row, :length] = sequence.thresholds
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(sequence.stop_ids)] = sequence.stop_ids
        self.philox_key[row], self.adapter_slot[row] = sequence.philox_key, sequence.adapter_slot
        self.prompt_length[row] = len(sequence.prompt)
        self.length[row] = length
        self.length_limit[row] = sequence.length_limit
        self.num_computed[row] = self.num_blocks[row] = self.num_registered[row] = 0
        self.sample_index[row] = params.first_index + sequence.index
        self.num_to_score[row] = sequence.num_to_score
        for name, column in self.of_params:
            column[row] = getattr(params, name)
        # No sequence gets more, and the column is int32, as a prompt's length with it must be.
        self.min_tokens[row] = min(params.min_tokens, sequence.length_limit)
        self.has_stop_strings[row] = bool(params.stop)
        self.has_grammar[row] = sequence.grammar is not None
        if self.has_grammar[row]:
            # The tokens that its grammar allows are without those that end it too early.
            self.min_tokens[row] = 0
        self._put_rules(row, sequence.rules)

    def _put_rules(self, row, rules):
        """Write the TokenRules of a row, or that it has none."""
        for name in ("bias_ids", "bias", "allowed", "bad_words"):
            column = getattr(self, name)
            column[row] = 0 if name == "bias" else -1
            if rules is not None:
                value = getattr(rules, name)
                column = widened(column, value.shape)
                setattr(self, name, column)
                # Words end in the last column.
                column[row][place_of(value.shape, column.shape[1:])] = value
        self.has_bias[row] = rules is not None and rules.bias.size > 0
        self.has_allowed[row] = rules is not None and rules.allowed.size > 0
        self.has_bad_words[row] = rules is not None and rules.bad_words.size > 0

    def note_version(self, row, policy_version):
        """Tokens of a row that have no policy version yet were sampled from this one."""
        sequence = self.sequences[row]
        known = sequence.policy_versions
        added = int(self.length[row] - self.prompt_length[row]) - len(known)
        new = np.full(added, policy_version, np.int32)
        sequence.policy_versions = np.concatenate([known, new]) if len(known) else new

    def take(self, row, policy_version):
        """Clear a row and return its sequence with its tokens; those without a policy version have this one."""
        self.note_version(row, policy_version)
        sequence, length = self.sequences[row], int(self.length[row])
        sequence.token_ids = self.token_ids[row, :length].copy()
        sequence.logprobs = self.logprobs[row, :length].copy()
        if sequence.params.logit_thresholds:
            sequence.thresholds = self.thresholds[row, :length].copy()
        self.sequences[row] = sequence.row = None
        return sequence
