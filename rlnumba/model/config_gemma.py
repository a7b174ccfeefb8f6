"""Keys of a config.json of Gemma 3's text model."""

from rlnumba.errors import UserError
from rlnumba.model.config_rope import one_number, read_partial_rotary_factor, read_rope
from rlnumba.model.config_values import count, get, positive

# Values of keys that a config.json may lack: those of transformers' class. Google's files leave out most of them.
GEMMA3_TEXT = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
# Of each kind of layer, the key of its base, and the base of a config without one.
BASES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
KINDS = ("sliding_attention", "full_attention")
# One layer in so many has full attention.
PATTERN = 6


def read_gemma_fields(raw, source):
    """The fields of ModelConfig that Gemma 3 has beside the others: dict. raw: all keys, GEMMA3_TEXT's among them.

    Raises UserError for a model that is not computed here.
    """
    activation = get(raw, "hidden_activation", str, source)
    if activation != "gelu_pytorch_tanh":
        raise UserError(f"{source}: hidden_activation {activation!r} is not supported (supported: gelu_pytorch_tanh)")
    for key in ("attention_bias", "use_bidirectional_attention"):
        if get(raw, key, bool, source, False):
            raise UserError(f"{source}: {key} {raw[key]} is not supported in a {raw['model_type']} model")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(key) is not None:
            raise UserError(f"{source}: {key} {raw[key]} is not supported (supported: null)")
    scalar = positive(raw, "query_pre_attn_scalar", source)
    (theta, scaling), (local_theta, local_scaling) = _ropes(raw, source)
    if local_scaling is not None:
        kind = local_scaling.rope_type
        raise UserError(f"{source}: rope_parameters: sliding_attention: rope_type {kind!r} is not supported")
    kinds, window = _layer_types(raw, source), get(raw, "sliding_window", int, source, None)
    if KINDS[0] in kinds and (window is None or window < 1):
        raise UserError(f"{source}: sliding_window must be at least 1 in a model with {KINDS[0]} layers, got {window}")
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_local_base_freq": local_theta,
        "layer_types": kinds,
        "sliding_window": window or 0,
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "hidden_act": activation,
        "norm_offset": True,
        "has_output_norms": True,
        "scales_embedding": True,
    }


def gemma_keys(config, scaling):
    """The keys of config.json that Gemma 3 has beside the others, for both versions of transformers: dict.

    scaling: what rope_scaling is written as, a dict or None.
    """
    ropes = {
        "full_attention": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "sliding_attention": {"rope_theta": config.rope_local_base_freq, "rope_type": "default"},
    }
    return {
        "hidden_activation": config.hidden_act,
        "rope_local_base_freq": config.rope_local_base_freq,
        "rope_parameters": ropes,
        "layer_types": list(config.layer_kinds),
        "sliding_window": config.sliding_window or None,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }


def _layer_types(raw, source):
    """One of KINDS for each layer, from layer_types or a pattern: tuple."""
    layers, kinds = count(raw, "num_hidden_layers", source), raw.get("layer_types")
    if kinds is None:
        pattern = count(raw, "sliding_window_pattern", source, count(raw, "_sliding_window_pattern", source, PATTERN))
        kinds = [KINDS[(i + 1) % pattern == 0] for i in range(layers)]
    if len(kinds) != layers:
        raise UserError(f"{source}: layer_types must have num_hidden_layers {layers} entries, got {len(kinds)}")
    return tuple(kinds)


def _ropes(raw, source):
    """(theta, RopeScaling or None) of the full layers, then of the sliding ones; a flat rope_scaling is the former's.

    Raises UserError for a base that differs from that of rope_parameters.
    """
    both, scaling = ({} if raw.get(key) is None else raw[key] for key in ("rope_parameters", "rope_scaling"))
    for key, value in (("rope_parameters", both), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise UserError(f"{source}: {key} must be an object or null, got {value!r}")
    for kind, value in both.items():
        if kind not in KINDS or not isinstance(value, dict | None):
            raise UserError(f"{source}: rope_parameters must have an object for each of {', '.join(KINDS)}, got {both}")
    found, positions = [], count(raw, "max_position_embeddings", source)
    for kind, changed in (("full_attention", scaling), (KINDS[0], {})):
        (key, base), own = BASES[kind], both.get(kind) or {}
        named = {
            name: positive(keys, each, source, None)
            for name, keys, each in (
                (key, raw, key),
                (f"rope_parameters.{kind}.rope_theta", own, "rope_theta"),
                ("rope_scaling.rope_theta", changed, "rope_theta"),
            )
        }
        rope = {name: value for name, value in own.items() if value is not None} | changed
        rope["rope_theta"] = one_number(named, source) or base
        keys = {"model_type": raw["model_type"], "max_position_embeddings": positions, "rope_parameters": rope}
        read_partial_rotary_factor(keys, count(raw, "head_dim", source), False, source)
        found.append(read_rope(keys, source))
    return found
