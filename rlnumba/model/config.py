"""The shape of a model, read from a Hugging Face folder's config.json and generation_config.json.

Seven model types share one transformer and differ in the fields below: qwen3 (per-head norm of q and k), qwen2
(bias on q, k and v), llama (also the model_type of SmolLM2 and TinyStories models), qwen3_5_text (linear attention in
most layers, gates, norms of 1 + weight), the mixtures of experts qwen3_moe and qwen3_5_moe_text, and gemma3_text
(sliding windows in most layers, norms of blocks' outputs). Those of names that end in _text are also the text models in
one of vision and language. A key for something that this transformer does not compute raises an error that names it; it
is never ignored.
"""

import functools
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rlnumba.errors import UserError
from rlnumba.kernels.attention.ops import MAX_HEAD_DIM
from rlnumba.kernels.delta_rule.inputs import TAPS
from rlnumba.kernels.nn.rope import RopeScaling
from rlnumba.model.blocks.every import layers_of
from rlnumba.model.config_gemma import GEMMA3_TEXT, KINDS, gemma_keys, read_gemma_fields
from rlnumba.model.config_mixture import (
    MIXTURES,
    NUM_EXPERTS,
    QWEN3_5_MOE_TEXT,
    QWEN3_MOE,
    mixture_fields,
    mixture_keys,
    with_one_count,
)
from rlnumba.model.config_rope import read_partial_rotary_factor, read_rope
from rlnumba.model.config_values import HYBRIDS, REQUIRED, count, get, positive, read_json
from rlnumba.model.quantized.checkpoint import check_config
from rlnumba.runtime import device

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
# The heads that read the hidden states: a language-model head, a head of one output ("score": a reward model, a
# critic), or, in a policy that shares its trunk with its critic, both. The second is transformers'
# ...ForSequenceClassification.
LM_HEAD, SCORE_HEAD = ("lm",), ("score",)
HEADS = (LM_HEAD, SCORE_HEAD, LM_HEAD + SCORE_HEAD)

# Keys of config.json that are fields under the same name, in the order in which they are written.
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)

