"""The sections and keys that the runs of all trainers share, as frozen dataclasses.

Key names and defaults are TRL's for [train] and vLLM's for [engine], unless a key's line says otherwise. The [train]
section of a trainer and its Run are in the module of its name; docs/make_configuration.py writes
docs/configuration.md from them.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from rlnumba.config.data import DataConfig
from rlnumba.config.keys import REQUIRED, KeyCondition, Section, and_list, check_keys, check_owners, key
from rlnumba.config.lora import LoraConfig, QuantizationConfig
from rlnumba.config.sections.deploy import DeployConfig
from rlnumba.errors import ConfigError, MissingKey


@dataclass(frozen=True)
class EvalConfig(Section):
    """Keys of how held-out prompts are completed and counted. A key that is None is as in training."""

    section = "eval"
    num_generations: int = key(1, "Completions of each held-out prompt.", minimum=1, needs="data.eval")
    temperature: float | None = key(
        None, "Divides the logits; 0 is greedy; None: train.temperature.", minimum=0, needs="data.eval"
    )
    top_p: float | None = key(None, "None: train.top_p.", above=0, maximum=1, needs="data.eval")
    top_k: int | None = key(None, "None: train.top_k; 0 is off.", minimum=-1, needs="data.eval")
    max_completion_length: int | None = key(
        None, "Most tokens; None: train.max_completion_length.", minimum=1, needs="data.eval"
    )
    pass_threshold: float = key(
        1.0, "A completion passes if its value is at least this: for avg@k and pass@k.", needs="data.eval"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.temperature == 0 and self.num_generations > 1:
            raise ConfigError(
                f"eval.num_generations ({self.num_generations}) completions at temperature 0 are all the same"
            )


DRAFTS = ("engine.speculative_method", ("auto", "ngram"))


@dataclass(frozen=True)
class EngineConfig(Section):
    """The inference engine, with vLLM's names."""

    section = "engine"
    max_num_seqs: int = key(256, "Most sequences in one step.", minimum=1)
    max_num_batched_tokens: int = key(8192, "Most tokens in one step; longer prompts are split.", minimum=1)
    gpu_memory_utilization: float = key(
        0.3, "Share of the GPU's memory for weights, activations and KV cache; `generate`: 0.9.", above=0, maximum=1
    )
    max_model_len: int | None = key(None, "Longest prompt + completion; None: the model's longest sequence.", minimum=2)
    enforce_eager: bool = key(False, "Never run steps as CUDA graphs, but launch their kernels one by one.")
    async_scheduling: bool = key(True, "Launch decode steps before the results of the one before them are read.")
    speculative_method: str = key(
        "auto",
        "Drafts of coming tokens, verified several at once; the text stays the same, bit for bit. `ngram`: what "
        "followed the last tokens in the prompt or a completion of it; `auto`: that, on a GPU, while it is measured to "
        "be faster than decode; `none`. docs/speculation.md.",
        choices=("auto", "ngram", "none"),
    )
    num_speculative_tokens: int = key(7, "Most drafts of a sequence in a step.", minimum=1, maximum=31, needs=DRAFTS)
    prompt_lookup_max: int = key(4, "Tokens of the longest n-gram that is looked up.", minimum=1, needs=DRAFTS)
    prompt_lookup_min: int = key(2, "Tokens of the shortest one.", minimum=1, needs=DRAFTS)
    enable_prefix_caching: bool = key(True, "Reuse the KV blocks of equal prompt prefixes.")
    max_logprobs: int = key(20, "Most tokens that `logprobs` of a request may list; -1: all.", minimum=-1)
    logprobs_mode: str = key(
        "processed_logprobs",
        "Log-probs listed: `processed_logprobs`, of the distribution sampled from; `raw_logprobs`, of the model's own "
        "logits.",
        choices=("processed_logprobs", "raw_logprobs"),
        words={"processed": "processed_logprobs", "raw": "raw_logprobs"},
    )
    enable_return_routed_experts: bool = key(False, "Completions have the experts of each token, in mixtures of them.")
    quantization: str | None = key(
        None,
        "Completions are drawn by copies of the linear layers in 8 bits, `fp8` or `int8`, made at each update of the "
        "weights; training then computes log-probs of its own (docs/quantization.md). None: by the weights.",
        choices=("fp8", "int8"),
    )
    num_gpu_blocks_override: int | None = key(None, "KV blocks of 16 tokens; None: as many as fit.", minimum=1)
    enable_sleep_mode: bool | None = key(
        None,
        "Free the memory of KV cache and engine while the model trains: true, all of it; false, nothing; None: as "
        "much as training needs.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"engine.prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}"
            )


