"""An episode: turns of the policy, and between them the results of the tools that it calls.

    prompt -> reset's observation -> turn -> its calls -> their results -> turn -> ... -> get_reward

Text is decoded to be parsed and never encoded again: the context of a turn is that of the turn before, the ids that
were drawn, and the ids of the results. It ends with a turn without calls, with one that cannot be continued, or after
max_tool_calling_iterations.
"""

import numbers
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlnumba.data.prompts import encode_prompt
from rlnumba.environments.calls import CallResult, ToolRun, error_content, in_unicode
from rlnumba.environments.formats import THINK, MalformedCall, TurnStream, opens_think, think_tags_of
from rlnumba.environments.formats.turn import parse_turn
from rlnumba.environments.pool import EnvironmentFailure, connection_errors
from rlnumba.environments.transcript import ITERATIONS, LENGTH, MALFORMED, OVERFLOW, STOP, Transcript
from rlnumba.environments.turns import suffix_ids
from rlnumba.errors import UserError, shown

# The name of the results of blocks that cannot be read as calls.
UNREADABLE = "tool_call"
# Tokens at the end of a context among which an open <think> is looked for.
TAIL = 16


class RewardInputs(NamedTuple):
    """Keywords of reward functions besides the completions of a group: the columns of its row, None for those that
    only others of the generation have, and `trainer_state`."""

    columns: dict
    trainer_state: Any


@dataclass(frozen=True)
class EpisodeRow:
    """The row of the data that an episode begins with.

    prompt: messages; prompt_token_ids: theirs, before an observation. values: what `reset` may take. template:
    variables of the chat template. environment: the name of the factory, None for a single one. seed: for `reset`, one
    a group. where: file and line. inputs: for the reward functions that the process which plays it may call.
    """

    prompt: list
    prompt_token_ids: list
    values: dict
    template: dict = field(default_factory=dict)
    environment: str | None = None
    seed: int = 0
    where: str = ""
    inputs: RewardInputs | None = None


def with_observation(prompt, observation):
    """Messages whose last one goes on with what `reset` has returned: a str, or a list of text blocks, as in TRL."""
    content = prompt[-1].get("content") or ""
    if isinstance(observation, list):
        observation = [block | {"text": in_unicode(block["text"])} for block in observation]
    else:
        observation = in_unicode(observation)
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


def is_observation(value):
    """Whether `reset` may return a value besides None: a str or a list of text blocks."""
    is_blocks = isinstance(value, list) and all(
        isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)
        for block in value
    )
    return isinstance(value, str) or is_blocks