# Sizes of linear attention.
LINEAR_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
LAYER_TYPES = ("full_attention", "linear_attention")
# Those of each model type whose layers may differ.
LAYER_TYPES_OF = {**dict.fromkeys(HYBRIDS, LAYER_TYPES), "gemma3_text": KINDS}
# The models whose config.json has the text model's keys in text_config, and the text model's type.
WITH_TEXT_CONFIG = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text"}
# Keys of such a config.json that count where text_config does not have them.
OF_BOTH = (
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("architectures", "heads", "id2label", "num_labels", "quantization_config"),
)
# Values of keys that a config.json of the type may lack: those of transformers' class.
QWEN3_5_TEXT = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
DEFAULTS = {
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_5_moe_text": {**QWEN3_5_TEXT, **QWEN3_5_MOE_TEXT},
    "qwen3_moe": QWEN3_MOE,
    "gemma3_text": GEMMA3_TEXT,
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape and options of a transformer; field names are those of config.json where it has them.

    attention_bias: a bias on the q, k, v projections; o_bias: one on the attention's output projection.
    rope_scaling: None, or how the rotary frequencies are stretched. dtype: that of the checkpoint's tensors. heads: one
    of HEADS. layer_types: the kind of attention of each layer, () if all have full attention; the sizes of linear
    attention are 0 without it. norm_offset: whether norms multiply by 1 + weight. has_output_norms: whether a block's
    output is normalised, too, before it is added. scales_embedding: whether embeddings are multiplied by
    sqrt(hidden_size). query_pre_attn_scalar: what stands for head_dim in attention's scale, 0 if nothing does. Layers
    of sliding_attention see sliding_window keys, with the token's own, and rotate with the base rope_local_base_freq.
    num_experts: 0 in a dense model; router_aux_loss_coef: the factor of the routers' loss in training, where a run does
    not say otherwise.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str = "float32"
    heads: tuple[str, ...] = LM_HEAD
    partial_rotary_factor: float = 1.0
    norm_offset: bool = False
    attn_output_gate: bool = False
    layer_types: tuple[str, ...] = ()
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    hidden_act: str = "silu"
    has_output_norms: bool = False
    scales_embedding: bool = False
    query_pre_attn_scalar: float = 0
    sliding_window: int = 0
    rope_local_base_freq: float = 0.0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def layer_kinds(self):
        """The kind of attention of each layer: tuple."""
        return self.layer_types or ("full_attention",) * self.num_hidden_layers

    def window_of(self, layer):
        """The keys that a query of a layer sees, with its own; 0: all up to its own."""
        return self.sliding_window if self.layer_kinds[layer] == "sliding_attention" else 0

    @property
    def has_linear_attention(self):
        return "linear_attention" in self.layer_types

    @property
    def mixture_layers(self):
        """The numbers of the layers that are mixtures of experts: list."""
        layers, step = range(self.num_hidden_layers), self.decoder_sparse_step
        dense = layers if not self.num_experts else self.mlp_only_layers
        return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]

    @property
    def has_plain_heads(self):
        """Whether heads are as in kernels that make them inside attention: no gates or offset, rotated as a whole."""
        return not (self.attn_output_gate or self.norm_offset) and self.partial_rotary_factor == 1.0

    @property
    def rotary_dim(self):
        """The first elements of a head, which rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def blocks(self):
        """The blocks of each layer (model/blocks): a tuple of tuples."""
        return _layers_of(self)

    @property
    def scale(self):
        """The factor by which attention multiplies q . k: 1 / sqrt(head_dim), or of what stands for it."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def ending_at(self, token_id):
        """This config with a token's id, or None, among those that end a sequence: a tokenizer's EOS goes first, as
        transformers' Trainer writes it. One that is none of the model's is left out, for it cannot be drawn."""
        known = token_id is None or token_id in self.eos_token_ids or not 0 <= token_id < self.vocab_size
        return self if known else replace(self, eos_token_ids=(token_id, *self.eos_token_ids))

    @classmethod
    def from_folder(cls, folder):
        """The config of a Hugging Face folder; end-of-sequence ids of generation_config.json, which transformers and
        vLLM generate with, take the place of config.json's. Those of a tokenizer are in hub.py's read_config.

        Raises UserError, one line naming file and key, for anything missing, mistyped or not supported.
        """
        path = Path(folder) / "config.json"
        raw = read_json(path)
        generation = Path(folder) / "generation_config.json"
        if generation.exists():
            ids = read_json(generation).get("eos_token_id")
            if ids is not None:
                raw["eos_token_id"] = list(_token_ids({"eos_token_id": ids}, generation))
        return cls.from_dict(raw, path)

    @property
    def num_positions(self):
        """The longest sequence in tokens: max_position_embeddings, or what rope_scaling stretches it to."""
        positions = self.max_position_embeddings
        if self.model_type == "gemma3_text":
            # What it is stretched to.
            return positions
        return positions if self.rope_scaling is None else self.rope_scaling.num_positions(positions)

    @classmethod
    def from_dict(cls, raw, source="config.json"):
        """The config in a dict as json reads it from config.json; `source` names the file in errors."""
        raw = _text_config(raw, source)
        model_type = get(raw, "model_type", str, source)
        if model_type not in ARCHITECTURES:
            known = ", ".join((*ARCHITECTURES, *WITH_TEXT_CONFIG))
            raise UserError(f"{source}: model_type {model_type!r} is not supported (supported: {known})")
        is_hybrid, is_gemma, is_mixture = model_type in HYBRIDS, model_type == "gemma3_text", model_type in MIXTURES
        if is_mixture:
            raw = with_one_count(raw, source)
        if model_type in DEFAULTS:
            # No window is not the default one.
            given = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
            raw = {**DEFAULTS[model_type], **given}
        _refuse_unsupported(raw, model_type, source)
        sizes = {name: count(raw, name, source) for name in SIZES[:5]}
        if is_hybrid and is_mixture:
            # No layer is dense.
            sizes["intermediate_size"] = 0
        heads = sizes["num_attention_heads"]
        # The default of transformers' own class for this model type applies if a key is absent.
        kv_heads = count(raw, "num_key_value_heads", source, heads if model_type == "llama" else REQUIRED)
        default = 128 if model_type == "qwen3" else sizes["hidden_size"] // heads
        head_dim = count(raw, "head_dim", source, default)
        if heads % kv_heads:
            raise UserError(
                f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2 or head_dim > MAX_HEAD_DIM:
            raise UserError(f"{source}: head_dim must be even and at most {MAX_HEAD_DIM}, got {head_dim}")
        bias = get(raw, "attention_bias", bool, source, False)
        theta, scaling = (None, None) if is_gemma else read_rope(raw, source)
        partial = 1.0 if is_gemma else read_partial_rotary_factor(raw, head_dim, is_hybrid, source)
        dtype = get(raw, "dtype", str, source, get(raw, "torch_dtype", str, source, "float32"))
        if dtype not in device.DTYPES:
            raise UserError(f"{source}: dtype {dtype!r} is not supported (supported: {', '.join(device.DTYPES)})")
        fields_of_type = {}
        if is_hybrid:
            fields_of_type = _hybrid_fields(raw, source)
        elif is_gemma:
            fields_of_type = read_gemma_fields(raw, source)
        if is_mixture:
            fields_of_type |= mixture_fields(raw, source)
        return cls(
            model_type=model_type,
            **sizes,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=positive(raw, "rms_norm_eps", source),
            max_position_embeddings=count(raw, "max_position_embeddings", source),
            tie_word_embeddings=get(raw, "tie_word_embeddings", bool, source, False),
            qk_norm=model_type in ("qwen3", *DEFAULTS),
            attention_bias=model_type == "qwen2" or bias,
            o_bias=model_type != "qwen2" and bias,
            mlp_bias=model_type == "llama" and get(raw, "mlp_bias", bool, source, False),
            eos_token_ids=_token_ids(raw, source),
            bos_token_id=get(raw, "bos_token_id", int, source, None),
            pad_token_id=get(raw, "pad_token_id", int, source, None),
            dtype=dtype,
            heads=_heads(raw, source),
            partial_rotary_factor=partial,
            **{"rope_theta": theta, "rope_scaling": scaling, **fields_of_type},
        )

    def to_dict(self):
        """The contents of a config.json that transformers 4 and 5 and vLLM read as this model.

        The rotary settings are written in both styles: rope_theta with rope_scaling, and rope_parameters.
        """
        scaling = self.rope_scaling
        if scaling is not None:
            # Its type, and the values that are not the type's defaults.
            values = {field: getattr(scaling, field.name) for field in fields(scaling)}
            scaling = {field.name: value for field, value in values.items() if value != field.default}
        raw = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{name: getattr(self, name) for name in SIZES if getattr(self, name)},
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_theta": self.rope_theta, **(scaling or {"rope_type": "default"})},
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": self.dtype,
        }
        if self.num_experts:
            raw.update(mixture_keys(self))
        if self.model_type in HYBRIDS:
            raw["rope_parameters"]["partial_rotary_factor"] = self.partial_rotary_factor
            names = ("partial_rotary_factor", "attn_output_gate", *LINEAR_SIZES)
            raw.update({name: getattr(self, name) for name in names})
            raw.update(layer_types=list(self.layer_kinds), linear_conv_kernel_dim=TAPS)
        if self.model_type == "gemma3_text":
            del raw["hidden_act"]
            raw.update(gemma_keys(self, scaling))
        if self.model_type != "qwen2":
            raw["attention_bias"] = self.attention_bias
        if self.model_type == "llama":
            raw["mlp_bias"] = self.mlp_bias
        elif self.model_type not in (*HYBRIDS, "gemma3_text"):
            raw.update(use_sliding_window=False, sliding_window=None, max_window_layers=self.num_hidden_layers)
        if self.heads == SCORE_HEAD:
            raw.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
        elif self.heads != LM_HEAD:
            raw["heads"] = list(self.heads)
        return raw

    @property
    def architecture(self):
        """The name of transformers' class, of the causal language model where there are both heads."""
        name = ARCHITECTURES[self.model_type]
        if self.heads != SCORE_HEAD:
            return name
        # Gemma3ForSequenceClassification is of the model of vision and language.
        name = name.replace("Gemma3", "Gemma3Text")
        return name.replace("CausalLM", "SequenceClassification")

    @property
    def eos_token_id(self):
        """The end-of-sequence ids as config.json writes them: null, one int, or a list."""
        return self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None


