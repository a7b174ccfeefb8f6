"""A teacher that a server has: log-probs of given and of likeliest tokens by its /completions, without a forward here.

    teacher = ServedTeacher("http://127.0.0.1:8000/v1", timeout_s=600.0)
    teacher.start()                     waits until the server answers
    teacher.logprobs(rollouts)          (T,) float32: of each completion token
    teacher.listings(rollouts, k)       (T, k) LISTED: of each, the k likeliest tokens that could have been there

A request has the tokens of one sequence as its prompt and asks for prompt_logprobs, an extension of vLLM's that this
package's server has, too. They are by the model's own logits, so at temperature 1. A request that fails is sent again
until timeout_s have passed: a server that is started anew meanwhile costs the run no more than that time.

Source: prime-rl, whose teacher is an inference server that scores in this way.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rlnumba.errors import UserError
from rlnumba.reporting.stderr import log
from rlnumba.rewards.served import FAILURES, is_passing, message_of, post, reason_of

# Requests at a time; seconds before one is sent again.
CONCURRENCY, RETRY_S = 16, 1.0
# A token of a listing.
LISTED = np.dtype([("token_id", np.int32), ("logprob", np.float32)])


class ServedTeacher:
    """The teacher of a server. url: of its API, up to /v1. timeout_s: how long a request may fail."""

    def __init__(self, url, timeout_s):
        self.url, self.timeout_s, self._has_failed = url, timeout_s, False
        self._pool = ThreadPoolExecutor(CONCURRENCY, "teacher")

    def start(self, vocab_size, top_k=0):
        """Wait for the server, and let it score the last token of a vocabulary, and list top_k. Raises UserError as
        `logprobs`."""
        log(f"waiting for the teacher at {self.url}, up to {self.timeout_s:g} s")
        self._scores([0, vocab_size - 1], top_k)

    def logprobs(self, parts):
        """The log-probs of the targets of Rollouts of one sequence each: list of (T,) float32.

        Raises UserError, one line with the URL, once a request has failed for timeout_s.
        """
        return self._of_targets(parts, 0)

    def listings(self, parts, top_k):
        """The top_k likeliest tokens in place of each target, the likeliest first, of Rollouts of one sequence each:
        list of (T, top_k) LISTED. Raises UserError as `logprobs`."""
        return self._of_targets(parts, top_k)

    def _of_targets(self, parts, top_k):
        rows = [row for part in parts for row in np.split(part.token_ids, np.cumsum(part.row_lengths)[:-1])]
        tasks = [self._pool.submit(self._scores, row.tolist(), top_k) for row in rows]
        try:
            scores = iter([task.result() for task in tasks])
        except BaseException:  # a signal, too
            # The process's end waits for what its threads do.
            self._has_failed = True
            raise
        finally:
            for task in tasks:
                task.cancel()
        found = []
        for part in parts:
            of_tokens = np.concatenate([next(scores) for _ in part.row_lengths])[part.prompt_lengths[0] :]
            found.append(of_tokens[part.drawn] if len(part.drawn) else of_tokens)
        return found

    def _scores(self, token_ids, top_k):
        """The log-prob of each token after those before it, 0 of the first: (S,) float32; with top_k above 0 the
        likeliest instead, (S, top_k) LISTED."""
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
        content, until = json.dumps(body), time.monotonic() + self.timeout_s
        while True:
            try:
                status, answer = post(self.url, "/completions", content, max(until - time.monotonic(), 1.0))
                if status == 200:
                    return listings_of(answer, token_ids, top_k) if top_k else scores_of(answer, token_ids)
                reason, passes = message_of(status, answer), is_passing(status)
            except FAILURES as error:
                reason, passes = reason_of(error), True
            if not passes or self._has_failed or time.monotonic() + RETRY_S > until:
                raise UserError(f"teacher {self.url}: {reason}")
            time.sleep(RETRY_S)


def scores_of(answer, token_ids):
    """The log-probs (S,) float32 in the answer (bytes) to a request with these tokens. Raises ValueError."""
    try:
        listed = json.loads(answer)["choices"][0]["prompt_logprobs"]
        pairs = zip(listed[1:], token_ids[1:], strict=True)
        return np.float32([0.0, *(of_token[str(token)]["logprob"] for of_token, token in pairs)])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("its answer has no prompt_logprobs of the tokens") from error


def _unlikelihood(pair):
    """The key by which pairs (token, log-prob) are sorted: the likeliest first, of equals the lower token."""
    token, logprob = pair
    return -logprob, token


def listings_of(answer, token_ids, top_k):
    """The top_k likeliest tokens (S, top_k) LISTED in place of each of these tokens, in an answer (bytes). Raises
    ValueError."""
    found = np.zeros((len(token_ids), top_k), LISTED)
    try:
        listed = json.loads(answer)["choices"][0]["prompt_logprobs"]
        for row, of_token in zip(found[1:], listed[1:], strict=True):
            # The token itself is listed, too, whether it is one of the likeliest or not.
            likeliest = sorted(((int(i), float(each["logprob"])) for i, each in of_token.items()), key=_unlikelihood)
            if len(likeliest) < top_k:
                raise ValueError
            row[:] = likeliest[:top_k]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"its answer has no prompt_logprobs of the {top_k} likeliest tokens") from error
    return found


class UnaskedTeacher:
    """In place of a ServedTeacher where a step is planned: it lists the first tokens everywhere."""

    def listings(self, parts, top_k):
        """ServedTeacher.listings, without a request."""
        listing = np.zeros(top_k, LISTED)
        listing["token_id"], listing["logprob"] = np.arange(top_k), -np.log(top_k + 1)
        return [np.tile(listing, (int(part.target_lengths.sum()), 1)) for part in parts]
