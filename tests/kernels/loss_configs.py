"""PolicyLossConfigs for tests: no correction unless one is asked for, and short names for its options."""

from rlnumba.config import PolicyLossConfig

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def loss_config(loss_type="dapo", importance_sampling_level="token", **options):
    """The PolicyLossConfig; importance_sampling_correction: one of CORRECTIONS or None, its bounds likewise."""
    mode = options.pop("importance_sampling_correction", None)
    correction = {"vllm_importance_sampling_correction": mode is not None}
    if mode is not None:
        correction["vllm_importance_sampling_mode"] = mode
    for name in ("importance_sampling_clip_min", "importance_sampling_clip_max"):
        if name in options:
            correction[f"vllm_{name}"] = options.pop(name)
    return PolicyLossConfig(loss_type, importance_sampling_level, **correction, **options)
