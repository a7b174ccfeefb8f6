"""Routes on token ids: /inference/v1/generate, /tokenize, /detokenize."""

from rlnumba.serve.answers import ApiAnswer
from rlnumba.serve.bodies import Body
from rlnumba.serve.chat import ChatPrompt
from rlnumba.serve.errors import ApiError
from rlnumba.serve.logprobs import TokenTexts, finite
from rlnumba.serve.sampling import Sampling


class GenerateAnswer(ApiAnswer):
    """Token ids in, token ids with their log-probs out, for trainers."""

    def __init__(self, service, body, request_id):
        super().__init__(service, body, request_id, "generate", "generate")
        self.token_ids = body.token_ids("token_ids", service.vocab_size)
        if not self.token_ids:
            body.refuse("token_ids", "a list of at least one token id")
        params = body.object("sampling_params") or Body({}, "sampling_params")
        self.sampling = Sampling(params, params.integer("max_tokens", low=1), clamps=True)
        self.sampling.check_stops(service.tokenizer, service.vocab_size)
        self.num_logprobs = params.integer("logprobs", low=0, high=service.settings.max_logprobs)
        if self.num_logprobs and self.num_logprobs > 1:
            raise ApiError("sampling_params.logprobs above 1 is not supported", "sampling_params.logprobs")
        self.num_sequences = self.sampling.n
        self.texts = TokenTexts(None)

    def head(self, kind):
        return {"request_id": self.request_id, "model": self.model}

    def prepare(self):
        """(the prompt's token ids, its SamplingParams), lists of one. Raises ApiError."""
        length = len(self.token_ids)
        return [self.token_ids], self.sampling.params([length], self.service.max_model_len, "token_ids")

    def opening(self):
        """Chunks before the first token: list."""
        return []

    def choice(self, index, completion):
        found = self.object(index, completion.token_ids, completion.logprobs, completion)
        return found | {"weight_versions": version_spans(completion.policy_versions)}

    def choice_chunks(self, delta):
        found = self.object(delta.choice, delta.token_ids, delta.logprobs, delta.completion)
        if delta.completion is not None:
            found["weight_versions"] = version_spans(delta.completion.policy_versions)
        return [self.chunk([found])]

    def object(self, index, token_ids, logprobs, completion):
        """The object of a choice. Log-probs are those of the distribution that was sampled from."""
        found = {"index": index, "token_ids": list(token_ids), "logprobs": None}
        found["finish_reason"] = None if completion is None else completion.finish_reason
        found["stop_reason"] = None if completion is None else completion.stop_reason
        if self.num_logprobs is not None:
            found["logprobs"] = {"content": [self.entry(*each) for each in zip(token_ids, logprobs, strict=True)]}
        return found

    def entry(self, token_id, logprob):
        text, value = self.texts.text(token_id), finite(logprob)
        return {"token": text, "token_id": token_id, "logprob": value, "bytes": None, "top_logprobs": []}


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
