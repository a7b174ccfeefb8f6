"""The keys of config.json that mixtures of experts have: Qwen3-MoE's, and Qwen3.5-MoE's with its shared expert."""

from rlnumba.errors import UserError
from rlnumba.kernels.experts.ops import MAX_EXPERTS, MAX_TOP_K
from rlnumba.model.config_values import count, get, positive

# Keys that say how many experts there are. transformers 5 writes the second alone for Qwen3-MoE.
NUM_EXPERTS = ("num_experts", "num_local_experts")
MIXTURES = ("qwen3_moe", "qwen3_5_moe_text")
# Values of keys that a config.json of the type may lack: those of transformers' class.
QWEN3_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "router_aux_loss_coef": 0.001,
}
# Beside those of the dense model. Every layer is a mixture, and weights of the chosen experts are renormalised.
QWEN3_5_MOE_TEXT = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}


def with_one_count(raw, source):
    """A mixture's keys with the number of experts under num_experts alone, which may be absent."""
    given = {key: raw[key] for key in NUM_EXPERTS if raw.get(key) is not None}
    if len(set(map(repr, given.values()))) > 1:
        raise UserError(f"{source}: {' and '.join(f'{key} {value}' for key, value in given.items())} differ")
    kept = {key: value for key, value in raw.items() if key not in NUM_EXPERTS}
    return kept | ({"num_experts": next(iter(given.values()))} if given else {})


def mixture_fields(raw, source):
    """The fields of ModelConfig that a mixture has beside the others, from all its keys: dict."""
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    fields = {name: count(raw, name, source) for name in names}
    experts, chosen = fields["num_experts"], fields["num_experts_per_tok"]
    for name, most in (("num_experts", MAX_EXPERTS), ("num_experts_per_tok", MAX_TOP_K)):
        if fields[name] > most:
            raise UserError(f"{source}: {name} must be at most {most}, got {fields[name]}")
    if chosen > experts:
        raise UserError(f"{source}: num_experts_per_tok must be at most num_experts {experts}, got {chosen}")
    fields["norm_topk_prob"] = get(raw, "norm_topk_prob", bool, source)
    is_off = get(raw, "router_aux_loss_coef", float, source) == 0
    fields["router_aux_loss_coef"] = 0.0 if is_off else positive(raw, "router_aux_loss_coef", source)
    if raw["model_type"] == "qwen3_moe":
        layers = raw["num_hidden_layers"]
        fields["decoder_sparse_step"] = count(raw, "decoder_sparse_step", source)
        dense = raw["mlp_only_layers"]
        if not isinstance(dense, list | tuple) or not all(layer in range(layers) for layer in dense):
            raise UserError(
                f"{source}: mlp_only_layers must be a list of numbers from 0 to {layers - 1}, got {dense!r}"
            )
        fields["mlp_only_layers"] = tuple(dense)
        kinds = raw.get("layer_types")
        if kinds is not None and len(kinds) != layers:
            raise UserError(f"{source}: layer_types must have num_hidden_layers {layers} entries, got {len(kinds)}")
        return fields
    fields["shared_expert_intermediate_size"] = count(raw, "shared_expert_intermediate_size", source)
    if not fields["norm_topk_prob"]:
        raise UserError(f"{source}: norm_topk_prob False is not supported in a {raw['model_type']} model")
    return fields


def idle_parameters(config):
    """The parameters of a ModelConfig's experts that a token does not have: int, 0 for a dense model."""
    of_expert = 3 * config.hidden_size * config.moe_intermediate_size if config.num_experts else 0
    return len(config.mixture_layers) * (config.num_experts - config.num_experts_per_tok) * of_expert


def mixture_keys(config):
    """The keys that a mixture's config.json has beside those of other models: dict."""
    names = ["num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef"]
    names.append("decoder_sparse_step" if config.model_type == "qwen3_moe" else "shared_expert_intermediate_size")
    keys = {name: getattr(config, name) for name in names}
    # transformers 4 and vLLM read the first number, transformers 5 the second.
    keys |= {name: config.num_experts for name in NUM_EXPERTS}
    keys["output_router_logits"] = False
    return keys | ({"mlp_only_layers": list(config.mlp_only_layers)} if config.model_type == "qwen3_moe" else {})