class Episode:
    """The coroutine function of the rollouts of one row. agents: Agents; row: EpisodeRow.

    A pickle has the row alone: where it is read, `played_by` gives it the Agents of that process.
    """

    def __init__(self, agents, row):
        self.agents, self.row = agents, row

    def __reduce__(self):
        return type(self), (None, self.row)

    def played_by(self, agents):
        """The same with other Agents."""
        return type(self)(agents, self.row)

    async def __call__(self, rollout):
        """Play one rollout: its Transcript."""
        agents, row = self.agents, self.row
        transcript, instance, taken = Transcript(row.prompt, environment=row.environment), None, None
        try:
            if agents.has_environments:
                taken = agents.pool.take(row.environment)
                try:
                    instance = await rollout.wait(taken)
                except EnvironmentFailure as error:
                    if agents.rewards_read_environments or not isinstance(error.__cause__, connection_errors()):
                        raise
                    # As a connection that is lost later, so that a server which begins again ends no run. Functions
                    # that read environments would have none.
                    await draw_nothing(rollout, transcript)
                    return transcript
                transcript.class_name = instance.class_name
                transcript.environment = row.environment or instance.class_name
            context = await self._reset(rollout, instance, transcript)
            if instance is not None and instance.is_lost:
                await draw_nothing(rollout, transcript)
            else:
                await self._play(rollout, instance, transcript, context)
            if instance is not None and instance.has_reward and not instance.is_lost:
                await self._reward(rollout, instance, transcript)
            transcript.is_lost = instance is not None and instance.is_lost
            if instance is not None and agents.rewards_read_environments:
                # It is given back when the rewards have read it.
                agents.keep(transcript, instance)
                taken = None
        finally:
            if taken is not None:
                agents.pool.drop(taken)
        return transcript

    async def _reset(self, rollout, instance, transcript):
        """Reset the environment, and add its observation to the prompt: the ids of the first context."""
        row = self.row
        if instance is None:
            return list(row.prompt_token_ids)
        began = time.monotonic()
        episode_id = f"{row.seed}-{rollout.params.first_index + rollout.index}"
        try:
            observation = await rollout.wait(instance.reset(row.values, row.seed, episode_id))
        except EnvironmentFailure as error:
            if instance.is_lost:
                return list(row.prompt_token_ids)
            raise EnvironmentFailure(f"{row.where}: {error}" if row.where else str(error)) from error
        transcript.reset_s = time.monotonic() - began
        if observation is None:
            return list(row.prompt_token_ids)
        if not is_observation(observation):
            raise EnvironmentFailure(
                f"{row.where}: environment: {instance.class_name}.reset() must return a string, a list of text blocks "
                f"or None, got {shown(observation)}"
            )
        transcript.prompt = with_observation(row.prompt, observation)
        ids = self.agents.encode(transcript.prompt, row)
        if len(ids) >= rollout.max_model_len:
            raise UserError(
                f"{row.where}: the prompt with the observation of {instance.class_name}.reset() has {len(ids)} tokens, "
                f"which leaves no room for a completion in {rollout.max_model_len} (engine.max_model_len)"
            )
        return ids

    async def _play(self, rollout, instance, transcript, context):
        """Turns until the end."""
        agents, toolset = self.agents, self.agents.toolsets[self.row.environment]
        while True:
            turn = await rollout.complete(context)
            context = context + list(turn.token_ids)
            transcript.turns += 1
            parsed = self._parse(turn, context)
            results = [block for block in parsed.blocks if isinstance(block, MalformedCall)]
            # With a call that cannot be read, none of the turn's runs, and its message has none.
            is_plain = results and agents.stops_at_malformed
            transcript.completion.append(parsed.plain_message() if is_plain else parsed.message())
            transcript.malformed |= bool(results)
            transcript.ended = turn.finish_reason
            if not parsed.calls and not results:
                return
            if is_plain:
                if turn.finish_reason != LENGTH:
                    transcript.ended = MALFORMED
                return
            if agents.most_iterations is not None and len(transcript.calls_of_turns) >= agents.most_iterations:
                transcript.ended = ITERATIONS
                return
            results = await self._execute(rollout, instance, toolset, parsed)
            if instance is not None and instance.is_lost:
                return
            transcript.add_results([result for result in results if result.name != UNREADABLE])
            messages = [result.message for result in results]
            has_ended = agents.has_ended(turn, self.row.environment)
            suffix = suffix_ids(agents.tokenizer, has_ended, messages, self.row.template, toolset.schemas)
            if rollout.room(len(suffix)) < 1:
                transcript.ended = OVERFLOW
                return
            transcript.completion += messages
            context = context + suffix

    async def _execute(self, rollout, instance, toolset, parsed):
        """The CallResults of a turn's blocks, in their order; those that cannot be read have an error."""
        calls = [self._call(instance, toolset, call) for call in parsed.calls]
        executed = iter(await rollout.wait(self.agents.caller.submit(calls)) if calls else ())
        return [
            CallResult(UNREADABLE, error_content(f"the call cannot be read: {block.problem}"), failed=True)
            if isinstance(block, MalformedCall)
            else next(executed)
            for block in parsed.blocks
        ]

    def _call(self, instance, toolset, call):
        """The ToolRun of a ToolCall of the policy."""
        if call.name in toolset.methods:
            return instance.call(call.name, call.arguments)
        return ToolRun(call.name, toolset.functions.get(call.name), call.arguments)

    def _parse(self, turn, context):
        """The ParsedTurn of a Completion, the last ids of the context."""
        agents, toolset = self.agents, self.agents.toolsets[self.row.environment]
        ids, before = list(turn.token_ids), context[: len(context) - turn.num_tokens]
        # A model may have other ids that end a turn, beside the tokenizer's EOS.
        if turn.finish_reason == STOP and turn.stop_reason is None:
            ids = ids[:-1]
        text = agents.tokenizer.decode(ids, skip_special_tokens=False)
        think = think_tags_of(agents.tokenizer.chat_template) or THINK
        starts_in_think = opens_think(agents.tokenizer.decode(before[-TAIL:], skip_special_tokens=False), think)

        def parse(text):
            if not toolset.schemas:
                return parse_turn(TurnStream(None, {}, starts_in_think, think=think), text)
            stays = agents.stops_at_malformed
            return agents.format.parse(text, toolset.schemas, starts_in_think, stays, think)

        if not isinstance(turn.stop_reason, str):
            return parse(text)
        # It ends with the last token; earlier ones may be there within min_tokens.
        before = len(agents.tokenizer.decode(ids[:-1], skip_special_tokens=False))
        begin = text.find(turn.stop_reason, max(before - len(turn.stop_reason) + 1, 0))
        if begin < 0:
            # With a special token in it, which the engine's text is without.
            return parse(text)
        found, whole = parse(text[:begin]), parse(text[: begin + len(turn.stop_reason)])
        # A stop string may be the end of a call.
        return whole if len(whole.calls) > len(found.calls) else found

    async def _reward(self, rollout, instance, transcript):
        """Ask the environment for its reward."""
        began = time.monotonic()
        try:
            value = await rollout.wait(instance.get_reward())
            if value is not None and not isinstance(value, numbers.Real | np.bool_):
                raise EnvironmentFailure(
                    f"environment: {instance.class_name}.get_reward() must return a number or None, got {shown(value)}"
                )
            transcript.reward = value
        except EnvironmentFailure as error:
            transcript.reward_error = None if instance.is_lost else str(error)
        transcript.reward_s = time.monotonic() - began


async def draw_nothing(rollout, transcript):
    """Draw one token after the prompt of an episode that cannot be played, because a completion has one."""
    turn = await rollout.complete(list(rollout.prompt_token_ids), 1)
    transcript.turns, transcript.is_lost = 1, True
    transcript.completion, transcript.ended = [{"role": "assistant", "content": turn.text}], turn.finish_reason


def encode(tokenizer, prompt, template, schemas):
    """The ids of messages with the schemas of the tools: list of int."""
    tools = {"tools": schemas} if schemas else {}
    return list(encode_prompt(tokenizer, prompt, **template | tools))
