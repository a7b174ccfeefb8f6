"""Sections that trainers on the model's own completions share: how completions are drawn, and one generation."""

import difflib
import math
import typing
from dataclasses import dataclass, replace

from rlnumba.config.generation import GenerationPlan
from rlnumba.config.keys import and_list, key
from rlnumba.config.schema import EngineConfig, EvalConfig, ReferenceConfig, Run, TrainConfig
from rlnumba.config.sections.agents import ACTS, LOGS_TOKENS, EnvironmentConfig, RolloutConfig, ToolsConfig
from rlnumba.config.sections.asynchronous import AsyncConfig
from rlnumba.config.sections.rewards import RewardsConfig
from rlnumba.config.sections.teacher import TeacherConfig
from rlnumba.errors import ConfigError, MissingKey

# Parameters of sampling that have a key of their own in [train], and those that generation_kwargs alone has.
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GENERATION_KEYS = ("presence_penalty", "frequency_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
# Keys that generation_kwargs cannot change: the trainer sets them, or trains with them.
OWN_KEYS = {
    "temperature": "set train.temperature, which divides the logits in training, too",
    "max_tokens": "set train.max_completion_length",
    "max_new_tokens": "set train.max_completion_length",
    "n": "set train.num_generations",
    "seed": "set seed",
    "logprobs": "leave it out, every token has its log-prob",
    "structured_outputs": "it is a key of grpo and rloo, whose training follows the grammar",
    **dict.fromkeys(
        ("logit_bias", "allowed_token_ids", "bad_words"),
        "training computes log-probs of the model's own logits, so rollout and training would differ",
    ),
}


@dataclass(frozen=True)
class SamplingConfig(TrainConfig):
    """Keys of how completions are drawn."""

    # A trainer's own section has the property `generation`, the GenerationPlan of its runs.
    # Keys of generation_kwargs that the trainer has beside those of all.
    own_generation_keys: typing.ClassVar[tuple] = ()

    temperature: float = key(1.0, "Divides the logits, in sampling and in training alike.", above=0)
    top_p: float = key(1.0, "Sample from the likeliest tokens that hold this share; 1 is off.", above=0, maximum=1)
    top_k: int = key(0, "Sample from the k likeliest tokens; 0 and -1 are off.", minimum=-1)
    min_p: float | None = key(None, "Smallest probability, as a share of the largest's.", minimum=0, maximum=1)
    repetition_penalty: float = key(1.0, "Above 1: tokens seen so far become less likely; 1 is off.", above=0)
    generation_kwargs: dict[str, typing.Any] = key(
        {},
        "Further parameters of sampling, vLLM's names: presence_penalty, frequency_penalty, min_tokens, stop, "
        "stop_token_ids, ignore_eos, and top_p, top_k, min_p, repetition_penalty instead of the keys above.",
    )
    max_tokens_per_micro_batch: int | None = key(
        None,
        "Most tokens, prompts included, of a forward and backward pass: the optimizer batch is cut again in its order, "
        "with the same loss; one longer sequence is alone. None: per_device_train_batch_size completions.",
        minimum=1,
    )

    max_tool_calling_iterations: int | None = key(
        None, "Most turns of a completion whose calls are executed; 0: none, None: no bound.", minimum=0, needs=ACTS
    )
    log_completions_tokens: bool = key(
        True, "Lines of completions.jsonl have token ids, mask and log-probs; not TRL.", needs=LOGS_TOKENS
    )

    @property
    def structured_outputs(self):
        """The keys of StructuredOutputsParams with which completions are drawn: dict, {} without a grammar."""
        return self.generation_kwargs.get("structured_outputs") or {}

    @property
    def accumulates_gradients(self):
        """Whether an optimizer step may have more than one backward pass: bool."""
        return super().accumulates_gradients or self.max_tokens_per_micro_batch is not None

    def __post_init__(self):
        super().__post_init__()
        allowed = (*SAMPLING_KEYS[1:], *GENERATION_KEYS, *self.own_generation_keys)
        for name in self.generation_kwargs:
            if name not in allowed:
                nearest = difflib.get_close_matches(name, allowed, 1)
                hint = f"did you mean {nearest[0]}?" if nearest else f"they are {', '.join(allowed)}"
                raise ConfigError(f"train.generation_kwargs has no key {name}: {OWN_KEYS.get(name, hint)}")


@dataclass(frozen=True)
class GroupConfig(ReferenceConfig, SamplingConfig):
    """A generation of groups of completions, and the reference model; beta is a key of the trainer's own."""

    learning_rate: float = key(1e-6, "Highest learning rate of AdamW.", minimum=0)
    own_generation_keys: typing.ClassVar[tuple] = ("structured_outputs",)
    vllm_structured_outputs_regex: str | None = key(
        None,
        "Regex that every completion matches. The table generation_kwargs.structured_outputs has other grammars: json, "
        "choice, grammar, json_object. Training follows them: log-probs are over the tokens that they allow.",
    )
    num_generations: int = key(8, "Completions of each prompt, the group whose rewards are compared.", minimum=2)
    generation_batch_size: int | None = key(
        None,
        "Completions of one generation, on all GPUs; None: per_device_train_batch_size x steps_per_generation on each.",
        minimum=2,
    )
    steps_per_generation: int | None = key(
        None, "Passes per generation, on each GPU; None: those of an optimizer step.", minimum=1
    )
    sampling_mask_replay: bool = key(
        False,
        "With top_p, top_k or min_p, train the distribution that was sampled from: the tokens that the filters kept, "
        "renormalised. For generations that one optimizer step uses up; not in TRL.",
    )
    router_replay: bool = key(
        False,
        "Mixtures of experts: train with the experts that the sampler chose, where the weights have changed since (R3, "
        "arXiv 2510.11370); the router keeps its gradient.",
    )
    num_iterations: int = key(1, "Times that each generation is trained on (mu of DeepSeekMath).", minimum=1)
    mask_truncated_completions: bool = key(False, "Leave completions without an end token out of the loss (DAPO).")
    difficulty_weights: list[float] | None = key(
        None,
        "Weights of easy, normal and hard prompts (mean reward of the last group above 0.75, between, up to 0.25) with "
        "which the prompts of a generation are drawn; None: epochs. New prompts are normal (prime-rl's pools).",
    )
    no_resampling_pass_rate: float | None = key(
        None,
        "A prompt whose group has at least this mean reward is left out from then on (open-instruct); all come back "
        "where too few are left for a generation. None: none is left out.",
    )
    log_token_values: int = key(
        0,
        "Completions of each step whose tokens are written to tokens.jsonl, with log-probs, importance ratio, entropy "
        "and advantage, for `rlnumba watch`; -1: all.",
        minimum=-1,
    )

    @property
    def structured_outputs(self):
        regex, given = self.vllm_structured_outputs_regex, super().structured_outputs
        return given if regex is None else {"regex": regex}

    @property
    def reads_reference(self):
        """Whether the loss reads log-probs of a reference model: bool."""
        return self.beta > 0

    def on_ranks(self, num_ranks):
        """This section with the sizes of all ranks together, those of a generation, too; the same for one rank."""
        if num_ranks == 1 or self.steps_per_generation is None:
            return super().on_ranks(num_ranks)
        completions = num_ranks * self.per_device_train_batch_size * self.steps_per_generation
        kept = replace(self, steps_per_generation=None, generation_batch_size=completions)
        return TrainConfig.on_ranks(kept, num_ranks)

    @property
    def rollout_steps(self):
        """Passes of per_device_train_batch_size completions that one generation feeds: int."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self.per_device_train_batch_size
        return self.steps_per_generation or self.micro_batches_per_step

    @property
    def rollout_batch_size(self):
        """Completions of one generation: int."""
        return self.per_device_train_batch_size * self.rollout_steps

    @property
    def prompts_per_rollout(self):
        """Prompts of one generation, each with num_generations completions: int."""
        return self.rollout_batch_size // self.num_generations

    @property
    def generation(self):
        """The GenerationPlan."""
        return GenerationPlan(
            num_prompts=self.prompts_per_rollout,
            num_completions_each=self.num_generations,
            num_completions=self.rollout_batch_size,
            num_passes=self.rollout_steps,
            prompts_key="train.per_device_train_batch_size x steps_per_generation / num_generations",
            num_iterations=self.num_iterations,
            difficulty_weights=self.difficulty_weights,
            solved_at=self.no_resampling_pass_rate,
            replays_mask=self.sampling_mask_replay,
            replays_experts=self.router_replay,
        )

    def size_keys(self, num_ranks):
        """The keys that set the number of completions of a generation: str."""
        for name in ("generation_batch_size", "global_batch_size"):
            if getattr(self, name) is not None:
                return f"train.{name}"
        of_all = " x deploy.num_train_gpus" if num_ranks > 1 else ""
        return f"train.per_device_train_batch_size x steps_per_generation{of_all}"

    def __post_init__(self):
        super().__post_init__()
        weights = self.difficulty_weights
        if weights is not None and not (len(weights) == 3 and all(0 <= w < math.inf for w in weights) and any(weights)):
            raise ConfigError(
                f"train.difficulty_weights must be three weights, not negative and not all 0, of easy, normal and hard "
                f"prompts, got {weights}"
            )
        if self.vllm_structured_outputs_regex is not None and self.generation_kwargs.get("structured_outputs"):
            raise ConfigError(
                "train.vllm_structured_outputs_regex and train.generation_kwargs.structured_outputs cannot both be set"
            )
        if self.global_batch_size is not None and self.steps_per_generation is not None:
            raise ConfigError(
                f"train.steps_per_generation counts passes of each GPU: with train.global_batch_size "
                f"({self.global_batch_size}) set train.generation_batch_size"
            )
        if self.generation_batch_size is not None:
            if self.steps_per_generation is not None:
                raise ConfigError("train.generation_batch_size and train.steps_per_generation cannot both be set")
            if self.generation_batch_size % self.per_device_train_batch_size:
                raise ConfigError(
                    f"train.generation_batch_size ({self.generation_batch_size}) must be divisible by "
                    f"train.per_device_train_batch_size ({self.per_device_train_batch_size})"
                )
        if self.sampling_mask_replay and self.micro_batches_per_step % (self.rollout_steps * self.num_iterations):
            raise ConfigError(
                "train.sampling_mask_replay needs generations that one optimizer step uses up: steps_per_generation x "
                f"num_iterations ({self.rollout_steps * self.num_iterations}) must divide gradient_accumulation_steps "
                f"({self.micro_batches_per_step})"
            )
        if self.sync_ref_model and not self.beta:
            raise ConfigError("train.sync_ref_model needs train.beta above 0: without it there is no reference model")


@dataclass(frozen=True, kw_only=True)
class PromptRun(Run):
    """A file of a trainer on prompts and rewards."""

    generates = has_questions = True
    # Whether a completion may have several conversations, each of which is a sequence of its own.
    takes_branches = True
    # That of a trainer without this section. needs_rewards: whether one without a teacher trains on rewards.
    teacher, needs_rewards = TeacherConfig(), True

    rewards: RewardsConfig
    eval: EvalConfig = EvalConfig()
    train: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    tools: ToolsConfig = ToolsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()

    def _check_without_rows(self):
        """See Run: an environment makes prompts of its own, for as many steps as train.max_steps says."""
        if self.environment.factories:
            why = ": environment.factories takes the environment of each row from the column 'environment'"
            raise MissingKey("data.train", why)
        if self.environment.factory is None:
            super()._check_without_rows()
        if self.train.max_steps < 1:
            raise MissingKey("train.max_steps", ": without data.train there are no epochs that end the run")

    @property
    def given_limit(self):
        """Tokens to which the completions of the rows are cut that are trained on as they are: int, None where none
        is."""
        return None

    @property
    def has_episodes(self):
        """Whether a completion may have several turns, with tools, in an environment, of a task of verifiers or by
        rollout.func: bool."""
        return bool(self.tools.funcs or self.environment.specs or self.rollout.func or self.data.has_tasks)

    @property
    def rollout_is_quantized(self):
        """Whether completions are drawn by copies of the weights in 8 bits: bool."""
        return self.engine.quantization is not None

    @property
    def has_other_logprobs(self):
        """Whether completions may have other log-probs than by the weights that are trained on them: bool."""
        return self.is_stale or self.rollout.func is not None

    def _check_rollout(self, plan):
        """Raise ConfigError for what does not go with rollout.func. plan: GenerationPlan."""
        if self.tools.funcs or self.environment.specs or self.data.has_tasks:
            raise ConfigError(
                "rollout.func draws the completions: it takes the place of tools.funcs and of the environment"
            )
        if self.generates_beside:
            raise ConfigError("rollout.func is called between two optimizer steps: it does not go with [async]")
        if plan.replays_mask:
            raise ConfigError(
                "train.sampling_mask_replay replays the filters of the sampler, which rollout.func does not return"
            )
        if plan.has_greedy:
            raise ConfigError("train.advantage_estimator remax draws a greedy completion: not with rollout.func")

    def _check_served_teacher(self):
        """Raise ConfigError for what does not go with a teacher that a server has."""
        if self.train.temperature != 1:
            raise ConfigError(
                f"teacher.url: a server scores at temperature 1, and train.temperature is {self.train.temperature:g}"
            )
        if self.train.structured_outputs:
            raise ConfigError("teacher.url: a server scores without the grammar of train.structured_outputs")

    def _check_copies(self, plan):
        """Raise ConfigError for what does not go with engine.quantization. plan: GenerationPlan."""
        if not self.corrects_rollout:
            trainers = and_list(self.trainers_that("corrects_rollout"))
            raise ConfigError(
                f"engine.quantization is for {trainers}: the loss of {self.trainer} has no importance weights"
            )
        if self.quantization is not None:
            raise ConfigError(
                "engine.quantization does not go with [quantization]: rollout reads the quantised base as it is"
            )
        if plan.replays_mask:
            raise ConfigError(
                "train.sampling_mask_replay needs completions of the weights that are trained: not with "
                "engine.quantization"
            )

    def __post_init__(self):
        super().__post_init__()
        try:
            plan = self.train.on_ranks(self.num_ranks).generation
        except ConfigError as error:
            raise ConfigError(f"{error}; deploy.num_train_gpus is {self.num_ranks}") from error
        if plan.num_completions % plan.num_completions_each:
            raise ConfigError(
                f"{self.train.size_keys(self.num_ranks)} ({plan.num_completions}) must be divisible by "
                f"train.num_generations ({plan.num_completions_each})"
            )
        if self.data.train is None and (plan.difficulty_weights is not None or plan.solved_at is not None):
            name = "no_resampling_pass_rate" if plan.difficulty_weights is None else "difficulty_weights"
            raise ConfigError(f"train.{name} chooses among the rows of data.train, which is not set")
        if self.data.has_tasks and (self.tools.funcs or self.environment.specs):
            raise ConfigError("tools and an environment do not go with tasks of verifiers, whose harness has its own")
        if not (self.rewards.funcs or self.environment.specs or self.data.has_tasks):
            if self.data.has_scorers:
                object.__setattr__(self, "rewards", replace(self.rewards, funcs=["gym"]))
            elif self.needs_rewards and not self.teacher.is_alone:
                raise ConfigError("rewards.funcs must name at least one reward function")
        if self.rollout.func is not None:
            self._check_rollout(plan)
        if self.teacher.served:
            self._check_served_teacher()
        if self.rollout_is_quantized:
            self._check_copies(plan)
        if (self.has_episodes or self.rollout.func is not None) and self.train.structured_outputs:
            raise ConfigError(
                "train.generation_kwargs.structured_outputs is the grammar of a whole completion, which one of several "
                "turns has none of: not with tools, an environment or rollout.func"
            )
        if self.data.curriculum_column is not None and plan.difficulty_weights is not None:
            raise ConfigError(
                "data.curriculum_column orders the prompts, and train.difficulty_weights draws them: set one of the two"
            )

    @property
    def draws_on_ranks(self):
        """Whether several ranks draw while they train, each with an engine of its own: bool."""
        return self.generates_beside and self.num_ranks > 1 and not self.deploy.num_infer_gpus

    @property
    def is_stale(self):
        """Whether completions may be of older weights than those that are trained on them: bool."""
        return False


@dataclass(frozen=True, kw_only=True)
class AheadRun(PromptRun):
    """A file of a trainer whose completions may be drawn ahead of training."""

    train: SamplingConfig
    asynchronous: AsyncConfig | None = None

    generates_ahead = corrects_rollout = True
    # The unit whose loss is weighted by async.staleness `is`: a token or a sequence, None where [train] has no key for
    # it.
    weighted_by = "token"
    # In prime-rl's files it counts the completions of a step.
    batch_size = "train", "generation_batch_size"

    @property
    def generates_beside(self):
        """Whether completions are drawn while the model trains: bool."""
        return self.asynchronous is not None

    def resolved(self):
        """See Run; the importance weights are those that async.staleness asks for."""
        run = super().resolved()
        if run.train.generation.replays_experts:
            run = replace(run, engine=replace(run.engine, enable_return_routed_experts=True))
        if (
            self.weighted_by is None
            or not self.is_stale
            or "is" not in self.asynchronous.staleness
            or self.train.rollout_is is not None
        ):
            return run
        cap = str(self.asynchronous.importance_sampling_cap)
        return replace(run, train=replace(run.train, rollout_is=self.weighted_by, rollout_is_threshold=cap))

    @property
    def is_stale(self):
        """Whether completions may be of older weights than those that are trained on them: bool."""
        return self.generates_beside and self.asynchronous.max_staleness > 0

    @property
    def keeps_old_versions(self):
        """Whether an inference process that is started anew may need older weights than the newest: bool."""
        return self.is_stale and not self.asynchronous.in_flight_weight_updates

    def weights_transport(self, nbytes, gpu_bytes):
        """The way of new weights to inference processes, "peer" or "shm".

        nbytes: bytes of the weights; gpu_bytes: bytes of memory of a GPU whose memory processes can share, 0 without
        one.
        """
        if self.deploy.update_weights_transport != "auto":
            return self.deploy.update_weights_transport
        return "peer" if gpu_bytes and 4 * nbytes <= gpu_bytes and not self.keeps_old_versions else "shm"

    def _check_async(self):
        train, deploy = self.train.on_ranks(self.num_ranks), self.deploy
        if self.keeps_old_versions and deploy.update_weights_transport == "peer":
            raise ConfigError(
                "deploy.update_weights_transport `peer` keeps no older weights, which async.in_flight_weight_updates "
                "= false needs: take `shm` or `auto`"
            )
        if self.is_stale and train.generation.replays_mask:
            raise ConfigError(
                f"train.sampling_mask_replay needs completions of the weights that are trained: async.max_staleness "
                f"must be 0, got {self.asynchronous.max_staleness}"
            )
        if self.draws_on_ranks and deploy.tensor_parallel_size != 1:
            raise ConfigError(
                f"[async] with deploy.tensor_parallel_size {deploy.tensor_parallel_size or 'auto'} needs GPUs that "
                "generate, as the engine of ranks that train is whole: deploy.num_infer_gpus must be at least 1"
            )
        if self.asynchronous.queue_maxsize < train.rollout_batch_size:
            raise ConfigError(
                f"async.queue_maxsize ({self.asynchronous.queue_maxsize}) must be at least the completions of a "
                f"generation, {self.train.size_keys(self.num_ranks)} ({train.rollout_batch_size})"
            )

    def __post_init__(self):
        super().__post_init__()
        if self.asynchronous is not None:
            self._check_async()
        if self.train.generation.replays_experts and self.rollout.func is not None:
            raise ConfigError("train.router_replay needs completions of the engine: not with rollout.func")