RECOMPUTE_MODULES = ("norm", "rope", "swiglu")
TRACKERS = ("tensorboard", "wandb", "trackio")
NAMED_RUNS = ("train.report_to", ("wandb", "trackio"))
AT_STEPS = KeyCondition(("train.eval_strategy",), "steps or no value", (None, "steps").__contains__)
OF_THE_BEST = KeyCondition(("train.load_best_model_at_end", "train.early_stopping_patience"), "a value", bool)


class ReferenceMove(NamedTuple):
    """A reference model takes on a share of the policy every so many optimizer steps."""

    share: float
    steps: int


@dataclass(frozen=True)
class TrainConfig(Section):
    """Keys that all trainers share: TRL's names, with the defaults of TRL and transformers' TrainingArguments."""

    section = "train"
    # The grammar of what a trainer draws: none.
    structured_outputs = {}
    # Where no micro-batch has shared prefixes once: a key of those that may.
    share_prefixes = "never"

    learning_rate: float = key(2e-5, "Highest learning rate of AdamW.", minimum=0)
    lr_scheduler_type: str = key(
        "linear",
        "After the warm-up: `linear` or `cosine` fall to 0, `constant`, also `constant_with_warmup`, stays.",
        choices=("constant", "constant_with_warmup", "linear", "cosine"),
    )
    warmup_steps: float = key(0.0, "Steps in which the rate rises from 0; below 1: a share of all steps.", minimum=0)
    weight_decay: float = key(0.0, "Decoupled weight decay; biases and norms do not decay.", minimum=0)
    adam_beta1: float = key(0.9, "Decay of AdamW's first moment.", minimum=0, below=1)
    adam_beta2: float = key(0.999, "Decay of AdamW's second moment.", minimum=0, below=1)
    adam_epsilon: float = key(1e-8, "Added to the root of the second moment.", above=0)
    optim: str = key(
        "adamw_torch",
        "AdamW, its moments float32; `adamw_bf16` (not TRL's): bfloat16, rounded stochastically; `adamw_8bit`: 8 bits "
        "in blocks of 256 (arXiv 2110.02861). Accepted, too: `adamw_torch_fused`, `adamw`, `adamw_bnb_8bit`.",
        choices=("adamw_torch", "adamw_bf16", "adamw_8bit"),
        words={"adamw_torch_fused": "adamw_torch", "adamw": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit"},
    )
    master_weights: bool = key(True, "16-bit weights have a float32 master; false: bfloat16, rounded stochastically.")
    offload_optimizer: bool = key(False, "Keep moments and master in pinned host memory, streamed in each step.")
    optimizer_in_backward: bool = key(
        False,
        "Update a layer as soon as the backward has its gradients, which are of the model's dtype and only one layer's "
        "at a time (torchtune). Needs max_grad_norm 0 and one backward pass in a step (gradient_accumulation_steps 1); "
        "where a gradient is not finite, that part of the model and those after it in the backward are not updated.",
    )
    max_grad_norm: float = key(1.0, "Largest global norm of the gradient, which is clipped to it; 0: none.", minimum=0)
    per_device_train_batch_size: int = key(8, "Sequences (or packs) in one forward and backward pass.", minimum=1)
    gradient_accumulation_steps: int = key(1, "Forward and backward passes in one optimizer step.", minimum=1)
    global_batch_size: int | None = key(
        None,
        "Rows (pairs, completions) of an optimizer step on all GPUs together, instead of gradient_accumulation_steps: "
        "the run then ends in the same weights on any number of them (deploy.num_train_gpus). Not TRL.",
        minimum=1,
    )
    cuda_graphs: bool = key(
        True,
        "Run micro-batches that the GPU computes sooner than the host launches their kernels, of up to 8,192 tokens "
        "of a 0.6B model, as CUDA graphs (docs/training-graphs.md); false: launch the kernels one by one, with the "
        "same results. Not TRL.",
    )
    max_steps: int = key(-1, "Optimizer steps of the run; -1: as many as num_train_epochs make.", minimum=-1)
    num_train_epochs: float = key(3.0, "Passes over the data when max_steps is -1.", above=0)
    dtype: str | None = key(
        None,
        "Of weights and activations; 16-bit ones have a float32 master. None: the checkpoint's on a GPU, else float32.",
        choices=("float32", "bfloat16", "float16"),
    )
    gradient_checkpointing: bool | None = key(
        None,
        "With activation_memory `auto`: true is `minimal`, which keeps only the inputs of layers and recomputes: less "
        "memory, more time; false is `full`; None: chosen by free memory. TRL: true.",
    )
    activation_memory: str = key(
        "auto",
        "What the backward finds: `full`: everything; `selective`: all but recompute_modules, which are cheap to "
        "recompute; `minimal`: layers' inputs. `auto`: what recomputes least of what fits the free memory of the GPU, "
        "by the plan; of `full` and `selective` with any recompute_num_layers; `full` on the cpu device. The results "
        "are the same.",
        choices=("auto", "full", "selective", "minimal"),
    )
    recompute_modules: list[str] = key(
        list(RECOMPUTE_MODULES),
        "What `selective` recomputes, and `auto` may (Megatron): `norm`: outputs of a layer's norms; `rope`: normed "
        "and rotated q and k, and v; `swiglu`: the input of the last projection. docs/memory.md has bytes and times.",
        choices=RECOMPUTE_MODULES,
        single=True,
    )
    recompute_num_layers: int = key(
        0, "With `selective`: of so many layers, the first, keep only the input, too; `auto` chooses it.", minimum=0
    )
    shuffle_dataset: bool = key(True, "A new order of the rows every epoch, drawn from the seed; false: the file's.")
    logging_steps: int = key(10, "Steps between lines on the console; metrics.jsonl has every step.", minimum=1)
    save_strategy: str = key(
        "steps",
        "Checkpoints every save_steps steps, or at the end of each epoch, and after the last step; `no`: none at all, "
        "also none to resume from. `final/` is written in any case.",
        choices=("no", "steps", "epoch"),
    )
    save_steps: int = key(500, "Steps between two checkpoints.", minimum=1)
    save_total_limit: int | None = key(None, "Checkpoints kept, the newest; None: all.", minimum=1)
    save_only_model: bool = key(False, "Checkpoints hold the model alone, without the state that --resume needs.")
    eval_strategy: str | None = key(
        None,
        "Evaluations on `data.eval` every eval_steps steps, or at the end of each epoch, and after the last step; "
        "`steps` without eval_steps: every logging_steps; `no`: none. None: `steps` with eval_steps, else the last.",
        choices=("no", "steps", "epoch"),
    )
    eval_steps: int | None = key(
        None, "Steps between evaluations on `data.eval`; None: only at the end.", minimum=1,
        needs=["data.eval", AT_STEPS],
    )  # fmt: skip
    report_to: list[str] = key(
        ["auto"],
        "Where metrics go besides metrics.jsonl: `tensorboard`, `wandb`, `trackio`, a list of them, `all` or `none`; "
        "`auto` is TensorBoard where it is installed.",
        words={"none": [], "all": list(TRACKERS), **{name: [name] for name in ("auto", *TRACKERS)}},
        single=True,
    )
    run_name: str | None = key(
        None, "Name of the run in wandb and trackio; None: that of output_dir.", needs=NAMED_RUNS
    )
    project: str | None = key(None, "Project there; None: WANDB_PROJECT, else `rlnumba`.", needs=NAMED_RUNS)
    callbacks: list[str] = key([], "Classes with TrainerCallback's methods: `file.py:Class`, `package.module:Class`.")
    load_best_model_at_end: bool = key(False, "`final/` is the best evaluated model, not the last; its step is saved.")
    metric_for_best_model: str | None = key(
        None, "A metric of the evaluation, `eval_` may be left out; None: the reward, or the loss where there is none.",
        needs=OF_THE_BEST,
    )  # fmt: skip
    greater_is_better: bool | None = key(
        None, "For that metric; None: false for names that end in `loss`.", needs=OF_THE_BEST
    )
    early_stopping_patience: int | None = key(
        None, "Stop after this many evaluations without a better metric; None: never.", minimum=1
    )
    early_stopping_threshold: float = key(
        0.0, "By how much it must become better to count.", minimum=0, needs="train.early_stopping_patience"
    )
    eval_on_start: bool = key(
        False, "Evaluate before the first step, too; in metrics.jsonl that is step 0.", needs="data.eval"
    )
    log_completions: bool = key(False, "Print completions on the console every logging_steps steps.", of="generates")
    num_completions_to_print: int | None = key(
        None, "Completions printed each time; None: all.", minimum=1, of="generates", needs="train.log_completions"
    )

    @property
    def kept_activations(self):
        """activation_memory, or what gradient_checkpointing stands for: "full", "selective" or "minimal"; "full" while
        nothing has been chosen."""
        if self.activation_memory != "auto":
            return self.activation_memory
        return "minimal" if self.gradient_checkpointing else "full"

    @property
    def chooses_activations(self):
        """Whether what the backward finds is to be chosen by the free memory: bool."""
        return self.activation_memory == "auto" and self.gradient_checkpointing is None

    @property
    def micro_batches_per_step(self):
        """Micro-batches of per_device_train_batch_size rows that make an optimizer step, on one GPU: int."""
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps
        return self.global_batch_size // self.per_device_train_batch_size

    @property
    def backward_passes(self):
        """Backward passes in an optimizer step: int."""
        return self.micro_batches_per_step

    @property
    def reference_move(self):
        """The ReferenceMove of a reference model that follows the policy, else None."""
        return None

    def on_ranks(self, num_ranks):
        """This section with the sizes of all ranks together in place of those of each, the same for one rank."""
        if num_ranks == 1 or self.global_batch_size is not None:
            return self
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps
        return replace(self, global_batch_size=num_ranks * rows, gradient_accumulation_steps=1)

    @property
    def accumulates_gradients(self):
        """Whether an optimizer step may have more than one backward pass: bool."""
        return self.backward_passes > 1

    def __post_init__(self):
        super().__post_init__()
        size, steps = self.per_device_train_batch_size, self.gradient_accumulation_steps
        if self.global_batch_size is not None and steps != 1:
            raise ConfigError(
                f"train.global_batch_size ({self.global_batch_size}) takes the place of "
                f"train.gradient_accumulation_steps, which must be 1, got {steps}"
            )
        if self.global_batch_size is not None and self.global_batch_size % size:
            raise ConfigError(
                f"train.global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"train.per_device_train_batch_size ({size})"
            )
        if self.optimizer_in_backward and (self.max_grad_norm or self.backward_passes != 1):
            raise ConfigError(
                f"train.optimizer_in_backward needs train.max_grad_norm = 0, got {self.max_grad_norm}, and one "
                f"backward pass in a step (train.gradient_accumulation_steps = 1), got {self.backward_passes}"
            )
        if self.recompute_num_layers and self.kept_activations != "selective":
            mode = "auto" if self.chooses_activations else self.kept_activations
            raise ConfigError(
                f"train.recompute_num_layers ({self.recompute_num_layers}) goes with train.activation_memory "
                f'"selective", got "{mode}"'
            )
        if self.dtype == "float16" and not self.master_weights:
            raise ConfigError("train.master_weights = false needs bfloat16 or float32 weights, got float16")
        names = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to)
        names = list(TRACKERS) if "all" in names else [name for name in names if name != "none"]
        for name in names:
            if name not in ("auto", *TRACKERS):
                raise ConfigError(f"train.report_to must be of {', '.join(TRACKERS)}, all and none, got {name!r}")
        object.__setattr__(self, "report_to", names)
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(self, name) and self.eval_strategy == "no":
                raise ConfigError(f'train.{name} needs evaluations, and train.eval_strategy is "no"')
        if self.load_best_model_at_end and self.save_strategy == "no":
            raise ConfigError('train.load_best_model_at_end keeps a checkpoint, and train.save_strategy is "no"')
        if self.max_steps == 0:
            raise ConfigError("train.max_steps must be -1 or at least 1, got 0")


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


