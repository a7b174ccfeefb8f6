"""Routes on token ids: /inference/v1/generate, /tokenize, /detokenize."""

import math

from rlnumba.serve.protocol.answers import ApiAnswer
from rlnumba.serve.protocol.bodies import Body
from rlnumba.serve.protocol.errors import ApiError
from rlnumba.serve.protocol.logprobs import TokenTexts, finite, prompt_object, rows_of_completion, rows_of_delta
from rlnumba.serve.protocol.sampling import Sampling
from rlnumba.serve.routes.chat import ChatPrompt

# Most tokens of a sampling mask, as in vLLM, and how many beyond top_k may tie with the last of them.
MOST_KEPT, MOST_TIES = 2048, 32


class GenerateAnswer(ApiAnswer):
    """Token ids in, token ids with their log-probs out, for trainers."""

    def __init__(self, service, body, request_id):
        super().__init__(service, body, request_id, "generate", "generate")
        self.token_ids = body.token_ids("token_ids", service.vocab_size)
        if not self.token_ids:
            body.refuse("token_ids", "a list of at least one token id")
        params = body.object("sampling_params") or Body({}, "sampling_params")
        self.sampling = Sampling(params, params.integer("max_tokens", low=1), clamps=True)
        self.sampling.check_ids(service.tokenizer, service.vocab_size)
        self.num_logprobs = service.num_logprobs(params, "logprobs")
        self.sampling.list_logprobs(self.num_logprobs, service)
        # Each token has its rank, which is listed with it.
        self.sampling.values["logprobs"] = True if self.num_logprobs is None else self.num_logprobs
        self.masks = SamplingMasks.of(service, body, params, self.sampling.values)
        if self.masks is not None:
            self.sampling.values["logprobs"] = max(self.num_logprobs or 0, self.masks.num_listed)
        self.has_prompt_logprobs = self.sampling.values.get("prompt_logprobs") is not None
        if self.has_prompt_logprobs and self.stream.streams:
            raise ApiError("log-probs of a prompt are not streamed", "sampling_params.prompt_logprobs")
        self.num_sequences = self.sampling.n
        self.texts = TokenTexts(None)

    def head(self, kind):
        version = self.service.version(self.policy_version)
        return {"request_id": self.request_id, "model": self.model, "weight_version": version}

    @property
    def renders(self):
        return self.sampling.has_grammar

    def prepare(self):
        """(the prompt's token ids, its SamplingParams), lists of one. Raises ApiError."""
        length = len(self.token_ids)
        return [self.token_ids], self.sampling.params([length], self.service, "token_ids")

    def opening(self):
        """Chunks before the first token: list."""
        return []

    def choice(self, index, completion):
        found = self.object(index, rows_of_completion(completion), completion)
        return found | {"weight_versions": self.spans(completion)}

    def choice_chunks(self, delta):
        found = self.object(delta.choice, rows_of_delta(delta), delta.completion)
        if delta.completion is not None:
            found["weight_versions"] = self.spans(delta.completion)
        return [self.chunk([found])]

    def spans(self, completion):
        """The version_spans of a Completion, with the trainer's names of the versions."""
        return version_spans(list(map(self.service.version, completion.policy_versions)))

    def whole(self, completions):
        found = super().whole(completions)
        if self.has_prompt_logprobs:
            found["prompt_logprobs"] = prompt_object(completions[0].prompt_logprobs)
        return found

    def object(self, index, rows, completion):
        """The object of a choice. Log-probs are those of the distribution that was sampled from."""
        found = {"index": index, "token_ids": [row.token_id for row in rows], "logprobs": None}
        found["finish_reason"] = None if completion is None else completion.finish_reason
        found["stop_reason"] = None if completion is None else completion.stop_reason
        if self.masks is not None:
            found["sampling_mask"] = list(map(self.masks.of_row, rows))
        if self.num_logprobs is not None:
            found["logprobs"] = {"content": list(map(self.entry, rows))}
        return found

    def entry(self, row):
        """The object of a token."""

        def of(token_id, logprob, rank):
            found = {"token": self.texts.text(token_id), "token_id": token_id, "logprob": finite(logprob)}
            return found | {"rank": rank, "bytes": None}

        top = [of(token_id, each.logprob, each.rank) for token_id, each in row.top(self.num_logprobs)]
        return of(row.token_id, row.logprob, row.rank) | {"top_logprobs": top}


class SamplingMasks:
    """The tokens that the filters of a request kept, of each drawn token (vLLM's --return-sampling-mask).

    num_listed: tokens listed with each: a few more than top_k, because all that tie with the last one are kept.
    """

    def __init__(self, num_listed, vocab_size, is_greedy):
        self.num_listed, self.vocab_size, self.is_greedy = num_listed, vocab_size, is_greedy

    @classmethod
    def of(cls, service, body, params, values):
        """The SamplingMasks that a body asks for, or None. values: its SamplingParams. Raises ApiError."""
        default = service.settings.return_sampling_mask
        if not params.boolean("return_sampling_mask", body.boolean("return_sampling_mask", default)):
            return None
        if service.raw_logprobs:
            raise ApiError("a sampling mask needs --logprobs-mode processed_logprobs", "return_sampling_mask")
        if values.get("temperature") == 0:
            return cls(0, service.vocab_size, True)
        bounds = [max(values.get("top_k", 0), 0), len(values.get("allowed_token_ids", ()))]
        bound = min(filter(None, bounds), default=None)
        if bound is None:
            if values.get("top_p", 1) == 1 and not values.get("min_p"):
                return None
            raise ApiError("a sampling mask needs a top_k beside top_p and min_p", params.name("top_k"))
        if bound > MOST_KEPT:
            raise ApiError(f"a sampling mask needs a top_k of at most {MOST_KEPT}", params.name("top_k"))
        return cls(min(bound + MOST_TIES, service.vocab_size), service.vocab_size, False)

    def of_row(self, row):
        """The ids of the tokens that were kept, in their order. Raises ApiError where more are than are listed."""
        if self.is_greedy:
            return [row.token_id]
        kept = sorted(token_id for token_id, each in row.listed.items() if each.logprob > -math.inf)
        if self.num_listed <= len(kept) < self.vocab_size:
            raise ApiError("more tokens tie at the boundary of top_k than a sampling mask has", status=500)
        return kept


def version_spans(versions):
    """[{version, start, end}] of the stretches of equal policy versions: token `end` is the first after one."""
    spans = []
    for index, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": index, "end": index})
        spans[-1]["end"] = index + 1
    return spans


def tokenize(service, body):
    """The answer of /tokenize: token ids of a prompt or of messages."""
    service.check_model(body)
    service.need_tokenizer("prompt")
    wants_texts = body.boolean("return_token_strs")
    if body.has("messages"):
        prompt = ChatPrompt(service, body)
        ids = service.encode(prompt.render(), prompt.add_special_tokens, "messages")
    else:
        text = body.string("prompt")
        if text is None:
            body.refuse("prompt", "a text; or give messages")
        ids = service.encode(text, body.boolean("add_special_tokens", True), "prompt")
    strings = list(map(service.tokenizer.backend.id_to_token, ids)) if wants_texts else None
    return {"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len, "token_strs": strings}


def detokenize(service, body):
    """The answer of /detokenize: the text of token ids, special tokens included."""
    service.check_model(body)
    service.need_tokenizer("tokens")
    ids = body.token_ids("tokens", service.vocab_size)
    if ids is None:
        body.refuse("tokens", "a list of token ids")
    return {"prompt": service.tokenizer.decode(ids, skip_special_tokens=False)}
