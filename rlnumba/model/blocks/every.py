"""The list of blocks of each layer: the one place that says which kinds a model consists of."""

from rlnumba.model.blocks.attention import Attention
from rlnumba.model.blocks.experts import Experts, SharedExperts
from rlnumba.model.blocks.linear_attention import LinearAttention
from rlnumba.model.blocks.mlp import Mlp


def layers_of(config):
    """The blocks of each layer of a ModelConfig, in the order in which the residual stream goes through them: tuple."""
    mixers = {"full_attention": Attention, "sliding_attention": Attention, "linear_attention": LinearAttention}
    mixture, sparse = SharedExperts if config.shared_expert_intermediate_size else Experts, config.mixture_layers
    return tuple(
        (mixers[kind](layer), mixture(layer) if layer in sparse else Mlp(layer))
        for layer, kind in enumerate(config.layer_kinds)
    )