@dataclass(frozen=True, kw_only=True)
class Run:
    """The keys above all sections, and the sections."""

    model: str = key(REQUIRED, "A Hugging Face folder, or a hub id.", nonempty=True)
    output_dir: str = key(
        "trainer_output", "Folder of the run: metrics, checkpoints, curves, the final model.", nonempty=True
    )
    seed: int = key(42, "Seed of everything random in the run.", minimum=0)
    gemm: str = key(
        "auto",
        "GEMM backend on a GPU: `native` (also `auto`, `numba`), with which rollout and training log-probs agree bit "
        "for bit, or `cublas`, with which they differ in their last bits.",
        choices=("auto", "native", "cublas", "numba"),
    )
    data: DataConfig
    train: TrainConfig = TrainConfig()
    lora: LoraConfig | None = None
    quantization: QuantizationConfig | None = None
    deploy: DeployConfig = DeployConfig()

    # Constants of each class: the trainer's name, a line of what it does, whether it trains on completions that it
    # draws itself, and may draw them ahead of training; whether its rows may be questions, of which prompts are made,
    # and may have a column of completions; whether a teacher's log-probs are part of its advantages, or its head is
    # compared with the model's. batch_size: the key that a file means by it, as (section, name).
    trainer, purpose, generates, generates_ahead = None, None, False, False
    # Whether its loss corrects for completions whose log-probs are not those of training.
    corrects_rollout = False
    has_questions, has_completions, learns_advantages, compares_heads = False, False, False, False
    batch_size = "train", "per_device_train_batch_size"
    # The Runs of all trainers, from config/runs.py.
    of_all_trainers = ()

    @classmethod
    def trainers_that(cls, constant):
        """The names of the trainers for whose Run a constant is true: list of str."""
        return [each.trainer for each in cls.of_all_trainers if getattr(each, constant)]

    @property
    def num_ranks(self):
        """Processes that train together, each with a GPU: int."""
        return self.deploy.num_train_gpus

    @property
    def generates_beside(self):
        """Whether completions are drawn while the model trains: bool."""
        return False

    @property
    def rollout_is_quantized(self):
        """Whether completions are drawn by copies of the weights in 8 bits: bool."""
        return False

    @property
    def teacher_draws(self):
        """Whether a teacher draws completions, in an engine of its own: bool."""
        return False

    def resolved(self):
        """This run as its loop, plan and kernel list read it; a resolved run's is itself.

        [train] has the sizes of all ranks together, so that nothing in it depends on their number, and the importance
        weights that completions of older weights need. runs/resolve.py does what the model and the device decide.
        """
        return replace(self, train=self.train.on_ranks(self.num_ranks))

    def __post_init__(self):
        check_keys(self, "")
        if self.data.train is None:
            self._check_without_rows()
        if self.train.eval_strategy in ("steps", "epoch") and self.data.eval is None:
            raise ConfigError(
                f'train.eval_strategy "{self.train.eval_strategy}" needs data.eval, the rows to evaluate on'
            )
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(self.train, name) and self.data.eval is None:
                raise ConfigError(f"train.{name} needs data.eval: without it nothing is evaluated")
        if self.train.optimizer_in_backward and self.num_ranks > 1:
            self.refuse_ranks("train.optimizer_in_backward")
        if self.deploy.tensor_parallel_size != 1 and self.gemm == "cublas":
            raise ConfigError(
                f"deploy.tensor_parallel_size ({self.deploy.tensor_parallel_size or 'auto'}) needs gemm = native: a "
                "product by cublas depends on its columns"
            )
        if self.deploy.cuts_rollout:
            self._check_cut_rollout()
        if self.deploy.num_infer_gpus and not self.generates_beside:
            raise ConfigError(
                f"deploy.num_infer_gpus ({self.deploy.num_infer_gpus}) are for asynchronous training: they need the "
                f"section [async], which rlnumba {and_list(self.trainers_that('generates_ahead'))} have"
            )
        check_owners(self)

    def _check_without_rows(self):
        """Raise MissingKey where a run needs data.train, which is not set."""
        raise MissingKey("data.train")

    def _check_cut_rollout(self):
        """Raise ConfigError for copies of the weights, which ranks do not cut for their rollout."""
        if self.rollout_is_quantized:
            raise ConfigError(
                f"deploy.tensor_parallel_size ({self.deploy.tensor_parallel_size}) without deploy.num_infer_gpus cuts "
                "the weights that are trained: not with engine.quantization, which makes copies of them"
            )

    def refuse_ranks(self, key):
        """Raise ConfigError for a key whose value is for one GPU."""
        raise ConfigError(f"{key} is for one GPU, and deploy.num_train_gpus is {self.num_ranks}")
