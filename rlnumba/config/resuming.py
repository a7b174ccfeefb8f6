"""The keys that may change where a run goes on (`--resume`), and what a change then does.

A key that is not listed here must be what it was: a new key, too, until it is known what a change of it means.
"""

from rlnumba.config.keys import keys_of, sections_of
from rlnumba.config.runs import RUNS

SAME, CONTENT, NEXT, FREE = "same", "content", "next", "free"

# The effect of a change, for the page of the keys.
RULES = {
    FREE: "No effect on the weights.",
    NEXT: "Acts from the next optimizer step on. A batch of another size goes on with the first row of the epoch that "
    "was not trained on; the schedule of the learning rate is the new one.",
    CONTENT: "What is read or made counts, not its name. Another model, critic, teacher, adapter or tokenizer is "
    "refused. Other training rows begin a new epoch at the next step, in which all of them come; what is known of a "
    "prompt that is still there (solved, mean reward) stays.",
    SAME: "Refused with the old and the new value.",
}

# Sections in which one rule holds for all keys that are not listed below.
SECTIONS = {
    "data": CONTENT, "rewards": NEXT, "async": NEXT, "tools": NEXT, "environment": NEXT, "rollout": NEXT,
    "eval": FREE, "engine": FREE, "deploy": FREE,
}  # fmt: skip

KEYS = {
    FREE: """
        output_dir data.eval data.eval_split data.eval_gym data.eval_verifiers
        train.save_steps train.save_total_limit train.save_only_model train.save_strategy train.eval_steps
        train.eval_strategy train.eval_on_start train.logging_steps train.logging_strategy train.log_completions
        train.log_completions_tokens train.num_completions_to_print train.log_token_values train.report_to
        train.run_name train.project
        train.cuda_graphs train.gradient_checkpointing train.activation_memory train.recompute_modules
        train.recompute_num_layers train.offload_optimizer train.padding_free train.precompute_ref_batch_size
        teacher.url teacher.urls teacher.timeout_s
    """,
    NEXT: """
        engine.max_model_len engine.quantization
        train.learning_rate train.lr_scheduler_type train.warmup_steps train.weight_decay train.adam_beta1
        train.adam_beta2 train.adam_epsilon train.max_grad_norm train.max_steps train.num_train_epochs
        train.per_device_train_batch_size train.gradient_accumulation_steps train.global_batch_size
        train.max_tokens_per_micro_batch train.generation_batch_size train.steps_per_generation train.num_generations
        train.num_iterations train.num_ppo_epochs train.num_mini_batches
        train.callbacks train.load_best_model_at_end train.metric_for_best_model train.greater_is_better
        train.early_stopping_patience train.early_stopping_threshold
        train.temperature train.top_p train.top_k train.min_p train.repetition_penalty train.generation_kwargs
        train.max_completion_length train.max_tool_calling_iterations train.sampling_mask_replay
        train.router_replay train.share_prefixes
        train.vllm_structured_outputs_regex
        train.mask_truncated_completions
        train.difficulty_weights train.no_resampling_pass_rate train.dynamic_sampling train.max_gen_batches
        train.over_sampling_batch_size train.replay_buffer_size
        train.router_aux_loss_coef
        train.lmbda train.loss_top_k train.loss_top_k_of train.loss_add_tail train.loss_type train.loss_weights
        train.importance_sampling_level train.epsilon train.epsilon_high train.delta
        train.beta train.use_bias_correction_kl train.sapo_temperature_pos train.sapo_temperature_neg
        train.vespo_k_pos train.vespo_lambda_pos train.vespo_k_neg train.vespo_lambda_neg train.dppo_mask_high
        train.dppo_mask_low train.dppo_kl_coef train.dro_beta train.vllm_importance_sampling_correction
        train.vllm_importance_sampling_mode train.vllm_importance_sampling_clip_max
        train.vllm_importance_sampling_clip_min train.rollout_is train.rollout_is_threshold
        train.rollout_is_batch_normalize train.rollout_rs train.rollout_rs_threshold train.bypass_mode
        train.off_policy_mask_threshold train.scale_rewards train.advantage_estimator train.length_penalty
        train.step_advantage_w train.gigpo_gamma train.gigpo_mode
        train.hgpo_history_length train.hgpo_alpha train.hgpo_base_group
        train.multi_objective_aggregation train.observation_coef train.entropy_coef
        train.use_adaptive_entropy train.entropy_coef_min
        train.entropy_coef_max train.entropy_coef_delta train.entropy_target train.top_entropy_quantile
        train.normalize_advantages train.reward_clip_range train.kl_coef train.kl_estimator train.cliprange
        train.cliprange_value train.vf_coef train.gamma train.lam train.whiten_rewards train.missing_eos_penalty
        train.use_score_scaling train.use_score_norm train.score_clip critic.learning_rate
        train.label_smoothing train.f_divergence_type train.f_alpha_divergence_coef train.ld_alpha train.use_weighting
        train.discopop_tau train.desirable_weight train.undesirable_weight train.center_rewards_coefficient
        teacher.teacher_tau teacher.adv_tau
        train.ref_model_mixup_alpha train.ref_model_sync_steps train.precompute_ref_log_probs
    """,
    CONTENT: """
        model critic.model teacher.model teacher.models lora.init lora.r lora.lora_alpha lora.use_rslora
        train.max_length train.packing train.packing_strategy train.completion_only_loss train.assistant_only_loss
        train.truncation_mode
    """,
    SAME: "data.curriculum_column train.seq_kd",
}
_RULES = {name: rule for rule, names in KEYS.items() for name in names.split()}


def rule_of(name):
    """The rule of a key, "train.learning_rate" or "seed": one of RULES."""
    section, _, _ = name.rpartition(".")
    return _RULES.get(name) or SECTIONS.get(section, SAME)


def keys_by_rule():
    """{rule: names of the keys that have it}, of all trainers, in the order of their declaration."""
    found = {rule: [] for rule in RULES}
    for run_class in RUNS.values():
        for section, section_class in sections_of(run_class).items():
            for name in keys_of(section_class):
                full = f"{section}.{name}" if section else name
                if full not in found[rule_of(full)]:
                    found[rule_of(full)].append(full)
    return found
