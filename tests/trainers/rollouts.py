"""Rollout functions and rewards of tests, in a module that the processes of rewards import in no time."""


def same(found):
    """What `spoiled` makes of the dict, in a test that sets another."""
    return found


CHANGE = {"of": same}


def returned(outputs):
    """The dict of single turns."""
    return {
        "prompt_ids": [each.prompt_token_ids for each in outputs],
        "completion_ids": [each.outputs[0].token_ids for each in outputs],
        "logprobs": [each.outputs[0].logprobs for each in outputs],
    }


def single(prompts, trainer):
    """The completions that the run draws without a function."""
    return returned(trainer.generate(prompts))


def spoiled(prompts, trainer):
    return CHANGE["of"](returned(trainer.generate(prompts, max_tokens=12)))


def two_turns(prompts, trainer):
    """A first turn, a result that the function makes up, and a second one; the tokens of the result are no policy's."""
    from rlnumba.environments.turns import suffix_ids

    first = trainer.generate(prompts, max_tokens=12)
    found, tokenizer = returned(first), trainer.processing_class
    result = [{"role": "tool", "name": "multiply", "content": "12"}]
    suffixes = [suffix_ids(tokenizer, ids[-1] == tokenizer.eos_token_id, result) for ids in found["completion_ids"]]
    contexts = [p + c + s for p, c, s in zip(found["prompt_ids"], found["completion_ids"], suffixes, strict=True)]
    second = returned(trainer.generate(contexts, max_tokens=8))
    parts = list(zip(found["completion_ids"], suffixes, second["completion_ids"], strict=True))
    logprobs = zip(found["logprobs"], suffixes, second["logprobs"], strict=True)
    return {
        "prompt_ids": found["prompt_ids"],
        "completion_ids": [[*a, *s, *b] for a, s, b in parts],
        "logprobs": [[*a, *[0.0] * len(s), *b] for a, s, b in logprobs],
        "env_mask": [[1] * len(a) + [0] * len(s) + [1] * len(b) for a, s, b in parts],
        "length_of_first": [len(a) for a, _, _ in parts],
        "step": trainer.state.global_step,
    }


def shortness(length_of_first, step, completions, **columns):
    """A reward of the function's own columns."""
    assert all(isinstance(each, int) for each in step)
    return [-float(length) for length in length_of_first]


def brevity(completion_ids, **columns):
    """A reward that differs within a group."""
    return [1 / len(ids) for ids in completion_ids]
