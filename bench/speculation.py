"""Tokens a second of few sequences with and without speculation, on questions of GSM8K, and whether texts are equal.

    python bench/speculation.py --model FOLDER --questions test.jsonl
    python bench/speculation.py --model FOLDER --questions test.jsonl --device cpu --tokens 64 --sequences 1,4

Rows of the file have a `question`; prompts are made of them by the model's chat template, or are the bare text where it
has none. Each number of sequences is one request with as many completions, as the tail of a GRPO group, and as many
requests with one. "auto" speculates where it measures a gain, which is the default; "ngram" wherever there are drafts.
Every run is done once to warm up, then --repeat times in turn with the others, and the medians are compared.
"""

import argparse
import json
import statistics
import time

from report import row

from rlnumba.config import EngineConfig
from rlnumba.engine import LLM, SamplingParams, core
from rlnumba.engine.blocks import cache_size
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device

METHODS = ("none", "auto", "ngram")
# An engine that may speculate must have this share of the speed of one that does not.
BAR = 0.97


class Counter:
    """Steps with drafts of an engine: their sequences, and the tokens that these got."""

    def __init__(self, engine):
        self.num_steps = self.num_sequences = self.num_tokens = 0
        record = engine._record

        def record_and_count(step, *computed):
            output = record(step, *computed)
            self.num_steps += 1
            if step.has_drafts:
                self.num_sequences += len(step.rows)
                self.num_tokens += len(output.token_ids)
            return output

        engine._record = record_and_count

    def tokens_per_step(self):
        """Tokens that a sequence gets from a step with drafts, on average."""
        return self.num_tokens / self.num_sequences if self.num_sequences else 1.0


def read_prompts(path, tokenizer, count):
    """The prompts, lists of token ids, of the first `count` questions."""
    prompts = []
    with open(path) as file:
        for line, _ in zip(file, range(count), strict=False):
            question = json.loads(line)["question"]
            if tokenizer.chat_template is None:
                prompts.append(tokenizer.encode(question))
            else:
                messages = [{"role": "user", "content": question}]
                prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return prompts


def measure(model, tokenizer, workload, config, repeat):
    """{method: (tok/s, Counter)} of (prompts, params). Raises AssertionError if a text or log-prob differs."""
    engines = {method: LLM(model, tokenizer, EngineConfig(speculative_method=method, **config)) for method in METHODS}
    seconds, expected, counters = {method: [] for method in METHODS}, None, {}
    for number in range(1 + repeat):
        for method, llm in engines.items():
            # With a new version no prompt is in the cache.
            llm.update_weights(number)
            counters[method] = Counter(llm.engine)
            started = time.perf_counter()
            outputs = llm.generate(*workload)
            seconds[method].append(time.perf_counter() - started)
            del llm.engine._record
            drawn = [(c.token_ids, c.logprobs, c.text) for output in outputs for c in output.completions]
            expected = expected or drawn
            assert drawn == expected, f"{method}: texts or log-probs differ"
    tokens = sum(len(ids) for ids, *_ in expected)
    for llm in engines.values():
        llm.sleep()
    return {method: (tokens / statistics.median(seconds[method][1:]), counters[method]) for method in METHODS}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--questions", required=True, help="a .jsonl file of rows with a question")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--sequences", default="1,2,4,8", help="numbers of sequences, with commas")
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of a completion")
    parser.add_argument("--temperatures", default="0,1", help="with commas")
    parser.add_argument("--drafts", type=int, default=EngineConfig.num_speculative_tokens, help="most drafts in a step")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    on_gpu = device.select(arguments.device) == "cuda"
    model, tokenizer = load_model(arguments.model, arguments.dtype), Tokenizer(arguments.model)
    numbers = list(map(int, arguments.sequences.split(",")))
    longest = core.longest_sequence(model.config, EngineConfig())
    prompts = [prompt[: longest // 2] for prompt in read_prompts(arguments.questions, tokenizer, max(numbers))]
    config = {"num_speculative_tokens": arguments.drafts}
    if on_gpu:
        # The three engines share the GPU: caches for what they are given, not for what fits.
        length = min(max(map(len, prompts)) + arguments.tokens, longest)
        config["num_gpu_blocks_override"] = (max(numbers) + 1) * (-(-length // cache_size.BLOCK_SIZE) + 1)
    print(device.describe())
    for temperature in map(float, arguments.temperatures.split(",")):
        for sequences in numbers:
            shapes = {"requests": (prompts[:sequences], 1)}
            if sequences > 1:
                shapes["completions of a request"] = prompts[:1], sequences
            for what, (chosen, n) in shapes.items():
                params = SamplingParams(temperature=temperature, max_tokens=arguments.tokens, n=n)
                found = measure(model, tokenizer, (chosen, params), config, arguments.repeat)
                plain = found["none"][0]
                parts = [f"{plain:.0f} tok/s"]
                for method in METHODS[1:]:
                    speed, counter = found[method]
                    parts.append(f"{method} {speed:.0f} ({speed / plain:.2f}x, {counter.tokens_per_step():.2f} a step)")
                bar = f"auto >= {BAR:.2f}x"
                row(f"{sequences} {what}, temperature {temperature:g}, texts equal", ", ".join(parts), bar)


if __name__ == "__main__":
    main()
