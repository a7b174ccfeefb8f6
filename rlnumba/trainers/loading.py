"""What a trainer starts from: the model of its run, or of the checkpoint that it resumes from, as a Policy."""

from rlnumba.model.config import LM_HEAD
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import find_model, load_model
from rlnumba.trainers.core import Policy
from rlnumba.trainers.run_folder import log_kernels


def load_policy(run, folder, reference=False, temperature=1.0, heads=LM_HEAD, head_init="zeros"):
    """(Policy, Tokenizer) of a run, the weights those of its RunFolder's checkpoint if there is one.

    reference: whether the policy needs the log-probs of the run's `model` as it was before training; policy.reference
    is None otherwise. temperature: divides the logits. heads, head_init: as in load_model, with the run's seed. Raises
    UserError for a folder that is damaged or does not fit.
    """
    source = find_model(run.model)
    model = load_model(folder.model_folder or source, run.train.dtype, heads, head_init, run.seed)
    log_kernels(model.dtype)
    tokenizer = Tokenizer.from_folder(source)
    before = load_model(source, model.dtype.name) if reference else None
    return Policy(model, run.train, before, temperature), tokenizer
