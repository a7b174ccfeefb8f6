"""The key of trainers whose micro-batches may have once what their sequences begin with."""

from dataclasses import dataclass

from rlnumba.config.keys import Section, key


@dataclass(frozen=True)
class PrefixSharingConfig(Section):
    """The key of trainers whose micro-batches may have once what their sequences begin with."""

    section = "train"
    share_prefixes: str = key(
        "auto",
        "Compute what sequences of a micro-batch begin with, such as their prompt, once for all of them, forward and "
        "backward: whole blocks of 16 tokens, of 64 with linear attention, before the first one that is trained on "
        "(arXiv 2506.05433). Log-probs keep their bits. `auto`: without lora_dropout and routers' loss; on GPUs, with "
        "the sm90 kernels; linear attention in bfloat16. verl: use_prefix_grouper.",
        choices=("auto", "always", "never"),
        words={"true": "always", "false": "never"},
    )
