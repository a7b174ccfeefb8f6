"""The start of a trainer: the model of its run, or of the checkpoint that it resumes from, as a Policy."""

from functools import partial
from pathlib import Path

from rlnumba.engine.requests.grammars import GrammarReplay
from rlnumba.engine.requests.structured_outputs import StructuredOutputsParams
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.config import LM_HEAD
from rlnumba.model.config_values import read_json
from rlnumba.model.hub import find_model
from rlnumba.model.lora import adapter_of_run, is_adapter, load_adapter
from rlnumba.model.quantized.weights import weights_in
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.model.weights import Weights
from rlnumba.parallel.layer_shards import LayerShards, QuantizedLayerShards
from rlnumba.reporting.stderr import log
from rlnumba.runs.policy import Policy
from rlnumba.runs.run_folder import log_kernels


def load_policy(run, folder, reference=False, temperature=1.0, heads=LM_HEAD, head_init="zeros"):
    """(Policy, Tokenizer) of a run, the weights those of its RunFolder's checkpoint if there is one.

    With [lora], the policy is the run's `model` with an adapter, which alone is trained and saved.
    reference: whether the policy needs the log-probs of the run's `model` as it was before training; policy.reference
    is None otherwise. With [lora] it is the same model with the adapter switched off, and takes no memory.
    temperature: divides the logits. heads, head_init: load_model's, with the run's seed. Raises UserError for a
    folder that is damaged or does not fit.
    """
    source, train = find_model(run.model), run.train
    if is_adapter(source):
        raise UserError(f"{source}: an adapter folder, not a model's; set lora.init to it, or merge it (rlnumba merge)")
    if run.lora is None:
        path = _checkpoint(folder, False) or source
        kind = weights_of(run, folder.communicator)
        model = load_model(path, train.dtype, heads, head_init, run.seed, make_weights=kind)
    else:
        if reference and train.reference_move is not None:
            raise ConfigError("train.sync_ref_model: with [lora] the reference is the model without its adapter")
        kind = weights_of(run, folder.communicator)
        model = load_model(source, train.dtype, heads, head_init, run.seed, make_weights=kind)
        model.adapter = _adapter(run, folder, model.weights, source)
    log_kernels(model.dtype)
    _log_dropout(source)
    tokenizer = Tokenizer.from_folder(source)
    before = None
    if reference:
        # A reference that moves has, as the policy, the part that this rank writes into checkpoints.
        kind = weights_of(run, folder.communicator, is_trained=train.reference_move is not None)
        before = model.without_adapter() if run.lora else load_model(source, model.dtype.name, make_weights=kind)
    policy = Policy(model, train, before, temperature, run.seed, folder.communicator)
    policy.grammar = grammar_replay(train, tokenizer, model.config)
    policy.rollout_is_quantized = run.rollout_is_quantized
    return policy, tokenizer


def _log_dropout(folder):
    """Warn of a dropout in a model's config.json, which transformers would apply in training."""
    path = folder / "config.json"
    keys = read_json(path)
    if isinstance(keys.get("text_config"), dict):
        keys = keys["text_config"]
    if keys.get("attention_dropout"):
        log(f"warning: {path}: attention_dropout {keys['attention_dropout']} is not applied in training")


def grammar_replay(train, tokenizer, config):
    """The GrammarReplay of a [train] section, None without a grammar. config: ModelConfig."""
    if not (structured := train.structured_outputs):
        return None
    eos_token_ids = config.ending_at(tokenizer and tokenizer.eos_token_id).eos_token_ids
    return GrammarReplay(StructuredOutputsParams.of(structured), tokenizer, config.vocab_size, eos_token_ids)


def weights_of(run, communicator, is_trained=True):
    """The Weights to make of a run's policy, or of its reference, which is not trained, nor is the base of an adapter:
    those of layers in parts with deploy.zero_stage 3, on several ranks, and those of a quantised base with
    [quantization], which may be in parts, too."""
    if not _has_parts(run, communicator):
        return weights_in(run.quantization)
    if run.quantization is not None:
        return partial(QuantizedLayerShards, communicator=communicator, quantization=run.quantization)
    return partial(LayerShards, communicator=communicator, is_trained=is_trained and run.lora is None)


def weights_of_critic(run, communicator, is_trained=True):
    """The Weights to make of a critic's own model, which [lora] and [quantization] are not for. is_trained: False for
    the base of a critic that is an adapter."""
    if not _has_parts(run, communicator):
        return Weights
    return partial(LayerShards, communicator=communicator, is_trained=is_trained)


def _has_parts(run, communicator):
    """Whether layers are in parts."""
    return run.deploy.zero_stage == 3 and communicator is not None and communicator.world_size > 1


def _checkpoint(folder, has_adapter):
    """The folder of the checkpoint that is resumed from, or None; UserError if it is of a run with other [lora]."""
    path = folder.model_folder
    if path is not None and is_adapter(path) != has_adapter:
        saved, now = ("a run without [lora]", "has") if has_adapter else ("a run with [lora]", "has no")
        raise UserError(f"{path}: a checkpoint of {saved}, and this one {now} such section")
    return path


def _adapter(run, folder, weights, source):
    """The Adapter of the checkpoint, or the one that the run starts from."""
    # A local base is named by its whole path, so that the adapter is found from any folder.
    base = str(source.resolve()) if Path(run.model).expanduser().is_dir() else run.model
    dtype, path = weights.dtype.name, _checkpoint(folder, True)
    if path is None:
        return adapter_of_run(run.lora, weights, dtype, base, run.seed)
    adapter = load_adapter(path, weights, dtype, base)
    if run.lora.init is None and (adapter.lora.r, adapter.lora.scaling) != (run.lora.r, run.lora.scaling):
        has, wants = (f"r {each.r} and scale {each.scaling:g}" for each in (adapter.lora, run.lora))
        raise ConfigError(f"lora: the adapter in the checkpoint {path} has {has}, the configuration {wants}")
    return adapter
