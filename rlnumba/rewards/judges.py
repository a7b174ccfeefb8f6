"""Judges: served models whose verdict on completions is a reward, `judge:NAME` in rewards.funcs.

    judge = Judge(JudgeConfig.of("helpful", {"url": "http://127.0.0.1:8000/v1", "rubric": "..."}))
    values = await judge(prompts, completions, log_metric)      from 0 to 1, or None for an answer without a verdict

A request of /chat/completions has a completion (form "score"), two of a group ("pairwise"), or all of it ("group"), and
the requests of a group go out together. Answers are kept, so that what is asked again, also after a failure, costs
nothing. A judge that does not answer is a failure as a function's that raises: rewards.reward_errors says what follows.
"""

import asyncio
import dataclasses
import json
import os
import re
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor

from rlnumba.config.sections.rewards import JudgeConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.rewards.functions import texts_of
from rlnumba.rewards.served import FAILURES, is_passing, message_of, post, reason_of

PREFIX = "judge:"
# Seconds before a request is sent again, twice as long each time.
RETRY_S = 0.5
NUMBER = r"-?\d+(?:\.\d+)?"
SCORE, SCORES, BETTER = (
    # Models set the name in bold, with the colon or without.
    re.compile(rf"{name}\s*\**\s*:\s*\**\s*({value})", re.IGNORECASE)
    for name, value in (("Score", NUMBER), ("Scores", rf"{NUMBER}(?:\s*,\s*{NUMBER})*"), ("Better", r"A\b|B\b|tie\b"))
)
VALUE_OF = {"a": 1.0, "b": 0.0, "tie": 0.5}


