"""Writes train.jsonl and eval.jsonl: sums and differences of two-digit numbers, each problem in one of the two files.

python examples/arithmetic/make.py
"""

import itertools
import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
SIZES = {"train.jsonl": 1000, "eval.jsonl": 200}


def problems():
    """(question, answer) of every a + b and a - b of two-digit numbers with an answer of at least 0: list."""
    pairs = itertools.product(range(10, 100), repeat=2)
    return [
        (f"{a} {sign} {b}", a + b if sign == "+" else a - b) for a, b in pairs for sign in "+-" if sign == "+" or a >= b
    ]


def main():
    chosen = iter(random.Random(0).sample(problems(), sum(SIZES.values())))
    for name, count in SIZES.items():
        with open(FOLDER / name, "w", encoding="utf-8") as file:
            for question, answer in itertools.islice(chosen, count):
                prompt = [{"role": "user", "content": f"What is {question}? Answer with the number."}]
                file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")


if __name__ == "__main__":
    main()