_layers_of = functools.lru_cache(layers_of)


def _token_ids(raw, source):
    """eos_token_id, an int, a list of ints or null, as a tuple."""
    ids = raw.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UserError(f"{source}: eos_token_id must be an int or a list of ints, got {raw['eos_token_id']!r}")
    return tuple(ids)


def _heads(raw, source):
    """The model's heads: from our key `heads` where there are two, else from its architecture."""
    if raw.get("heads") is not None:
        if raw["heads"] not in [list(heads) for heads in HEADS]:
            raise UserError(f"{source}: heads must be one of {[list(heads) for heads in HEADS]}, got {raw['heads']!r}")
        return tuple(raw["heads"])
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UserError(f"{source}: architectures must be a list of strings, got {architectures!r}")
    classifier = next((name for name in architectures if name.endswith("ForSequenceClassification")), None)
    if classifier is None:
        return LM_HEAD
    labels = raw.get("id2label")
    # transformers writes id2label unless there are two labels.
    num_labels = len(labels) if isinstance(labels, dict) else count(raw, "num_labels", source, 2)
    if num_labels != 1:
        raise UserError(f"{source}: {classifier} with {num_labels} labels is not supported (num_labels must be 1)")
    return SCORE_HEAD


def _text_config(raw, source):
    """The keys of the text model: raw itself, or its text_config where it is one of vision and language."""
    outer = raw.get("model_type")
    if not isinstance(outer, str) or outer not in WITH_TEXT_CONFIG:
        return raw
    inner = raw.get("text_config")
    if not isinstance(inner, dict):
        raise UserError(f"{source}: a {outer} model needs text_config, an object, got {inner!r}")
    of_both = {key: raw[key] for key in OF_BOTH if raw.get(key) is not None}
    inner = {key: value for key, value in inner.items() if value is not None or key not in OF_BOTH}
    return {**of_both, "model_type": WITH_TEXT_CONFIG[outer], **inner}


