"""tokens.jsonl: the tokens of some completions of each optimizer step, with the values that the step has of them.

    step              the optimizer step that trained on the completion
    completion_step   the step of its line in completions.jsonl, and
    index             the number of that line among those of its step, from 0; both null after a resumption
    tokens            texts, which join to the completion's, special tokens included
    token_ids, mask   mask 0: not trained on; where an environment wrote the token, the values are null
    logprobs          by the policy before the step
    sampling_logprobs when it was drawn, by the sampler
    ratio             exp(logprobs - old log-probs), 1 where the old ones are the policy's own
    entropy, advantage

What is trained on is in another order than what was drawn, and cut otherwise: a sequence finds its line by its ids.
"""

from collections import defaultdict, deque

import numpy as np

# Decimals of the values: those of float32 near 1.
DECIMALS = 6


def token_texts(decode, token_ids):
    """Texts of tokens that join to the text of them all: list of str.

    decode(ids): str. Tokens that are a part of a character have an empty text, and the last of them the character.
    """
    texts, first, end = [], 0, 0
    for i in range(len(token_ids)):
        # Decoded after the token before, because a first token may lose its space.
        before, text = decode(token_ids[first:end]), decode(token_ids[first : i + 1])
        if text.endswith("\ufffd") and i + 1 < len(token_ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first, end = end, i + 1
    return texts


def key_of(prompt_length, token_ids):
    """A key of a sequence, prompt and completion: tuple."""
    return int(prompt_length), np.asarray(token_ids, np.int32).tobytes()


class TokenLog:
    """The lines of a run's tokens.jsonl. writer: its MetricsWriter. count: completions of a step that are written, the
    first ones of completions.jsonl; -1: all.

    step: the optimizer step whose values are written next.
    """

    def __init__(self, writer, tokenizer, count):
        self.writer, self.count, self.step = writer, count, 0
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        # The step of the newest completions, the number of their lines, {key_of a sequence: [index of a line]}.
        self._drawn_at, self._num_lines, self._lines = None, 0, None

    def begin(self, step, generation):
        """The lines of a Generation are written at this step."""
        if step != self._drawn_at:
            self._drawn_at, self._num_lines, self._lines = step, 0, defaultdict(list)
        for index, sample in enumerate(generation.samples, start=self._num_lines):
            prompt = sample.prompt_token_ids
            ids = np.concatenate([np.asarray(prompt, np.int32), sample.completion.array("token_ids")])
            self._lines[key_of(len(prompt), ids)].append(index)
        self._num_lines += len(generation.samples)

    def write(self, parts, results):
        """Have the tokens of this step written in the background: one of Policy.after_step.

        parts: list of Rollouts; results: list of dicts, the arrays logprobs and entropy (T,) of each part.
        """
        chosen = self._chosen(parts)
        found = [self._arrays(parts[i], results[i], j) | {"index": index} for index, i, j in chosen]
        self.writer.tokens(self.step, (self._row(arrays) for arrays in found))

    def _chosen(self, parts):
        """[(index of its line or None, number of its part, number in the part)] of the completions that are written."""
        sequences, left = [], {key: deque(indices) for key, indices in (self._lines or {}).items()}
        for i, part in enumerate(parts):
            ends = np.cumsum(part.lengths)
            for j, (end, length) in enumerate(zip(ends.tolist(), part.lengths.tolist(), strict=True)):
                key = key_of(part.prompt_lengths[j], part.token_ids[end - length : end])
                indices = left.get(key)
                sequences.append((indices.popleft() if indices else None, i, j))
        if self._lines is None:
            return sequences if self.count < 0 else sequences[: self.count]
        known = sorted(each for each in sequences if each[0] is not None)
        return known if self.count < 0 else [each for each in known if each[0] < self.count]

    def _arrays(self, part, result, j):
        """Copies of the arrays of completion j of a part: dict."""
        end, length = int(part.target_lengths[: j + 1].sum()), int(part.target_lengths[j])
        targets, one = slice(end - length, end), part.part(j, 1)
        drawn = one.drawn if len(one.drawn) else np.ones(int(one.completion_lengths[0]), bool)
        logprobs, sampled = result["logprobs"][targets].astype(np.float64), one.rollout_logprobs
        old = one.old_logprobs if len(one.old_logprobs) else sampled
        values = {
            "mask": one.loss_mask, "logprobs": logprobs, "sampling_logprobs": sampled,
            "ratio": np.ones(length) if part.on_policy else np.exp(logprobs - old),
            "entropy": result["entropy"][targets], "advantage": one.advantages,
        }  # fmt: skip
        found = {"completion_step": self._drawn_at, "token_ids": one.token_ids[int(one.prompt_lengths[0]) :].copy()}
        for name, of_drawn in values.items():
            found[name] = np.full(len(drawn), 0.0 if name == "mask" else np.nan)
            found[name][drawn] = of_drawn
        return found

    def _row(self, arrays):
        """A line of tokens.jsonl: dict."""
        first = {name: arrays.pop(name) for name in ("completion_step", "index")}
        token_ids, mask = arrays.pop("token_ids").tolist(), arrays.pop("mask").astype(int).tolist()
        first |= {"tokens": token_texts(self._decode, token_ids), "token_ids": token_ids, "mask": mask}
        # What an environment wrote has no values.
        rounded = {name: np.round(array, DECIMALS).tolist() for name, array in arrays.items()}
        return first | {name: [None if x != x else x for x in values] for name, values in rounded.items()}
