"""The common part of the answers of all routes that draw tokens."""

import time
from dataclasses import dataclass

from rlnumba.serve.protocol.errors import ApiError


@dataclass
class StreamOptions:
    """The form of an answer. include_usage: a last chunk has it; continuous_usage: every chunk has it so far."""

    streams: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @classmethod
    def of(cls, body):
        streams, options = body.boolean("stream"), body.object("stream_options")
        if options is None:
            return cls(streams)
        if not streams:
            raise ApiError("stream_options needs stream", "stream_options")
        usage = options.boolean("include_usage")
        return cls(streams, usage, options.boolean("continuous_usage_stats"))


class Usage:
    """Counts of tokens of a request while it is answered."""

    def __init__(self, job):
        self.job, self.completion_tokens, self.cached_tokens = job, 0, 0

    def add(self, num_tokens, completion):
        """Tokens of a choice, and its Completion if it has ended with them."""
        self.completion_tokens += num_tokens
        if completion is not None and completion.index == 0:
            self.cached_tokens += completion.num_cached_tokens

    @property
    def object(self):
        prompt, completion = self.job.prompt_tokens, self.completion_tokens
        details = {"cached_tokens": self.cached_tokens}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details,
        }


class ApiAnswer:
    """The head of an answer and of its chunks. kind: the `object` of the whole; chunk_kind: that of a chunk."""

    def __init__(self, service, body, request_id, kind, chunk_kind):
        self.service, self.body, self.request_id = service, body, request_id
        self.kind, self.chunk_kind, self.created = kind, chunk_kind, int(time.time())
        self.model = service.check_model(body)
        self.adapter = service.adapter_of(self.model)
        self.stream = StreamOptions.of(body)
        self.cache_salt = body.string("cache_salt", "")
        # policy_version: the engine's, of the newest token so far.
        self.job = self.usage = self.policy_version = None

    # Whether the token that the engine draws is left out: the prompt alone was asked for.
    draws_nothing = False

    @property
    def renders(self):
        """Whether `prepare` may take long: it encodes a text, decodes one, or compiles a grammar."""
        return True

    def begin(self, job):
        """The ApiJob is about to be submitted."""
        self.job, self.usage = job, Usage(job)

    def head(self, kind):
        found = {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}
        return found | {"weight_version": self.service.version(self.policy_version)}

    def chunk(self, choices):
        """A chunk with these choices."""
        found = self.head(self.chunk_kind) | {"choices": choices}
        if self.stream.continuous_usage:
            found["usage"] = self.usage.object
        elif self.stream.include_usage:
            found["usage"] = None
        return found

    def last_chunk(self):
        """The chunk after all choices have ended, or None."""
        if not self.stream.include_usage:
            return None
        return self.head(self.chunk_kind) | {"choices": [], "usage": self.usage.object}

    def whole(self, completions):
        """The answer that is not streamed, from all Completions in the order of the choices."""
        for completion in completions:
            versions = completion.array("policy_versions")
            self.count(completion.num_tokens, completion, int(versions[-1]) if len(versions) else None)
        choices = [self.choice(index, completion) for index, completion in enumerate(completions)]
        return self.head(self.kind) | {"choices": choices, "usage": self.usage.object}

    def chunks(self, delta):
        """The chunks of a Delta: list."""
        self.count(len(delta.token_ids), delta.completion, delta.version)
        return self.choice_chunks(delta)

    def count(self, num_tokens, completion, version):
        """Note tokens of a choice, its Completion if it has ended, and the policy version of the last token."""
        if version is not None:
            self.policy_version = version if self.policy_version is None else max(version, self.policy_version)
        self.usage.add(0 if self.draws_nothing else num_tokens, completion)