def _hybrid_fields(raw, source):
    """The fields of ModelConfig that a model with linear attention has beside the others: dict."""
    layers = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    if kinds is None:
        interval = count(raw, "full_attention_interval", source)
        kinds = [LAYER_TYPES[0] if (i + 1) % interval == 0 else LAYER_TYPES[1] for i in range(layers)]
    if len(kinds) != layers:
        raise UserError(f"{source}: layer_types must have num_hidden_layers {layers} entries, got {len(kinds)}")
    sizes = {name: count(raw, name, source) for name in LINEAR_SIZES}
    key_heads, value_heads = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if value_heads % key_heads:
        raise UserError(
            f"{source}: linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    for name in LINEAR_SIZES[2:]:
        if sizes[name] > MAX_HEAD_DIM:
            raise UserError(f"{source}: {name} must be at most {MAX_HEAD_DIM}, got {sizes[name]}")
    taps = count(raw, "linear_conv_kernel_dim", source)
    if taps != TAPS:
        raise UserError(f"{source}: linear_conv_kernel_dim {taps} is not supported (supported: {TAPS})")
    for key, wanted in (("attn_output_gate", True), ("attention_bias", False)):
        if get(raw, key, bool, source, wanted) is not wanted:
            raise UserError(f"{source}: {key} {raw[key]} is not supported in a {raw['model_type']} model")
    return {"norm_offset": True, "attn_output_gate": True, "layer_types": tuple(kinds), **sizes}


def _refuse_unsupported(raw, model_type, source):
    activation = get(raw, "hidden_act", str, source, "silu")
    if activation != "silu" and model_type != "gemma3_text":
        raise UserError(f"{source}: hidden_act {activation!r} is not supported (supported: silu)")
    if raw.get("quantization_config") is not None:
        check_config(raw["quantization_config"], source)
    if not get(raw, "is_causal", bool, source, True):
        raise UserError(
            f"{source}: is_causal False is not supported (attention to later tokens, as of embedding models)"
        )
    if raw.get("per_layer_config"):
        raise UserError(f"{source}: per_layer_config is not supported (layers that differ from the others)")
    for key in ("n_routed_experts",) if model_type in MIXTURES else (*NUM_EXPERTS, "n_routed_experts"):
        if raw.get(key):
            raise UserError(f"{source}: {key} {raw[key]} is not supported (mixture of experts)")
    kinds = [] if raw.get("layer_types") is None else raw["layer_types"]
    if not isinstance(kinds, list):
        raise UserError(f"{source}: layer_types must be a list, got {kinds!r}")
    supported = LAYER_TYPES_OF.get(model_type, LAYER_TYPES[:1])
    other = {str(kind) for kind in kinds if kind not in supported}
    if other:
        only = " and ".join(supported)
        raise UserError(f"{source}: layer_types {', '.join(sorted(other))} is not supported ({only} only)")
    if model_type == "gemma3_text":
        return
    if model_type == "llama":
        slides = raw.get("sliding_window") is not None
    else:
        # Qwen layers below max_window_layers attend to everything; released checkpoints carry an unused window.
        slides = get(raw, "use_sliding_window", bool, source, False) and raw.get("sliding_window", 4096) is not None
        # A mixture slides in every layer, whatever max_window_layers says.
        slides = slides and (model_type == "qwen3_moe" or not raw.get("layer_types"))
        full = 0 if model_type == "qwen3_moe" else get(raw, "max_window_layers", int, source, 28)
        slides = slides and full < count(raw, "num_hidden_layers", source)
    if slides:
        raise UserError(f"{source}: sliding_window {raw.get('sliding_window', 4096)} is not supported")
