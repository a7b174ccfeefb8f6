"""The bound on sequences that wait. A request books its places before anything is computed for it.

The next step takes as many sequences as the engine has rows; those beyond wait. A request for which there are too few
places is refused at once, so that the time that one waits has a bound.
"""

from rlnumba.serve.protocol.errors import ApiError

# Seconds after which a client that was refused may ask again.
RETRY_AFTER = {"retry-after": "1"}


class Admission:
    """The places of a server, counted by its thread. num_rows: sequences of a step; metrics: ServerMetrics."""

    def __init__(self, settings, num_rows, metrics):
        self.settings, self.num_rows, self.metrics = settings, num_rows, metrics
        self.num_sequences = self.num_waiting_tokens = 0

    def places(self, count):
        """The Booking of `count` sequences; raises ApiError."""
        if self.num_sequences + count > self.num_rows + self.settings.max_num_queued_reqs:
            waiting = max(self.num_sequences - self.num_rows, 0)
            limit = f"max_num_queued_reqs is {self.settings.max_num_queued_reqs}"
            raise self._refusal(f"{waiting} sequences wait, and {count} more are too many: {limit}")
        self.num_sequences += count
        return Booking(self, count)

    def check_tokens(self, count):
        """Raise ApiError if `count` more tokens of prompts may not wait."""
        limit = self.settings.max_num_queued_tokens
        if limit is not None and self.num_waiting_tokens and self.num_waiting_tokens + count > limit:
            waiting = self.num_waiting_tokens
            raise self._refusal(
                f"{waiting} tokens wait, and {count} more are too many: max_num_queued_tokens is {limit}"
            )

    def _refusal(self, message):
        self.metrics.rejected += 1
        return ApiError(message, status=self.settings.overload_status, headers=RETRY_AFTER)


class Booking:
    """The places that a request has booked: for sequences until they end, for tokens of prompts until they begin."""

    def __init__(self, admission, num_sequences):
        self.admission, self.num_sequences, self.num_tokens = admission, num_sequences, 0

    def book_tokens(self, count):
        """The prompts have `count` tokens; raises ApiError."""
        self.admission.check_tokens(count)
        self.num_tokens += count
        self.admission.num_waiting_tokens += count

    def release(self, count):
        count = min(count, self.num_sequences)
        self.num_sequences -= count
        self.admission.num_sequences -= count

    def release_tokens(self, count):
        count = min(count, self.num_tokens)
        self.num_tokens -= count
        self.admission.num_waiting_tokens -= count

    def close(self):
        """Give back what is left."""
        self.release(self.num_sequences)
        self.release_tokens(self.num_tokens)
