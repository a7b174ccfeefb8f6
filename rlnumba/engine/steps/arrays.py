"""The arrays of a step, built for all its sequences at once with NumPy from the scheduler's table."""

import numpy as np

from rlnumba.engine.requests.logprobs import scored_spans
from rlnumba.kernels.checks import unused
from rlnumba.kernels.decode_state import DecodeState
from rlnumba.kernels.delta_rule.arithmetic import BLOCK as STATE_BLOCK

# The fields of SamplingInputs that are columns of the sequence table under the same name.
TABLE_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "philox_key", "sample_index")


def max_group_size_of(step):
    """The bound of the sizes of a step's prefix groups, 1 without any."""
    return 1 if step.prefix_groups is None else step.prefix_groups.max_group_size


def state_arrays(table, rows, max_context_len):
    """The arrays of StateSequences for sequences in these rows of the table, with contexts of up to max_context_len."""
    tables = table.state_tables[rows, : -(-max_context_len // STATE_BLOCK)]
    return {
        "state_tables": tables,
        "state_slots": rows.astype(np.int32),
        "resumed_at": table.resumed_at[rows].astype(np.int32),
    }


def step_arrays(step, table, block_size, with_adapters=False, with_states=False):
    """{name: array} of a step of B sequences and N tokens, D of them sampled, for the model, the cache and the sampler.

    Tokens have input_ids, position_ids, slot_mapping (N,) int32, and with_adapters adapter_ids. Sequences have
    block_tables (B, W), cu_seqlens (B + 1,), context_lens (B,) int32, in the order of step.rows; where the table has
    windows, tokens also have window_slots, and sequences window_tables, of places, not blocks; with_states those of
    state_arrays, and in a step with prefix groups shared_prefix_lens, group_sizes (B,) int32. Sampled tokens have the
    fields of SamplingInputs.
    """
    rows, counts = step.rows, step.counts
    ends = np.cumsum(counts)
    context_lens = step.starts + counts
    width = int(-(-context_lens.max() // block_size))
    if len(rows) == ends[-1]:
        token_rows, positions = rows, step.starts
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(step.starts - ends + counts, counts)
    blocks = table.block_tables[token_rows, positions // block_size].astype(np.int64)
    cu_seqlens = np.zeros(len(rows) + 1, np.int32)
    cu_seqlens[1:] = ends
    arrays = {
        "input_ids": table.token_ids[token_rows, positions],
        "position_ids": positions.astype(np.int32),
        "slot_mapping": (blocks * block_size + positions % block_size).astype(np.int32),
        "block_tables": table.block_tables[rows, :width],
        "cu_seqlens": cu_seqlens,
        "context_lens": context_lens.astype(np.int32),
    }
    if table.windows is not None:
        slots = table.windows.places(blocks) * block_size + positions % block_size
        arrays["window_slots"] = slots.astype(np.int32)
        arrays["window_tables"] = table.windows.places(arrays["block_tables"])
    if with_states:
        arrays |= state_arrays(table, rows, int(context_lens.max()))
    if with_adapters:
        arrays["adapter_ids"] = table.adapter_slot[token_rows]
    groups = step.prefix_groups
    if groups is not None:
        arrays["shared_prefix_lens"], arrays["group_sizes"] = groups.shared_prefix_lens, groups.group_sizes
    if spans := scored_spans(step, table):
        arrays |= scored_arrays(step, table, spans, ends)
    sampled = step.sampled_rows
    if not len(sampled):
        return arrays
    # Tokens before the sampled one.
    lengths = positions + 1 if step.has_drafts else table.length[sampled]
    for name in TABLE_COLUMNS:
        arrays[name] = getattr(table, name)[sampled]
    arrays["position"] = lengths.astype(np.int32)
    if len(sampled) < ends[-1]:
        arrays["rows"] = (ends[step.samples] - 1).astype(np.int32)
    listed = table.num_logprobs[sampled]
    if (listed >= 0).any():
        arrays["num_logprobs"] = listed
    replay = table.logit_thresholds[sampled]
    # What is listed is of the logits that the filters kept, too.
    if replay.any() or "num_logprobs" in arrays:
        arrays["replay"] = replay.astype(np.int32)
    return arrays | penalty_arrays(table, sampled, lengths) | rule_arrays(table, sampled, step.allowed)


def scored_arrays(step, table, spans, ends):
    """The arrays of the M tokens of prompts that a step scores: scored_rows of the hidden states, ids, and counts.

    spans: of scored_spans; ends (B,): tokens of the step up to each sequence's last.
    """
    rows, ids, counts = [], [], []
    for i, start, count in spans:
        row = step.rows[i]
        rows.append(ends[i] - step.counts[i] + np.arange(count))
        ids.append(table.token_ids[row, start + 1 : start + 1 + count])
        counts.append(np.full(count, table.sequences[row].params.num_prompt_logprobs))
    found = {"scored_rows": rows, "scored_ids": ids, "scored_counts": counts}
    return {name: np.concatenate(parts).astype(np.int32) for name, parts in found.items()}


def penalty_arrays(table, sampled, lengths):
    """The fields of SamplingInputs for penalties and banned tokens of the sampled rows, without those of none: dict.

    lengths (D,): tokens before each of the sampled ones.
    """
    arrays, starts = {}, table.prompt_length[sampled]
    penalty = table.repetition_penalty[sampled]
    presence, frequency = table.presence_penalty[sampled], table.frequency_penalty[sampled]
    if (penalty != 1).any():
        arrays["penalty"] = penalty
    if presence.any() or frequency.any():
        arrays |= {"presence": presence, "frequency": frequency}
    has_bad_words = table.has_bad_words[sampled].any()
    if "presence" in arrays or has_bad_words:
        arrays["starts"] = starts.astype(np.int32)
    if arrays or has_bad_words:
        history = table.token_ids[sampled, : lengths.max()]
        history[np.arange(history.shape[1]) >= lengths[:, None]] = -1
        arrays["history"] = history
    must_go_on = lengths - starts < table.min_tokens[sampled]
    if must_go_on.any() and table.stop_ids.shape[1]:
        arrays["banned"] = np.where(must_go_on[:, None], table.stop_ids[sampled], -1).astype(np.int32)
    return arrays


def rule_arrays(table, sampled, allowed=None):
    """The fields of SamplingInputs for the TokenRules of the sampled rows, without those of none: dict.

    allowed: what grammars and TokenRules allow together, None without grammars.
    """
    names = {"has_bias": ("bias_ids", "bias"), "has_allowed": ("allowed",), "has_bad_words": ("bad_words",)}
    asked = [name for has, of_rule in names.items() if getattr(table, has)[sampled].any() for name in of_rule]
    arrays = {name: getattr(table, name)[sampled] for name in asked}
    return arrays if allowed is None else arrays | {"allowed": allowed}


def decode_arrays(step, table, max_blocks, with_states=False):
    """{name: array} that a decode step has beside or instead of step_arrays': the other fields of DecodeState.

    The block tables have their first max_blocks columns, with blocks for tokens to come.
    """
    rows = step.rows
    tables = table.block_tables[rows, :max_blocks]
    arrays = state_arrays(table, rows, max_blocks * table.block_size) if with_states else {}
    if table.windows is not None:
        arrays["window_tables"] = table.windows.places(tables)
    return arrays | {
        "block_tables": tables,
        "live": np.ones(len(rows), np.int32),
        "stop_ids": table.stop_ids[rows],
        "length_limit": table.length_limit[rows].astype(np.int32),
        "banned_until": (table.prompt_length[rows] + table.min_tokens[rows]).astype(np.int32),
        "num_steps": np.zeros(1, np.int32),
    }


def window_state(arrays):
    """The DecodeState as the layers with a window have it: places in its tables, and slots of these."""
    return decode_state(arrays)._replace(block_tables=arrays["window_tables"], slot_mapping=arrays["window_slots"])


def decode_state(arrays):
    """The DecodeState among the arrays of a decode step, on the device."""
    return DecodeState(*(arrays[name] if name in arrays else unused(2) for name in DecodeState._fields))
