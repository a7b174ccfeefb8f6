"""Do thousands of requests at a full cache, with cancels at any time, get their text and leave no block behind?

    python bench/soak.py                                       20,000 requests, Qwen3-0.6B's shape; 1,000 on a CPU
    python bench/soak.py --model FOLDER --requests 200 --device cpu

Requests have random lengths, sampling parameters, stop strings, stop ids and numbers of completions; many begin with
the same tokens. Some are aborted between steps, whether they wait, run, or have just ended. The cache is a fraction of
what the running sequences need together, so that it is full nearly always and sequences are preempted.

At the end every block must be free, and the completions of a sample of requests equal, in token ids, log-probs, text
and reason, to those of the same request alone in an engine of its own.
"""

import argparse
import time

import numpy as np
from report import row
from shapes import random_model

from rlnumba.config import EngineConfig
from rlnumba.engine import Engine, SamplingParams
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device

# Seconds between two progress lines.
PROGRESS_S = 5
# Sequences of average length that the cache can hold, as a share of the rows that a step has.
CACHE_SHARE = 1 / 4
# Aborts in a step, a row.
ABORTS = 1 / 1000
# Of so many requests in a row the first eighth may have penalties and min_tokens.
PERIOD = 400


class CharacterTokenizer:
    """The tokenizer where a model has none: a character a token."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + i % 26) for i in ids)


class Requests:
    """Random requests to a model: request(number) is (prompt, SamplingParams), the same for the same number.

    longest: most tokens of prompt and completion. stop: strings that may occur in completions.
    """

    def __init__(self, vocab_size, longest, stop, seed=0):
        self.vocab_size, self.longest, self.stop, self.seed = vocab_size, longest, stop, seed
        generator = np.random.default_rng(seed)
        # Prompts begin with a part of one of these.
        self.stems = generator.integers(0, vocab_size, (8, longest // 2))

    def request(self, number):
        rng = np.random.default_rng((self.seed, number))
        length = int(rng.integers(1, self.longest // 4))
        shared = int(rng.integers(0, length)) if rng.random() < 0.5 else 0
        stem, own = self.stems[rng.integers(len(self.stems))], rng.integers(0, self.vocab_size, length - shared)
        # Most completions are short and a few long, as in rollouts.
        max_tokens = int(min(1 + rng.exponential(self.longest / 5), self.longest - length))
        # Not all the time, since steps with them take longer.
        with_history = number % PERIOD < PERIOD // 8
        with_penalties = with_history and rng.random() < 0.3
        return [*stem[:shared].tolist(), *own.tolist()], SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.0])),
            top_p=float(rng.choice([1.0, 1.0, 0.9])),
            top_k=int(rng.choice([0, 0, 20])),
            repetition_penalty=1.2 if with_penalties else 1.0,
            presence_penalty=0.5 if with_penalties else 0.0,
            max_tokens=max_tokens,
            min_tokens=int(rng.integers(0, max_tokens + 1)) if with_history and rng.random() < 0.3 else 0,
            stop=tuple(map(str, rng.choice(self.stop, 2))) if rng.random() < 0.3 else (),
            stop_token_ids=tuple(rng.integers(0, self.vocab_size, 4).tolist()) if rng.random() < 0.2 else (),
            ignore_eos=bool(rng.random() < 0.5),
            seed=int(rng.integers(3)),
            n=int(rng.choice([1, 1, 1, 2, 4])),
            logit_thresholds=bool(rng.random() < 0.2),
        )


def stop_strings(model, tokenizer, vocab_size, longest):
    """Strings of two to four characters of the model's own text: list."""
    engine = Engine(model, tokenizer, EngineConfig(num_gpu_blocks_override=blocks_of(longest)))
    engine.add_request(0, [1], SamplingParams(max_tokens=min(longest - 1, 64), ignore_eos=True))
    text = run_alone(engine)[0].text
    rng = np.random.default_rng(0)
    starts = rng.integers(0, max(len(text) - 4, 1), 32)
    return [text[start : start + rng.integers(2, 5)] or "a" for start in starts]


