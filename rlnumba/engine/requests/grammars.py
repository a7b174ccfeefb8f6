"""Grammars of completions: the tokens that each of them allows next, and where its tokens have led.

    grammars.check(params)               ConfigError for a grammar that is none, before anything is queued
    state = grammars.state(params)       of a new sequence, None without a grammar
    grammars.allowed(step, table)        words of allowed tokens for a step that is about to be launched
    grammars.advance(sequences, ids)     the tokens that it drew

A mask depends on the tokens before it, so the host computes it between two steps; rows without a grammar have no part
in that. A grammar ends with EOS, which is allowed where its text may end.
"""

import os
import threading
import time
from collections import OrderedDict
from operator import is_

import numpy as np

from rlnumba.engine.requests.grammar_tokens import grammar_tokenizer
from rlnumba.engine.requests.structured_outputs import grammar_source, package
from rlnumba.engine.requests.token_rules import bits_of
from rlnumba.errors import ConfigError, UserError

# Compiled grammars that are kept, some KiB to some MiB each; those of the longest disuse go first.
MAX_COMPILED = 64
# Forms of a grammar, as many as threads that compute masks; only if one compiles in so many seconds.
MAX_FORMS = min(os.cpu_count() or 1, 16)
QUICK_S = 0.05
# From so many sequences on, llguidance's threads take in what a step drew: 2 to 13 us for one token.
ADVANCED_TOGETHER = 8
# Characters of llguidance's messages that are shown: the rest is its internal state.
MESSAGE_LENGTH = 300


class CompiledGrammar:
    """A grammar's compiled forms, of which new sequences get copies in turn.

    llguidance locks what all copies of one form have learnt about it, so that its threads compute masks of one after
    another. Forms of their own cost what compiling costs, so only grammars that compile quickly have several.

    make(): a new LLMatcher, compiled; at_first: one, which took `seconds`.
    """

    def __init__(self, make, at_first, seconds):
        self.make, self.forms, self.num_copies, self.lock = make, [at_first], 0, threading.Lock()
        self.most = MAX_FORMS if seconds <= QUICK_S else 1

    def copy(self):
        """(new LLMatcher at the beginning, number of its form)."""
        with self.lock:
            form, self.num_copies = self.num_copies % self.most, self.num_copies + 1
            if form == len(self.forms):
                self.forms.append(self.make())
            return self.forms[form].deep_copy(), form


class GrammarState:
    """A sequence's grammar. matcher: llguidance's LLMatcher after the completion's tokens, None until `Grammars.resume`
    where the sequence has come from another process; form: the number of the compiled form that it is a copy of."""

    def __init__(self, params, matcher, form):
        self.params, self.matcher, self.form = params, matcher, form

    def __getstate__(self):
        return {"params": self.params, "matcher": None, "form": 0}


class DamagedGrammars(Exception):
    """Sequences that a step cannot go on with, and why."""

    def __init__(self, sequences, reason):
        super().__init__(reason)
        self.sequences, self.reason = sequences, reason


class NoTokenLeft(DamagedGrammars):
    """Sequences whose other rules allow nothing that their grammars do."""


