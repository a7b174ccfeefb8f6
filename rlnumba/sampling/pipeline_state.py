"""The groups of a pipeline that are admitted and not trained on, in a checkpoint.

Of those that are complete it has the completions; the others are drawn again, so no prompt is lost or comes twice. So
are episodes, whose environments no checkpoint keeps. Rewards are computed again, too.
"""

from dataclasses import replace

import numpy as np

from rlnumba.engine.sequence import Completion
from rlnumba.errors import UserError
from rlnumba.sampling.group_buffer import Group
from rlnumba.sampling.pipeline import Drawn


def state_of(pipeline):
    """The groups of a Pipeline that are not trained on: [(number, Drawn, its completions or ())]."""
    return [
        (group.number, group.content, group.content.completions if is_complete else ())
        for group, is_complete in pipeline.buffer.snapshot()
    ]


def encoded(groups):
    """The groups that Pipeline.state returned, as a checkpoint keeps them: list of dict."""
    return [
        {
            "number": number, "prompt": drawn.prompt, "step": drawn.step, "index": drawn.index,
            "noise": {"seed": drawn.params.seed, "first_index": drawn.params.first_index},
            "columns": drawn.columns, "attempts": drawn.attempts, "replaced": drawn.replaced, "draw": drawn.draw,
            "unused": [[each.prompt, each.draw] for each in drawn.unused],
            "completions": encoded_completions(completions) if _are_kept(completions) else None,
        }
        for number, drawn, completions in groups
    ]  # fmt: skip


def _are_kept(completions):
    """Whether a checkpoint has these Completions, which are none of a group that is not complete."""
    return bool(completions) and all(each.episode is None for each in completions)


# Attributes of a Completion that have a value for each token.
OF_TOKENS = ("token_ids", "logprobs", "policy_versions")


def encoded_completions(completions):
    """Completions as arrays of all of them: dict."""
    found = {name: np.concatenate([each.array(name) for each in completions]) for name in OF_TOKENS}
    found["lengths"] = np.array([each.num_tokens for each in completions], np.int32)
    if all(each.routed_experts is not None for each in completions):
        found["routed_experts"] = np.concatenate([each.routed_experts for each in completions])
        found["routed_lengths"] = np.array([len(each.routed_experts) for each in completions], np.int32)
    if all(each.thresholds is not None for each in completions):
        found["thresholds"] = np.concatenate([each.thresholds for each in completions])
    return found | {name: [getattr(each, name) for each in completions] for name in ("finish_reason", "text")}


def decoded_completions(saved):
    """The inverse of encoded_completions: list."""
    cuts = np.cumsum(saved["lengths"])[:-1]
    columns = [np.split(saved[name], cuts) for name in OF_TOKENS]
    experts = thresholds = [None] * len(saved["lengths"])
    if "routed_experts" in saved:
        experts = np.split(saved["routed_experts"], np.cumsum(saved["routed_lengths"])[:-1])
    if "thresholds" in saved:
        thresholds = np.split(saved["thresholds"], cuts)
    columns = *columns, saved["finish_reason"], saved["text"], thresholds, experts
    return [
        Completion(ids, logprobs, reason, text, versions, smallest, routed_experts=routed)
        for ids, logprobs, versions, reason, text, smallest, routed in zip(*columns, strict=True)
    ]


def restore(pipeline, groups):
    """Give a Pipeline the groups of a checkpoint, as `encoded` wrote them; before its `start`."""
    size = pipeline.plan.num_prompts
    if len(groups) % size:
        raise UserError(
            f"the checkpoint has {len(groups)} groups that are not trained on yet, which the {size} of a "
            "generation do not divide: resume the run with its own batch sizes"
        )
    for _ in range(len(groups) // size):
        pipeline.coming.popleft()
    for saved in groups:
        params = replace(pipeline.params_of(saved["step"], saved["index"]), **saved["noise"])
        place = saved["step"], saved["index"], pipeline.version, params, saved["columns"]
        # Checkpoints of before there was dynamic sampling have neither.
        draw, unused = saved.get("draw", saved["number"]), saved.get("unused", [])
        unused = tuple(Drawn(prompt, *place, draw=number) for prompt, number in unused)
        drawn = Drawn(saved["prompt"], *place, saved["attempts"], saved["replaced"], draw, unused=unused)
        group = Group(saved["number"], drawn)
        pipeline.buffer.reserve(group)
        pipeline.next_number = group.number + 1
        is_complete = saved["completions"] is not None
        if is_complete and len(saved["completions"]["lengths"]) == pipeline.plan.num_drawn_each:
            pipeline.complete(group, tuple(decoded_completions(saved["completions"])))
    _restore_draws(pipeline)


def _restore_draws(pipeline):
    """Note what was drawn for the groups that a checkpoint had."""
    places = [group.content for group, _ in pipeline.buffer.snapshot()]
    draws = sorted((each for drawn in places for each in (*drawn.unused, drawn)), key=lambda each: each.draw)
    for each in draws:
        ids = pipeline.prompts.prompts[each.prompt].prompt_token_ids
        pipeline.prompt_ids.setdefault((each.step, each.index), []).append(ids)
        pipeline.num_drawn = each.draw + 1
