"""Keys of transformers' TrainingArguments and TRL's configurations that are no keys here, so that their files run.

A key is translated to one of ours, or accepted with a warning that says why it has no effect. Sources: transformers
5.23, TRL 1.16.
"""

import functools
import sys
from dataclasses import fields

ENGINE = "rlnumba generates with an engine of its own"
DISTRIBUTED = "the section [deploy] says what a run is spread over"
LOADER = "rows are in memory, and no process loads them"
HUB = "nothing is uploaded; final/ is a folder that huggingface_hub can upload"
NUMBA = "every kernel is compiled by Numba"
CONSOLE = "the console shows one line a step, or every logging_steps"
MODEL = "models are read by rlnumba itself, from safetensors"
RECOMPUTES = "there is one way to recompute layers; activation_memory says how much of them is kept"
LOG_FOLDER = "everything is written into output_dir, TensorBoard's files too"
LOGGING = "metrics.jsonl has every step, and the console a line every logging_steps"
DELAY = "eval_steps and eval_strategy say when a run evaluates, and eval_on_start whether it begins with that"
ALWAYS = "it is so in every run"
DATA = "the columns of the data are found by their names, see [data]"

# Key of [train] -> why it has no effect.
WITHOUT_EFFECT = {
    name: reason
    for reason, names in {
        ENGINE: "use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
        "vllm_group_port vllm_tensor_parallel_size vllm_enable_sleep_mode vllm_model_impl use_transformers_paged "
        "use_transformers_continuous_batching transformers_continuous_batching_config cache_implementation use_cache",
        DISTRIBUTED: "deepspeed fsdp fsdp_config ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_timeout "
        "ddp_find_unused_parameters ddp_static_graph local_rank accelerator_config parallelism_config "
        "average_tokens_across_devices ds3_gather_for_generation log_on_each_node save_on_each_node",
        LOADER: "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order dataset_num_proc remove_unused_columns "
        "length_column_name eval_accumulation_steps eval_use_gather_object batch_eval_metrics eval_do_concat_batches",
        HUB: "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision "
        "log_completions_hub_repo trackio_space_id trackio_bucket_id trackio_static_space_id",
        NUMBA: "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config tf32 "
        "torch_empty_cache_steps enable_jit_checkpoint",
        CONSOLE: "disable_tqdm log_level log_level_replica logging_first_step logging_nan_inf_filter "
        "include_num_input_tokens_seen skip_memory_metrics debug log_multimodal",
        MODEL: "trust_remote_code cast_lm_head_to_fp32 disable_dropout",
        RECOMPUTES: "gradient_checkpointing_kwargs",
        LOGGING: "logging_strategy",
        LOG_FOLDER: "logging_dir",
        DELAY: "eval_delay",
        ALWAYS: "full_determinism do_train do_eval do_predict restore_callback_states_from_checkpoint",
        DATA: "dataset_text_field dataset_kwargs label_names include_for_metrics prediction_loss_only",
    }.items()
    for name in names.split()
}
# Values of a key that ask for nothing: it is switched off. No warning then, nor for those that ask for what is so.
OFF = (False, None, "", 0, "none", "None", [], {}, -1, "passive", "false")
AS_HERE = {"logging_strategy": ("steps",), "hub_strategy": ("every_save",)}
SIXTEEN_BITS = {"bf16": "bfloat16", "bf16_full_eval": "bfloat16", "fp16": "float16", "fp16_full_eval": "float16"}
# Keys that `translated` takes.
ACCEPTED = frozenset((*WITHOUT_EFFECT, *SIXTEEN_BITS, "warmup_ratio", "use_cpu", "model_init_kwargs"))


def always():
    """has_16_bits where it does not matter."""
    return True


def translated(name, value, known, has_16_bits=always):
    """The meaning here of a key of [train] that is none of `known`: (name, value), or None if it is accepted.

    Prints a warning for one that is accepted and asks for something. has_16_bits: returns whether the device computes
    in them. Raises KeyError for a key that means nothing here.
    """
    if name in known:
        return name, value
    on = value is True or str(value).lower() == "true"
    if name in SIXTEEN_BITS:
        if on and not has_16_bits():
            return warn(name, "the cpu device computes in float32")
        return ("dtype", SIXTEEN_BITS[name]) if on and not name.endswith("eval") else None
    if name == "warmup_ratio":
        return ("warmup_steps", value) if str(value) not in ("0", "0.0") else None
    if name == "use_cpu":
        return warn(name, "the option --device cpu chooses the device") if on else None
    if name == "model_init_kwargs" and isinstance(value, dict | None):
        return _model_init(value, has_16_bits)
    if name in WITHOUT_EFFECT:
        return warn(name, WITHOUT_EFFECT[name]) if value not in (*OFF, *AS_HERE.get(name, ())) else None
    raise KeyError(name)


def _model_init(value, has_16_bits):
    """The meaning here of the table model_init_kwargs: its dtype, as a pair or None."""
    options = dict(value or {})
    dtype = str(options.pop("dtype", options.pop("torch_dtype", None))).removeprefix("torch.")
    if options:
        warn("model_init_kwargs", f"of {', '.join(options)}, {MODEL}")
    if dtype in ("None", "auto") or (dtype != "float32" and not has_16_bits()):
        return None
    return "dtype", dtype


def warn(name, reason):
    """Print that a key has no effect."""
    print(f"rlnumba: warning: train.{name} has no effect: {reason}", file=sys.stderr, flush=True)


def take_trl_keys(config_class, has_16_bits=always, elsewhere=()):
    """Let a dataclass of [train] be made as in TRL's scripts, and changed by `config.key = value`.

    The constructor also takes the keys that `translated` knows. elsewhere: as refuse_unknown takes it. A key that is
    assigned to is checked with all others as the constructor checks them.
    """
    init, known = config_class.__init__, config_class.__dataclass_fields__

    @functools.wraps(init)
    def __init__(self, *args, **keys):
        pairs = [translated(name, value, known, has_16_bits) for name, value in keys.items()]
        init(self, *args, **dict(pair for pair in pairs if pair is not None))

    def __setattr__(self, name, value):
        changed = config_class.__new__(config_class, **{name: value})
        pair = translated(name, value, known, has_16_bits)
        changed.__init__(**{f.name: getattr(self, f.name) for f in fields(self)} | dict([pair] if pair else []))
        vars(self).update(vars(changed))

    config_class.__init__, config_class.__setattr__ = __init__, __setattr__
    config_class.accepted, config_class.elsewhere = ACCEPTED, dict(elsewhere)
