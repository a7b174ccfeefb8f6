"""The constants of preference_loss_kernel, from the options of a loss."""

from typing import NamedTuple

# Loss types that compare a pair's log-probs with those of the other pairs of its batch.
SORTING = ("aot", "aot_unpaired")


class PreferenceTerms(NamedTuple):
    """The constants that preference_loss_kernel is compiled for: those options that its losses read.

    losses: ((loss type, weight), ...). divergence: "reverse_kl" for alpha_divergence at 1, too. ld_alpha: 1 if not set.
    """

    losses: tuple[tuple[str, float], ...]
    beta: float
    label_smoothing: float
    divergence: str
    divergence_coef: float
    ld_alpha: float
    use_weighting: bool
    discopop_tau: float


def preference_terms(config):
    """The PreferenceTerms of a PreferenceLossConfig."""
    names = config.loss_type
    divergence, coef = config.f_divergence_type, config.f_alpha_divergence_coef
    if divergence == "alpha_divergence" and abs(coef - 1.0) < 1e-6:
        divergence = "reverse_kl"
    return PreferenceTerms(
        losses=tuple(zip(names, config.loss_weights or [1.0] * len(names), strict=True)),
        beta=config.beta,
        label_smoothing=config.label_smoothing if {"robust", "exo_pair", *SORTING} & set(names) else 0.0,
        divergence=divergence,
        divergence_coef=coef if divergence == "alpha_divergence" else 0.0,
        ld_alpha=1.0 if config.ld_alpha is None else config.ld_alpha,
        use_weighting=config.use_weighting,
        discopop_tau=config.discopop_tau if "discopop" in names else 0.0,
    )