class Grammars:
    """The compiled grammars of an engine. tokenizer: Tokenizer or None; its ids are those below vocab_size.

    `check` and `state` may be called in any thread, the rest in the engine's.
    """

    def __init__(self, tokenizer, vocab_size, eos_token_ids):
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, eos_token_ids
        # A lock for each of two durations: the engine's thread does not wait for what another one compiles.
        self.lock, self.compiling = threading.Lock(), threading.Lock()
        # CompiledGrammars by StructuredOutputsParams; llguidance's tokenizer, and its threads.
        self.compiled, self._tokenizer, self._executor = OrderedDict(), None, None
        # The sequences of the last masks, with what `_followed` found of them.
        self.followed, self._matchers = [], ([], [], np.zeros(0, np.int64))

    def end_with(self, eos_token_ids):
        """Let the grammars of sequences that begin from now on end with these ids."""
        if eos_token_ids != self.eos_token_ids:
            with self.compiling, self.lock:
                self.eos_token_ids, self._tokenizer = eos_token_ids, None
                self.compiled.clear()

    def check(self, params):
        """Raise ConfigError if the grammar of SamplingParams cannot be followed."""
        if params.structured_outputs is not None:
            self._compiled(params.structured_outputs)

    def state(self, params):
        """A GrammarState at its beginning for SamplingParams, None without a grammar. Raises ConfigError."""
        if (structured := params.structured_outputs) is None:
            return None
        return GrammarState(structured, *self.matcher(structured))

    def matcher(self, structured):
        """(new LLMatcher of StructuredOutputsParams, number of its form). Raises ConfigError."""
        return self._compiled(structured).copy()

    def resume(self, sequence):
        """Have a sequence's grammar where its tokens have led, where it comes from another process."""
        state = sequence.grammar
        if state is not None and state.matcher is None:
            state.matcher, state.form = self.matcher(state.params)
            state.matcher.consume_tokens(sequence.completion_ids.tolist())

    def _compiled(self, structured):
        found = self._find(structured)
        if found is None:
            with self.compiling:
                # Another thread may have compiled it meanwhile.
                found = self._find(structured)
                if found is None:
                    found = self._compile(structured)
                    with self.lock:
                        self.compiled[structured] = found
                        if len(self.compiled) > MAX_COMPILED:
                            self.compiled.popitem(last=False)
        return found

    def _find(self, structured):
        with self.lock:
            if structured in self.compiled:
                self.compiled.move_to_end(structured)
            return self.compiled.get(structured)

    def _compile(self, structured):
        llguidance = package()
        if self.tokenizer is None:
            raise ConfigError("sampling: structured_outputs needs a tokenizer, and the model folder has none")
        if not self.eos_token_ids:
            raise ConfigError("sampling: structured_outputs end with EOS, and the model has no EOS")
        if self._tokenizer is None:
            self._tokenizer = grammar_tokenizer(self.tokenizer, self.vocab_size, self.eos_token_ids)
        added = {t.content: i for i, t in self.tokenizer.backend.get_added_tokens_decoder().items()}
        try:
            source = grammar_source(structured, added, self.eos_token_ids)
        except ValueError as error:
            raise ConfigError(f"sampling: structured_outputs.{structured.kind}: {one_line(error)}") from None
        limits = llguidance.LLParserLimits(verbose_errors=False)

        def compiled():
            return llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)

        started = time.perf_counter()
        matcher = compiled()
        seconds = time.perf_counter() - started
        if matcher.is_error():
            raise ConfigError(f"sampling: structured_outputs.{structured.kind}: {one_line(matcher.get_error())}")
        beginning = matcher.deep_copy()
        mask = np.frombuffer(beginning.compute_bitmask(), np.uint8)
        # Where a forced byte has no token the mask has one that the matcher refuses.
        first = np.flatnonzero(np.unpackbits(mask, bitorder="little"))[:1].tolist()
        if not first or beginning.is_error() or beginning.validate_tokens(first) == 0:
            raise ConfigError(
                f"sampling: structured_outputs.{structured.kind}: no token of the model begins such a text"
            )
        return CompiledGrammar(compiled, matcher, seconds)

    @property
    def executor(self):
        """llguidance's threads."""
        if self._executor is None:
            self._executor = package().LLExecutor()
        return self._executor

    def allowed(self, step, table):
        """The masks of a step; None where none of its sequences has a grammar. Raises as `masks` does."""
        return self.masks(step, table) if table.has_grammar[step.sampled_rows].any() else None

    def masks(self, step, table, memory=None):
        """Words of allowed tokens (D, W) int32 for the D tokens that a step samples.

        Those of rows without a grammar are allowed_token_ids'. memory (D, W) int32: where they are written, else new.
        Raises NoTokenLeft, and DamagedGrammars for too complex ones.
        """
        sampled = step.sampled_rows
        # A sequence with drafts has several samples: the mask after each draft follows that before it.
        rows, counts = (step.rows, step.counts) if step.has_drafts else (sampled, np.ones_like(sampled))
        of_grammar = np.flatnonzero(table.has_grammar[rows])
        firsts, counts = (np.cumsum(counts) - counts)[of_grammar], counts[of_grammar]
        matchers, by_form, min_tokens = self._followed(table.sequences[rows[of_grammar]])
        masks = np.empty((len(sampled), -(-self.vocab_size // 32)), np.int32) if memory is None else memory
        # llguidance writes those of all matchers, but not those after a draft that it refuses.
        if len(matchers) < len(sampled):
            masks[...] = -1
        memory = masks.ctypes.data, 4 * masks.shape[1], len(masks)
        places = firsts.tolist()
        alone = [(matchers[i], places[i]) for i in by_form]
        if step.has_drafts:
            with_drafts = []
            for i in np.flatnonzero(counts > 1).tolist():
                row = rows[of_grammar[i]]
                length = table.length[row]
                drafts = table.token_ids[row, length : length + counts[i] - 1].tolist()
                with_drafts.append((matchers[i], places[i], drafts))
            alone = [(matchers[i], places[i]) for i in by_form if counts[i] == 1]
            if with_drafts:
                self.executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *memory)
            for _, first, drafts in with_drafts:
                self._mask_after_eos(masks[first : first + len(drafts) + 1], drafts)
        if alone:
            self.executor.unsafe_compute_mask_ptr(alone, *memory)
        if any(matcher.is_error() for matcher in matchers):
            _check(self.followed)
        missing = min_tokens - (table.length - table.prompt_length)[rows[of_grammar]]
        for i in np.flatnonzero(missing > 0).tolist():
            for mask in masks[firsts[i] : firsts[i] + min(counts[i], missing[i])]:
                mask[...] = without(mask, table.stop_ids[rows[of_grammar[i]]])
        stuck = np.bitwise_or.reduce(masks, axis=1)[firsts] == 0
        if stuck.any():
            reason = "structured_outputs: no token of the model goes on with the text"
            raise DamagedGrammars(table.sequences[rows[of_grammar[stuck]]], reason)
        limited = np.flatnonzero(table.has_allowed[sampled])
        if len(limited):
            masks[limited] &= table.allowed[sampled[limited]]
            # What a draft leads to is drawn from only if the draft is accepted.
            empty = np.intersect1d(limited[~masks[limited].any(axis=1)], firsts)
            if len(empty):
                sequences = table.sequences[sampled[empty]]
                raise NoTokenLeft(sequences, "structured_outputs and allowed_token_ids leave no token")
        return masks

    def _mask_after_eos(self, masks, drafts):
        """Let EOS alone follow a draft that is EOS, which ignore_eos makes possible: llguidance leaves those masks out.

        masks (1 + count, W) int32: for each of the drafts and for the token after them, -1 where none was written.
        """
        ends = [i for i, token in enumerate(drafts, start=1) if token in self.eos_token_ids]
        if ends:
            after = masks[ends[0] :]
            after[(after == -1).all(axis=1)] = bits_of(self.eos_token_ids, self.vocab_size)

    def _followed(self, sequences):
        """(matchers of sequences (G,), list; their numbers with those of one form side by side, list; their min_tokens
        (G,)): those of the last call if these are its sequences."""
        sequences = sequences.tolist()
        if len(sequences) != len(self.followed) or not all(map(is_, sequences, self.followed)):
            matchers = [each.grammar.matcher for each in sequences]
            # A thread takes what stands side by side, and so seldom waits for another one.
            by_form = sorted(range(len(sequences)), key=lambda i: sequences[i].grammar.form)
            min_tokens = [min(each.params.min_tokens, each.length_limit) for each in sequences]
            self._matchers = matchers, by_form, np.array(min_tokens, np.int64)
            self.followed = sequences
        return self._matchers

    def advance(self, sequences, token_ids):
        """Take in tokens (D,) that sequences (D,) drew; those that have ended with them need no more.

        Raises DamagedGrammars for tokens that the grammar does not have, and grammars that are too complex.
        """
        open_ones = [
            (sequence, sequence.grammar.matcher, token)
            for sequence, token in zip(sequences, token_ids.tolist(), strict=True)
            if sequence.grammar is not None and sequence.finish_reason is None
        ]
        # A sequence with accepted drafts is there once for each of its tokens.
        if len(open_ones) < ADVANCED_TOGETHER or len({id(matcher) for _, matcher, _ in open_ones}) < len(open_ones):
            taken = [matcher.consume_token(token) for _, matcher, token in open_ones]
        else:
            open_ones.sort(key=lambda each: each[0].grammar.form)
            taken = self.executor.consume_token_par([(matcher, token) for _, matcher, token in open_ones])
        if not all(taken):
            _check([sequence for sequence, _, _ in open_ones])


def _check(sequences):
    """Raise DamagedGrammars if a matcher of sequences is in an error."""
    damaged = [each for each in sequences if each.grammar.matcher.is_error()]
    if damaged:
        raise DamagedGrammars(damaged, f"structured_outputs: {one_line(damaged[0].grammar.matcher.get_error())}")


def without(mask, ids):
    """A mask (W,) int32 without the bits of ids; the mask itself if nothing else is left of it."""
    kept = mask.copy()
    for token in ids[ids >= 0].tolist():
        kept.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
    return kept if kept.any() else mask


def one_line(error):
    """The beginning of a message of llguidance, without line breaks: str."""
    text = " ".join(str(error).split())
    return text if len(text) <= MESSAGE_LENGTH else f"{text[: MESSAGE_LENGTH - 3]}..."


class GrammarReplay:
    """The masks of completions that are trained on, all of one grammar: the sampler's, from the tokens alone.

    structured: StructuredOutputsParams; the others are Grammars'.
    """

    def __init__(self, structured, tokenizer, vocab_size, eos_token_ids):
        self.structured, self.vocab_size = structured, vocab_size
        self.eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.grammars = Grammars(tokenizer, vocab_size, self.eos_token_ids)

    def allowed(self, token_ids, lengths):
        """Words of allowed tokens (T, W) int32 for the T tokens of completions of these lengths, one after another.

        Raises UserError for tokens that the grammar does not have.
        """
        masks = np.full((len(token_ids), -(-self.vocab_size // 32)), -1, np.int32)
        firsts, live = np.cumsum(lengths) - lengths, np.flatnonzero(lengths)
        copies = [self.grammars.matcher(self.structured) for _ in lengths]
        matchers = [matcher for matcher, _ in copies]
        # As _followed has them, for the sake of threads.
        live = np.array(sorted(live.tolist(), key=lambda i: copies[i][1]), np.int64)
        memory, executor = (masks.ctypes.data, 4 * masks.shape[1], len(masks)), self.grammars.executor
        for position in range(int(np.max(lengths, initial=0))):
            live = live[lengths[live] > position]
            executor.unsafe_compute_mask_ptr([(matchers[i], int(firsts[i]) + position) for i in live.tolist()], *memory)
            for i in live[lengths[live] > position + 1].tolist():
                if not matchers[i].consume_token(int(token_ids[firsts[i] + position])):
                    raise UserError(f"structured_outputs: {one_line(matchers[i].get_error())}")
        return masks