class Judge:
    """The reward function of a JudgeConfig."""

    def __init__(self, config):
        self.config, self.__name__ = config, config.name
        self.answers, self._pool = OrderedDict(), None

    @property
    def spec(self):
        """The name by which other processes make the same judge."""
        return PREFIX + json.dumps(dataclasses.asdict(self.config))

    @property
    def compares_group(self):
        """Whether a completion's value depends on the others of its group: bool."""
        return self.config.form != "score"

    async def __call__(self, prompts, completions, log_metric):
        texts = texts_of(completions)
        tasks = [prompt if isinstance(prompt, str) else conversation(prompt) for prompt in prompts]
        counts, started = Counter(), time.monotonic()
        ask = {"score": self._score, "pairwise": self._pairwise, "group": self._group}[self.config.form]
        values = await ask(tasks, texts, counts)
        counts["unparsed"] = sum(value is None for value in values)
        cost = counts["prompt_tokens"] * self.config.prompt_price
        cost += counts["completion_tokens"] * self.config.completion_price
        for name in ("requests", "cached", "unparsed", "prompt_tokens", "completion_tokens"):
            log_metric(f"judge/{self.config.name}/{name}", counts[name] / len(texts))
        log_metric(f"judge/{self.config.name}/cost", cost / 1e6 / len(texts))
        log_metric(f"judge/{self.config.name}/latency_s", time.monotonic() - started)
        return values

    async def _score(self, tasks, texts, counts):
        low, high = self.config.scale
        wanted = f"Rate the answer with an integer from {low} to {high}. End with the line\nScore: NUMBER"
        schema = {"score": {"type": "integer", "minimum": low, "maximum": high}}
        asked = [f"Task:\n{task}\n\nAnswer:\n{text}\n\n{wanted}" for task, text in zip(tasks, texts, strict=True)]
        answers = await self._ask_all(asked, schema, counts)
        return [self._value(self._verdict(answer, "score", SCORE)) for answer in answers]

    async def _pairwise(self, tasks, texts, counts):
        """The share of comparisons that a completion wins, a tie being half of one."""
        size = len(texts)
        distances = range(1, min(self.config.opponents or size - 1, size - 1) + 1)
        # Each pair once where all are compared; who comes first alternates, for judges prefer a place.
        pairs = {tuple(sorted((i, (i + d) % size))) for i in range(size) for d in distances}
        pairs = [pair if sum(pair) % 2 else pair[::-1] for pair in sorted(pairs)]
        wanted = "Which answer is better? End with one of the lines\nBetter: A\nBetter: B\nBetter: tie"
        asked = [f"Task:\n{tasks[a]}\n\nAnswer A:\n{texts[a]}\n\nAnswer B:\n{texts[b]}\n\n{wanted}" for a, b in pairs]
        answers = await self._ask_all(asked, {"better": {"enum": ["A", "B", "tie"]}}, counts)
        won, compared = [0.0] * size, [0] * size
        for (a, b), answer in zip(pairs, answers, strict=True):
            value = VALUE_OF.get(str(self._verdict(answer, "better", BETTER)).lower())
            if value is not None:
                won[a], won[b] = won[a] + value, won[b] + 1 - value
                compared[a], compared[b] = compared[a] + 1, compared[b] + 1
        return [wins / count if count else None for wins, count in zip(won, compared, strict=True)]

    async def _group(self, tasks, texts, counts):
        low, high = self.config.scale
        listed = "\n\n".join(f"Answer {number}:\n{text}" for number, text in enumerate(texts, 1))
        wanted = (
            f"Rate each of the {len(texts)} answers, compared with the others, with an integer from {low} to {high}."
        )
        item = {"type": "integer", "minimum": low, "maximum": high}
        schema = {"scores": {"type": "array", "items": item, "minItems": len(texts), "maxItems": len(texts)}}
        asked = f"Task:\n{tasks[0]}\n\n{listed}\n\n{wanted} End with the line\nScores: NUMBER, NUMBER, ..."
        found = self._verdict((await self._ask_all([asked], schema, counts))[0], "scores", SCORES)
        found = found.split(",") if isinstance(found, str) else found
        if not isinstance(found, list) or len(found) != len(texts):
            return [None] * len(texts)
        return list(map(self._value, found))

    def _verdict(self, answer, name, pattern):
        """The value in an answer's text: of its JSON, or after the last line that has it; None without any."""
        if self.config.structured_outputs != "none":
            try:
                found = json.loads(answer)
            except (ValueError, RecursionError):
                return None
            return found.get(name) if isinstance(found, dict) else None
        found = pattern.findall(answer)
        return found[-1] if found else None

    def _value(self, score):
        """A score as a number from 0 to 1; None for one outside of the scale, or for none."""
        low, high = self.config.scale
        try:
            value = (float(score) - low) / (high - low)
        except (TypeError, ValueError, OverflowError):
            return None
        return value if 0 <= value <= 1 else None

    async def _ask_all(self, texts, properties, counts):
        """The answers to texts: list of str. Raises UserError once all others have come, which are kept."""
        bodies = [self._body(text, properties) for text in texts]
        new = [body for body in dict.fromkeys(bodies) if body not in self.answers]
        counts["cached"] += len(bodies) - len(new)
        counts["requests"] += len(new)
        loop = asyncio.get_running_loop()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.config.concurrency, f"judge {self.config.name}")
        asked = [loop.run_in_executor(self._pool, self._ask, body) for body in new]
        results = dict(zip(new, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        failures = [each for each in results.values() if isinstance(each, BaseException)]
        answers = {}
        for body, result in results.items():
            if not isinstance(result, BaseException):
                answers[body], usage = result
                counts.update(usage)
        for body in bodies:
            answers.setdefault(body, self.answers.get(body))
        self._keep({body: answer for body, answer in answers.items() if answer is not None})
        if failures:
            raise failures[0]
        return [answers[body] for body in bodies]

    def _keep(self, answers):
        for body, answer in answers.items():
            self.answers[body] = answer
            self.answers.move_to_end(body)
        while len(self.answers) > self.config.cache:
            self.answers.popitem(last=False)

    def _body(self, text, properties):
        """The body of a request: str."""
        config = self.config
        content = f"{config.rubric}\n\n{text}"
        body = {"messages": [{"role": "user", "content": content}], "temperature": config.temperature}
        body |= {"max_tokens": config.max_tokens} | ({"model": config.model} if config.model else {})
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        schema |= {"additionalProperties": False}
        if config.structured_outputs == "openai":
            form = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        elif config.structured_outputs == "vllm":
            body["structured_outputs"] = {"json": schema, "disable_any_whitespace": True}
        return json.dumps(body)

    def _ask(self, body):
        """(text, usage) of the answer to a body. Raises UserError of one line after the last try."""
        for attempt in range(self.config.retries + 1):
            if attempt:
                time.sleep(RETRY_S * 2 ** (attempt - 1))
            config = self.config
            try:
                status, content = post(config.url, "/chat/completions", body, config.timeout_s, config.api_key_env)
                if status == 200:
                    return answer_of(content)
            except TimeoutError:
                reason = f"no answer within {self.config.timeout_s:g} s"
                continue
            except FAILURES as error:
                reason = reason_of(error)
                continue
            reason = message_of(status, content)
            if not is_passing(status):
                break
        raise UserError(f"judge {self.config.url}: {reason}")


def answer_of(content):
    """(text, {prompt_tokens, completion_tokens}) of the answer (bytes) of a judge. Raises ValueError for what is
    none."""
    try:
        found = json.loads(content)
        text = content_text(found["choices"][0]["message"].get("content"))
        if not isinstance(text, str):
            raise ValueError
        usage = found.get("usage") or {}
        return text, {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError("an answer that is none of /chat/completions") from error


def conversation(messages):
    """Messages as a text for a judge: that of a single one, else each with its role."""
    texts = [content_text(message.get("content")) for message in messages]
    if len(messages) == 1:
        return texts[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def content_text(content):
    """The text of a message's content, which may be a list of blocks or None."""
    if isinstance(content, list):
        return "".join(block.get("text", "") for block in content if isinstance(block, dict))
    return content or ""


def find_judge(spec, judges):
    """The Judge of `judge:NAME`, a table of rewards.judges, or of another one's `spec`. Raises ConfigError."""
    given = spec.strip().removeprefix(PREFIX)
    if given.startswith("{"):
        return Judge(JudgeConfig(**json.loads(given)))
    config = JudgeConfig.of(given, judges[given])
    if config.api_key_env and config.api_key_env not in os.environ:
        raise ConfigError(f"rewards.judges.{given}.api_key_env: the environment has no variable {config.api_key_env}")
    return Judge(config)
