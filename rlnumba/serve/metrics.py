"""/metrics: vLLM's names, in Prometheus' text format.

Counters and histograms are plain numbers that the engine's thread alone writes; a scrape reads them in the other one.
"""

from bisect import bisect_left

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from rlnumba.engine.blocks.cache_size import BLOCK_SIZE

# Upper ends of buckets in seconds: vLLM's.
TO_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
OF_REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
LABELS = ["model_name", "engine"]


class Histogram:
    """Counts of values by bucket, cumulative only where they are written."""

    def __init__(self, buckets):
        self.buckets, self.counts, self.sum = buckets, [0] * (len(buckets) + 1), 0.0

    def add(self, value, count=1):
        """A value that was seen so many times."""
        self.counts[bisect_left(self.buckets, value)] += count
        self.sum += value * count

    def samples(self):
        """(buckets as Prometheus has them, their sum)."""
        ends, total, buckets = [*map(str, self.buckets), "+Inf"], 0, []
        for end, count in zip(ends, list(self.counts), strict=True):
            total += count
            buckets.append((end, total))
        return buckets, self.sum


class ServerMetrics:
    """Counts of what has been sent since the start. state: called for the EngineState of a scrape."""

    def __init__(self, model_name):
        self.values = [model_name, "0"]
        self.state = None
        self.prompt_tokens = self.generation_tokens = 0
        self.prefix_queries = self.prefix_hits = 0
        self.successes = dict.fromkeys(("stop", "length", "abort"), 0)
        # These two are of the server's thread.
        self.rejected = self.cancelled = 0
        self.to_first_token, self.between_tokens = Histogram(TO_FIRST_TOKEN), Histogram(BETWEEN_TOKENS)
        self.end_to_end, self.queue, self.prefill, self.decode = (Histogram(OF_REQUEST) for _ in range(4))
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    # The engine's thread.

    def tokens(self, times, num_prompt_tokens, count, now):
        """A prompt, whose Times these are, got `count` tokens in a step, one for each of its completions."""
        self.generation_tokens += count
        if times.first is None:
            times.first = now
            self.prompt_tokens += num_prompt_tokens
            self.to_first_token.add(now - times.arrived)
            self.queue.add(times.begun - times.arrived)
            self.prefill.add(now - times.begun)
        else:
            self.between_tokens.add(now - times.last, count)
        times.last = now

    def end_choice(self, num_prompt_tokens, completion):
        """A completion has ended."""
        self.successes[completion.finish_reason] += 1
        self.prefix_queries += num_prompt_tokens
        self.prefix_hits += completion.num_cached_tokens

    def end_prompt(self, times, now):
        """All completions of a prompt have ended."""
        self.end_to_end.add(now - times.arrived)
        self.decode.add(now - times.first)

    def abort(self, count):
        """So many completions were dropped before their end."""
        self.successes["abort"] += count

    # The server's thread.

    def text(self):
        """The body of an answer to a scrape: bytes."""
        return generate_latest(self.registry)

    def collect(self):
        """The families of a scrape, as prometheus_client asks for them."""
        state = self.state()
        share = state.used_blocks / state.num_blocks if state.num_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences that the steps compute.", state.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for a place.", state.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks that sequences refer to.", share)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=[*LABELS, "block_size", "num_gpu_blocks"]
        )
        info.add_metric([*self.values, str(BLOCK_SIZE), str(state.num_blocks)], 1)
        yield info
        counters = {
            "vllm:prefix_cache_queries": ("Tokens of prompts looked up in the cache.", self.prefix_queries),
            "vllm:prefix_cache_hits": ("Tokens of prompts found there.", self.prefix_hits),
            "vllm:num_preemptions": ("Sequences that gave their blocks up.", state.num_preemptions),
            "vllm:prompt_tokens": ("Tokens of prompts computed.", self.prompt_tokens),
            "vllm:generation_tokens": ("Tokens drawn.", self.generation_tokens),
            "rlnumba:requests_rejected": ("Requests refused because too many waited.", self.rejected),
            "rlnumba:requests_cancelled": ("Requests whose client went away.", self.cancelled),
        }
        for name, (text, value) in counters.items():
            family = CounterMetricFamily(name, text, labels=LABELS)
            family.add_metric(self.values, value)
            yield family
        ended = CounterMetricFamily(
            "vllm:request_success", "Completions by their end.", labels=[*LABELS, "finished_reason"]
        )
        for reason, count in self.successes.items():
            ended.add_metric([*self.values, reason], count)
        yield ended
        histograms = {
            "vllm:time_to_first_token_seconds": ("From arrival to the first token.", self.to_first_token),
            "vllm:inter_token_latency_seconds": ("Between two tokens of a completion.", self.between_tokens),
            "vllm:e2e_request_latency_seconds": ("From arrival to the last token.", self.end_to_end),
            "vllm:request_queue_time_seconds": ("From arrival to the first step.", self.queue),
            "vllm:request_prefill_time_seconds": ("From the first step to the first token.", self.prefill),
            "vllm:request_decode_time_seconds": ("From the first token to the last.", self.decode),
        }
        for name, (text, histogram) in histograms.items():
            family = HistogramMetricFamily(name, text, labels=LABELS)
            family.add_metric(self.values, *histogram.samples())
            yield family

    def _gauge(self, name, text, value):
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self.values, value)
        return family
