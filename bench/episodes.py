"""Episodes of several turns with tools that take a while: interleaved, and in lock-step as batches of turns.

    python bench/episodes.py                          64 episodes of 8 turns with tools of 0.2 s
    python bench/episodes.py --model FOLDER           the weights of a folder; default: random ones, as bench/engine.py

In lock-step, a turn of all episodes ends before any tool is called, and all results are there before the next turn
begins. Interleaved, each goes on with its own results. Both draw the same tokens. `busy`: the share of the time with
something to compute that is spent in steps of the engine; `computed`: tokens of contexts that turns computed, against
the formula, suffix + (L - 1) mod 16 + 1 for each turn after the first.
"""

import argparse
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from report import row
from shapes import random_model

from rlnumba.config import EngineConfig
from rlnumba.engine import Engine, SamplingParams
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device


class Tools:
    """Threads that sleep for `seconds` a call. batch: 0, or so many calls begin together and return together."""

    def __init__(self, executor, seconds, batch=0):
        self.executor, self.seconds, self.batch = executor, seconds, batch
        self.waiting = []

    def call(self):
        """The Future of a call."""
        if not self.batch:
            return self.executor.submit(time.sleep, self.seconds)
        self.waiting.append(future := Future())
        if len(self.waiting) == self.batch:
            called, self.waiting = self.waiting, []
            calls = [self.executor.submit(time.sleep, self.seconds) for _ in called]
            self.executor.submit(_answer, called, calls)
        return future


def _answer(called, calls):
    """End all Futures of a batch once its calls have ended."""
    wait(calls)
    for future in called:
        future.set_result(None)


class Work:
    """The episodes of a measurement: their prompts, and of each turn its length and the ids of its result."""

    def __init__(self, arguments, vocab_size):
        rng, shape = np.random.default_rng(0), (arguments.episodes, arguments.turns)
        self.prompts = rng.integers(0, vocab_size, (arguments.episodes, arguments.prompt)).tolist()
        self.lengths = rng.integers(max(arguments.tokens // 4, 1), arguments.tokens + 1, shape).tolist()
        self.results = rng.integers(0, vocab_size, (*shape, arguments.result)).tolist()
        self.params = SamplingParams(
            max_tokens=arguments.turns * (arguments.tokens + arguments.result), ignore_eos=True
        )

    @property
    def longest(self):
        return len(self.prompts[0]) + self.params.max_tokens

    def episode(self, number, tools):
        async def episode(rollout):
            context, computed = list(rollout.prompt_token_ids), []
            for length, result in zip(self.lengths[number], self.results[number], strict=True):
                turn = await rollout.complete(context, length)
                computed.append((len(context), len(context) - turn.num_cached_tokens))
                context += turn.token_ids + result
                if len(computed) < len(self.lengths[number]):
                    await rollout.wait(tools.call())
            return computed

        return episode

    def formula(self):
        """Tokens of contexts that all turns are to compute."""
        total = sum(map(len, self.prompts))
        for prompt, lengths, results in zip(self.prompts, self.lengths, self.results, strict=True):
            end = len(prompt)
            for length, result in zip(lengths[:-1], results, strict=False):
                end += length
                total += len(result) + (end - 1) % BLOCK_SIZE + 1
                end += len(result)
        return total


def measure(engine, work, tools):
    """(seconds, share of busy time, token ids of each episode, tokens of contexts computed)."""
    episodes, found, stepped = Episodes(engine), {}, 0.0
    for number, prompt in enumerate(work.prompts):
        episodes.submit(GroupRequest(number, prompt, work.params, episode=work.episode(number, tools)))
    step, began = engine.step, time.perf_counter()

    def timed():
        nonlocal stepped
        started = time.perf_counter()
        output = step()
        stepped += time.perf_counter() - started
        return output

    engine.step = timed
    while not episodes.is_idle:
        found |= {request.number: request.completions[0] for request in episodes.step()}
    engine.step, seconds = step, time.perf_counter() - began
    computed = sum(count for each in found.values() for _, count in each.episode.value)
    ids = [found[number].token_ids for number in sorted(found)]
    return seconds, stepped / (seconds - episodes.waited_s), ids, computed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", help="a Hugging Face folder; default: random weights")
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--prompt", type=int, help="tokens of the prompt; default: 256, elsewhere than on a GPU 16")
    parser.add_argument("--tokens", type=int, help="of a turn at most, a quarter at least; default: 256, or 16")
    parser.add_argument("--result", type=int, help="tokens of a tool's result; default: 64, or 6")
    parser.add_argument("--tool-s", type=float, default=0.2)
    arguments = parser.parse_args()
    on_gpu = device.select(arguments.device) == "cuda"
    for name, usual, small in (("prompt", 256, 16), ("tokens", 256, 16), ("result", 64, 6)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, usual if on_gpu else small)
    model = load_model(arguments.model, arguments.dtype) if arguments.model else random_model(dtype=arguments.dtype)
    work = Work(arguments, model.config.vocab_size)
    engine = Engine(model, None, EngineConfig(max_model_len=work.longest))
    drawn = sum(map(sum, work.lengths))
    print(device.describe())
    ids, rates = [], {}
    with ThreadPoolExecutor(arguments.episodes + 1) as executor:
        # Compilation and graph capture.
        measure(engine, work, Tools(executor, 0.0))
        for version, (what, batch) in enumerate((("interleaved", 0), ("lock-step", arguments.episodes)), 1):
            engine.update_weights(version)
            seconds, busy, found, computed = measure(engine, work, Tools(executor, arguments.tool_s, batch))
            ids.append(found)
            rates[what] = drawn / seconds
            bar = "85 %" if what == "interleaved" else ""
            row(f"{what}: {drawn} tokens drawn; busy", f"{drawn / seconds:.0f} tok/s; {busy:.1%}", bar)
            row(f"{what}: computed of contexts, and by the formula", f"{computed}, {work.formula()}", "equal")
    assert ids[0] == ids[1], "the draws depend on when results come"
    row("interleaved / lock-step", f"{rates['interleaved'] / rates['lock-step']:.2f}")


if __name__ == "__main__":
    main()
