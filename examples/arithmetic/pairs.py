"""Samples a model's answers to the arithmetic problems, and writes right and wrong ones as data of other trainers.

    python examples/arithmetic/pairs.py --model HuggingFaceTB/SmolLM2-135M-Instruct --output runs/arithmetic-pairs

pairs.jsonl       {"prompt", "chosen", "rejected"}, a right and a wrong answer: for `rlnumba dpo` and `rlnumba reward`
pairs-eval.jsonl  the same of the last tenth of the problems
labelled.jsonl    {"prompt", "completion", "label"}, as many right answers as wrong ones: for `rlnumba kto`

Only answers that end within --max-tokens are taken, and of equal ones one. The untrained model is right about one time
in forty, so most problems have a right answer among 64.
"""

import argparse
import json
import random
from pathlib import Path

from reward import correct

from rlnumba import LLM, SamplingParams
from rlnumba.config import EngineConfig

PROBLEMS = Path(__file__).parent / "train.jsonl"


def answers(completions, answer):
    """The distinct finished answers of a problem: (right ones, wrong ones), lists of assistant messages."""
    texts = dict.fromkeys(each.text for each in completions if each.finish_reason == "stop")
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    values = correct(messages, [answer] * len(messages))
    return ([m for m, value in zip(messages, values, strict=True) if value == wanted] for wanted in (1, 0))


def write(path, rows):
    """Write a JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{len(rows)} rows -> {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder or hub id")
    parser.add_argument("--output", required=True, type=Path, help="a folder")
    parser.add_argument("--problems", type=int, help="the first so many; default: all")
    parser.add_argument("--samples", type=int, default=64, help="answers drawn for each problem")
    parser.add_argument("--per-problem", type=int, default=4, help="most pairs, and right answers, of a problem")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in PROBLEMS.read_text().splitlines()][: arguments.problems]
    llm = LLM(arguments.model, config=EngineConfig(max_num_seqs=512, max_model_len=256))
    encode = llm.tokenizer.apply_chat_template
    prompts = [encode(row["prompt"], add_generation_prompt=True) for row in rows]
    params = SamplingParams(n=arguments.samples, max_tokens=arguments.max_tokens, seed=arguments.seed)
    generator = random.Random(arguments.seed)
    pairs, labelled, num_right = [], [], 0
    for row, output in zip(rows, llm.generate(prompts, params), strict=True):
        right, wrong = answers(output.completions, row["answer"])
        num_right += bool(right)
        generator.shuffle(wrong)
        right, prompt = right[: arguments.per_problem], row["prompt"]
        if right:
            chosen = [right[k % len(right)] for k in range(arguments.per_problem)]
            for each, other in zip(chosen, wrong, strict=False):
                pairs.append({"prompt": prompt, "chosen": each, "rejected": other})
        for each, other in zip(right, wrong, strict=False):
            labelled.append({"prompt": prompt, "completion": each, "label": True})
            labelled.append({"prompt": prompt, "completion": other, "label": False})
    print(f"{num_right} of {len(rows)} problems have a right answer among {arguments.samples}")
    for_eval = [row["prompt"] for row in rows[-len(rows) // 10 :]]
    write(arguments.output / "pairs.jsonl", [pair for pair in pairs if pair["prompt"] not in for_eval])
    write(arguments.output / "pairs-eval.jsonl", [pair for pair in pairs if pair["prompt"] in for_eval])
    write(arguments.output / "labelled.jsonl", [row for row in labelled if row["prompt"] not in for_eval])


if __name__ == "__main__":
    main()
