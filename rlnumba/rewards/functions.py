"""The built-in reward functions."""

import contextlib
import logging
import math
import re

from rlnumba.errors import UserError
from rlnumba.rewards.calling import TimeUp, in_main_thread, time_limit


def texts_of(completions):
    """The completions' texts, whether they are strings or message lists: list of str.

    The text of several turns is that of the policy's last one, in which it answers.
    """
    return [completion if isinstance(completion, str) else _last_text(completion) for completion in completions]


def _last_text(messages):
    """The content of the last message of the assistant, "" without one."""
    contents = [message["content"] for message in messages if message["role"] == "assistant"]
    return (contents[-1] or "") if contents else ""


ANSWER_COLUMNS = ("solution", "answer", "ground_truth", "final_answer")


def reference_answers(columns):
    """The value of each row in the first answer column that it has, None without any: list.

    A row has None in a column that only others of its generation have. Raises UserError naming the columns if none is
    an answer column.
    """
    found = [columns[name] for name in ANSWER_COLUMNS if name in columns]
    if found:
        return [next((value for value in row if value is not None), None) for row in zip(*found, strict=True)]
    keywords = ("prompts", "completion_ids", "trainer_state", "log_extra", "log_metric")
    seen = ", ".join(name for name in columns if name not in keywords) or "none"
    raise UserError(f"needs a column {', '.join(ANSWER_COLUMNS[:-1])} or {ANSWER_COLUMNS[-1]}; the data has: {seen}")


def import_math_verify():
    try:
        import math_verify
    except ImportError as error:
        raise UserError("accuracy_reward needs math-verify; pip install 'rlnumba[math]'") from error
    # Each comparison would log a warning that it has no timeout.
    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    return math_verify


SECONDS_PER_ANSWER = 2.0  # a hundred times what a plain answer takes; 9^{9^{9^9}} would never end


def accuracy_reward(completions, **columns):
    r"""1.0 where math-verify finds the completion's answer equal to the reference, else 0.0; None if the reference
    cannot be parsed. An answer that takes longer than SECONDS_PER_ANSWER to compare gets 0.0.

    The reference is the first of the columns solution, answer, ground_truth, final_answer (after `####` where there is
    one). The completion's answer must be LaTeX, \boxed{} first. Source: TRL.
    """
    math_verify = import_math_verify()
    from latex2sympy2_extended import NormalizationConfig

    extraction = math_verify.LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )

    def compare(text, gold):
        # Without math-verify's own timeouts, which use SIGALRM too and would cancel the limit around this reward.
        gold_parsed = math_verify.parse(gold, parsing_timeout=None)
        if not gold_parsed:
            return None
        answer = math_verify.parse(text, [extraction], extraction_mode="first_match", parsing_timeout=None)
        return float(math_verify.verify(gold_parsed, answer, timeout_seconds=None))

    values = []
    for text, gold in zip(texts_of(completions), reference_answers(columns), strict=True):
        gold = str(gold).rpartition("####")[2].strip()
        try:
            with time_limit(SECONDS_PER_ANSWER) if in_main_thread() else contextlib.nullcontext():
                values.append(compare(text, gold))
        except TimeUp:
            values.append(0.0)
    return values


def think_format_reward(completions, **columns):
    """1.0 where the completion is <think>...</think> and then anything, with one opening tag; else 0.0. Source: TRL."""
    pattern = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
    return [1.0 if pattern.match(text) else 0.0 for text in texts_of(completions)]


GSM8K_ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")


def gsm8k_answer(text):
    """The number after the first `#### `, commas and a final full stop removed: str, or None. GSM8K's own rule."""
    match = GSM8K_ANSWER.search(text)
    return match.group(1).replace(",", "").rstrip(".") if match else None


def gsm8k_reward(completions, **columns):
    """1.0 where the number after `#### ` in the completion equals the reference answer's, else 0.0.

    The reference is the first of the columns solution, answer, ground_truth, final_answer; `#### ` in it is optional.
    """
    values = []
    for text, gold in zip(texts_of(completions), reference_answers(columns), strict=True):
        answer, gold = gsm8k_answer(text), gsm8k_answer(str(gold)) or str(gold).strip().replace(",", "")
        try:
            values.append(float(answer is not None and float(answer) == float(gold)))
        except ValueError:
            values.append(float(answer == gold))
    return values


def get_cosine_scaled_reward(
    max_len, min_value_wrong=-1.0, max_value_wrong=-0.5, min_value_correct=0.5, max_value_correct=1.0
):
    """accuracy_reward scaled by length: short right answers get most, short wrong ones least.

    max_len: completion tokens at which the cosine ends. Source: arXiv 2502.03373, appendix C.1; TRL.
    """
    import_math_verify()

    def cosine_scaled_reward(completions, completion_ids, **columns):
        values = []
        for correct, ids in zip(accuracy_reward(completions, **columns), completion_ids, strict=True):
            if correct is None:
                values.append(None)
                continue
            cosine = math.cos(min(len(ids) / max_len, 1.0) * math.pi)
            at_end, at_start = (min_value_correct, max_value_correct) if correct else (max_value_wrong, min_value_wrong)
            values.append(at_end + 0.5 * (at_start - at_end) * (1.0 + cosine))
        return values

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0):
    """max_penalty times the share of token n-grams that repeat an earlier one; 0.0 for shorter completions.

    Source: arXiv 2502.03373, appendix C.2; TRL.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty must be at most 0, got {max_penalty}")

    def repetition_penalty_reward(completion_ids, **columns):
        values = []
        for ids in completion_ids:
            ngrams = [tuple(ids[i : i + ngram_size]) for i in range(len(ids) - ngram_size + 1)]
            values.append(max_penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0)
        return values

    return repetition_penalty_reward


def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    """0.0 up to max_completion_len - soft_punish_cache tokens, then falling linearly to -1.0 at max_completion_len.

    Source: DAPO, arXiv 2503.14476, equation 13; TRL.
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache must be above 0 and at most max_completion_len {max_completion_len}, "
            f"got {soft_punish_cache}"
        )

    def soft_overlong_punishment_reward(completion_ids, **columns):
        free = max_completion_len - soft_punish_cache
        return [-min(max(len(ids) - free, 0) / soft_punish_cache, 1.0) for ids in completion_ids]

    return soft_overlong_punishment_reward


# Names for rewards.funcs.
BUILT_IN = {function.__name__: function for function in (accuracy_reward, think_format_reward, gsm8k_reward)}

# Names with arguments, which may be omitted where all have defaults.
FACTORIES = {
    "cosine_scaled_reward": get_cosine_scaled_reward,
    "repetition_penalty_reward": get_repetition_penalty_reward,
    "soft_overlong_punishment": get_soft_overlong_punishment,
}
