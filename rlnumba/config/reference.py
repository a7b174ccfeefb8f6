"""Keys of a reference model that follows the policy."""

from dataclasses import dataclass

from rlnumba.config.keys import key
from rlnumba.config.schema import ReferenceMove, TrainConfig


@dataclass(frozen=True)
class ReferenceConfig(TrainConfig):
    """[train] of a trainer with a reference model that may move."""

    sync_ref_model: bool = key(False, "Move the reference model towards the policy now and then (arXiv 2404.09656).")
    ref_model_mixup_alpha: float = key(
        0.6, "Share of the policy in each such move.", minimum=0, maximum=1, needs="train.sync_ref_model"
    )
    ref_model_sync_steps: int = key(
        512, "Optimizer steps between two such moves.", minimum=1, needs="train.sync_ref_model"
    )

    @property
    def reference_move(self):
        """The ReferenceMove with sync_ref_model, else None."""
        return ReferenceMove(self.ref_model_mixup_alpha, self.ref_model_sync_steps) if self.sync_ref_model else None