def blocks_of(tokens):
    return -(-tokens // BLOCK_SIZE) + 1


def run_alone(engine):
    """The completions, by index, of the only request of an engine."""
    completions = {}
    while engine.has_unfinished:
        completions |= {index: completion for _, index, completion in engine.step().finished}
    return completions


def result(completion):
    """What must be equal."""
    thresholds = None if completion.thresholds is None else completion.thresholds.tolist()
    return completion.token_ids, completion.logprobs, completion.finish_reason, completion.text, thresholds


def soak(engine, requests, count, sample, log=print):
    """Run `count` requests through an engine; returns (completions of the sampled, counters: dict).

    sample: numbers of requests whose completions are kept: {(number, index): completion}, without aborted ones.
    Raises AssertionError if a block is not free at the end, or a completion is missing or comes twice.
    """
    rng = np.random.default_rng(requests.seed)
    wanted, aborted, finished, kept = {}, set(), {}, {}
    added = num_tokens = num_steps = 0
    occupancy, full, started = [], 0, time.perf_counter()
    reported = started
    while added < count or engine.has_unfinished:
        # As many as the engine can run wait for it, so that it is full until the last ones.
        while added < count and len(engine.scheduler.waiting) < engine.max_num_seqs:
            prompt, params = requests.request(added)
            engine.add_request(added, prompt, params)
            wanted[added], finished[added] = params.n, 0
            added += 1
        for _ in range(rng.binomial(engine.max_num_seqs, ABORTS)):
            number = int(rng.choice(list(engine.requests))) if engine.requests and rng.random() < 0.9 else added - 1
            aborted |= {number} & engine.requests.keys()
            engine.abort(number)
        output = engine.step()
        num_steps, num_tokens = num_steps + 1, num_tokens + len(output.token_ids)
        for number, index, completion in output.finished:
            assert number not in aborted and (number, index) not in kept, (number, index)
            finished[number] += 1
            if number in sample:
                kept[number, index] = completion
        occupancy.append(1 - engine.blocks.num_free / engine.blocks.num_blocks)
        full += bool(engine.scheduler.waiting and engine.scheduler.free_rows)
        if log is not None and time.perf_counter() > reported + PROGRESS_S:
            reported = time.perf_counter()
            log(
                f"{added - len(engine.requests)} of {count} requests, {len(engine.scheduler.running)} sequences run, "
                f"cache {occupancy[-1]:.0%} full, {engine.num_preemptions} preemptions, {len(aborted)} aborts, "
                f"{num_tokens / (reported - started):.0f} tok/s"
            )
    assert all(finished[number] == n for number, n in wanted.items() if number not in aborted)
    blocks = engine.blocks
    assert blocks.num_free == blocks.num_blocks and not any(blocks.ref_count), "blocks were not returned"
    counters = {
        "requests": count, "aborted": len(aborted), "steps": num_steps, "tokens": num_tokens,
        "preemptions": engine.num_preemptions, "mean occupancy": float(np.mean(occupancy)),
        "full": full / num_steps, "seconds": time.perf_counter() - started,
    }  # fmt: skip
    return {key: completion for key, completion in kept.items() if key[0] not in aborted}, counters


def different_alone(model, tokenizer, requests, kept, log=print):
    """Which completions of `kept` differ from those of their request alone: list of (number, index)."""
    different, numbers = [], sorted({number for number, _ in kept})
    engine = Engine(model, tokenizer, EngineConfig(num_gpu_blocks_override=8 * blocks_of(requests.longest)))
    reported = time.perf_counter()
    for done, number in enumerate(numbers):
        engine.add_request(number, *requests.request(number))
        for index, completion in run_alone(engine).items():
            if result(completion) != result(kept[number, index]):
                different.append((number, index))
        if log is not None and time.perf_counter() > reported + PROGRESS_S:
            reported = time.perf_counter()
            log(f"{done + 1} of {len(numbers)} requests run alone, {len(different)} completions differ")
    return different


def soak_engine(model, tokenizer, longest, max_num_seqs, **config):
    """An Engine whose cache holds CACHE_SHARE of what its sequences need."""
    # A request has about an eighth of the longest in its prompt and a fifth in its completion.
    blocks = max(int(max_num_seqs * CACHE_SHARE * blocks_of(longest // 3)), blocks_of(longest))
    return Engine(model, tokenizer, EngineConfig(num_gpu_blocks_override=blocks, max_num_seqs=max_num_seqs, **config))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", help="a Hugging Face folder; default: random weights")
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--requests", type=int, help="default 20,000 on a GPU, else 1,000")
    parser.add_argument("--sample", type=int, default=100, help="requests that are also run alone")
    parser.add_argument("--longest", type=int, default=512, help="most tokens of a sequence, where the model has them")
    parser.add_argument("--max-num-seqs", type=int, help="default 256 on a GPU, else 32")
    arguments = parser.parse_args()
    on_gpu = device.select(arguments.device) == "cuda"
    count = arguments.requests or (20_000 if on_gpu else 1_000)
    if arguments.model:
        model = load_model(arguments.model, arguments.dtype)
        tokenizer = Tokenizer.from_folder(arguments.model) or CharacterTokenizer()
    else:
        model, tokenizer = random_model(dtype=arguments.dtype), CharacterTokenizer()
    longest = min(arguments.longest, model.config.max_position_embeddings)
    vocab_size = model.config.vocab_size
    requests = Requests(vocab_size, longest, stop_strings(model, tokenizer, vocab_size, longest))
    engine = soak_engine(model, tokenizer, longest, arguments.max_num_seqs or (256 if on_gpu else 32))
    sample = set(np.random.default_rng(1).choice(count, min(2 * arguments.sample, count), replace=False).tolist())
    print(f"{device.describe()}; {engine.config.num_gpu_blocks_override} blocks", flush=True)
    kept, counters = soak(engine, requests, count, sample, log=lambda line: print(line, flush=True))
    # Twice as many were kept as are wanted, since some are aborted.
    chosen = set(sorted({number for number, _ in kept})[: arguments.sample])
    kept = {key: completion for key, completion in kept.items() if key[0] in chosen}
    del engine
    different = different_alone(model, tokenizer, requests, kept, log=lambda line: print(line, flush=True))
    what = f"{counters['requests']} requests, {counters['aborted']} aborted, {counters['tokens']} tokens"
    full = f"no block for a waiting sequence after {counters['full']:.0%} of {counters['steps']} steps, "
    full += f"{counters['mean occupancy']:.0%} of blocks in use, {counters['preemptions']} preemptions"
    row(
        f"soak: {what}; {full}",
        f"every block returned, {len(kept) - len(different)} of {len(kept)} completions of {len(chosen)} requests "
        f"equal those alone; {counters['seconds']:.0f} s",
        "all",
    )
    if different:
        raise SystemExit(f"completions differ from those of the same request alone: {different}")


if __name__ == "__main__":
    main()
