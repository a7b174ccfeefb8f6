"""The runs of the command line in Python, in TRL's form:

    from rlnumba import GRPOConfig, GRPOTrainer

    GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=f, args=GRPOConfig(output_dir="runs/a"), train_dataset=rows).train()

A trainer makes the Run that the same TOML file makes, and run_sft, run_grpo or another trains it: everything is written
to output_dir, the model to final/. On several GPUs (`deploy` of its config) that happens in other processes, which
import the script: its own calls stand below `if __name__ == "__main__":`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from rlnumba import config
from rlnumba.config import AsyncConfig, CriticConfig, DataConfig, DeployConfig, EngineConfig, RewardsConfig, key
from rlnumba.config.other_keys import take_trl_keys
from rlnumba.config.reading import warn_without_effect
from rlnumba.errors import ConfigError
from rlnumba.reporting.files import make_folder, replacing, to_line
from rlnumba.runtime import device
from rlnumba.trainers.callbacks import given
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.fit import fit_to_device
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.kto import run_kto
from rlnumba.trainers.plan import advise
from rlnumba.trainers.ppo import run_ppo
from rlnumba.trainers.ranks import resolve_if_named, train_on_ranks
from rlnumba.trainers.reward import run_reward
from rlnumba.trainers.rloo import run_rloo
from rlnumba.trainers.sft import run_sft


@dataclass(frozen=True)
class OutputArguments:
    """What the configs of TRL's trainers have besides the keys of [train]."""

    output_dir: str = key("trainer_output", "Folder of the run.", nonempty=True)
    seed: int = key(42, "Seed of everything random in the run.", minimum=0)
    deploy: DeployConfig | dict | None = key(None, "The section [deploy]: a DeployConfig, or a dict of its keys.")


@dataclass(frozen=True)
class AheadArguments:
    """What the configs of trainers that generate ahead of training have besides."""

    asynchronous: AsyncConfig | dict | None = key(
        None, "The section [async]: an AsyncConfig, or a dict of its keys, as TRL's AsyncGRPOConfig has them."
    )


@dataclass(frozen=True)
class SFTConfig(OutputArguments, config.SFTConfig):
    """[train] of `rlnumba sft`, and the keys that TRL's SFTConfig has besides."""


@dataclass(frozen=True)
class DPOConfig(OutputArguments, config.DPOConfig):
    """[train] of `rlnumba dpo`, and the keys that TRL's DPOConfig has besides."""


@dataclass(frozen=True)
class KTOConfig(OutputArguments, config.KTOConfig):
    """[train] of `rlnumba kto`, and the keys that TRL's KTOConfig has besides."""


@dataclass(frozen=True)
class RewardConfig(OutputArguments, config.RewardConfig):
    """[train] of `rlnumba reward`, and the keys that TRL's RewardConfig has besides."""


@dataclass(frozen=True)
class GRPOConfig(AheadArguments, OutputArguments, config.GRPOConfig):
    """[train] of `rlnumba grpo`, and the keys that TRL's GRPOConfig has besides."""

    reward_weights: list[float] | None = key(None, "A weight for each reward function; None: all 1.0.")


@dataclass(frozen=True)
class RLOOConfig(AheadArguments, OutputArguments, config.RLOOConfig):
    """[train] of `rlnumba rloo`, and the keys that TRL's RLOOConfig has besides."""

    reward_weights: list[float] | None = key(None, "A weight for each reward function; None: all 1.0.")


@dataclass(frozen=True)
class PPOConfig(OutputArguments, config.PPOConfig):
    """[train] of `rlnumba ppo`, and what TRL's trainers with rewards have besides."""

    reward_weights: list[float] | None = key(None, "A weight for each reward function; None: all 1.0.")


def _has_16_bits():
    return device.name() != "cpu"


for _config in (SFTConfig, DPOConfig, KTOConfig, RewardConfig, GRPOConfig, RLOOConfig, PPOConfig):
    take_trl_keys(_config, _has_16_bits)


class RowTrainer:
    """A trainer whose data are rows.

    model: a Hugging Face folder or a hub id. args: a config of the trainer's class. train_dataset, eval_dataset: a
    .jsonl or .parquet file, or rows (dicts of JSON values, any iterable), which `train` writes to output_dir. data:
    further keys of that section, a dict; engine: likewise, for trainers that generate. peft_config: a LoraConfig, to
    train an adapter instead of the weights. callbacks: objects with the methods of TrainerCallback. Raises ConfigError
    for keys that contradict each other.
    """

    # Of a subclass: its command, that command's Run, and the class of `args`.
    command, run_class, config_class = None, None, None

    def __init__(
        self, model, args=None, train_dataset=(), eval_dataset=None, data=None, engine=None, peft_config=None,
        callbacks=(),
    ):  # fmt: skip
        args = args or self.config_class()
        self.datasets, self.callbacks = {"train": train_dataset, "eval": eval_dataset}, callbacks
        if engine is not None:
            raise ConfigError(
                f"engine: {self.command} generates nothing; the section [engine] is of grpo, rloo and ppo"
            )
        self.run = self.run_class(**_settings(model, args, self.datasets, data, engine, peft_config))
        warn_without_effect(self.run)

    def train(self, resume_from_checkpoint=False):
        """Train; writes output_dir. resume_from_checkpoint: True to continue from the newest readable checkpoint there,
        an int from that of this step."""
        _write_rows(self.run, self.datasets)
        if self.run.num_ranks > 1:
            train_on_ranks(self.command, self.run, resume_from_checkpoint, callbacks=self.callbacks)
            return
        run = fit_to_device(self.command, self.run)
        with advise(self.command, run), given(self.callbacks):
            RUN[self.command](run, resume_from_checkpoint)


RUN = {"sft": run_sft, "dpo": run_dpo, "kto": run_kto, "reward": run_reward}


class SFTTrainer(RowTrainer):
    """Supervised fine-tuning."""

    command, run_class, config_class = "sft", config.SFTRun, SFTConfig


class DPOTrainer(RowTrainer):
    """Direct Preference Optimization, from pairs of a chosen and a rejected completion."""

    command, run_class, config_class = "dpo", config.DPORun, DPOConfig


class KTOTrainer(RowTrainer):
    """Kahneman-Tversky Optimization, from completions that are labelled desirable or not."""

    command, run_class, config_class = "kto", config.KTORun, KTOConfig


class RewardTrainer(RowTrainer):
    """A reward model, from pairs of a chosen and a rejected completion.

    final/ is a sequence-classification folder, which GRPOTrainer's reward_funcs may name.
    """

    command, run_class, config_class = "reward", config.RewardRun, RewardConfig


class GRPOTrainer:
    """Group Relative Policy Optimization.

    reward_funcs: a function with TRL's signature, or the name that [rewards] would have for one, also the folder of a
    reward model, or a list of these.
    rewards: further keys of that section, a dict. The other arguments are those of RowTrainer, args being a GRPOConfig.
    """

    command, config_class, run_class, run_function = "grpo", GRPOConfig, config.GRPORun, staticmethod(run_grpo)

    def __init__(
        self, model, reward_funcs, args=None, train_dataset=(), eval_dataset=None, data=None, engine=None, rewards=None,
        peft_config=None, callbacks=(),
    ):  # fmt: skip
        args = args or self.config_class()
        self.datasets, self.callbacks = {"train": train_dataset, "eval": eval_dataset}, callbacks
        reward_funcs = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        self.reward_funcs, self.given_funcs = [resolve_if_named(each) for each in reward_funcs], reward_funcs
        # The names under which config.toml lists them.
        funcs = [each if isinstance(each, str) else _spec(each) for each in reward_funcs]
        self.run = self.run_class(
            **_settings(model, args, self.datasets, data, engine, peft_config),
            rewards=RewardsConfig(funcs=funcs, weights=args.reward_weights, **(rewards or {})),
            **self._ahead(args),
        )
        warn_without_effect(self.run)

    def _ahead(self, args):
        """The section [async] of a config that has it, as a keyword of the Run: dict."""
        return {"asynchronous": _section(AsyncConfig, args.asynchronous)}

    def train(self, resume_from_checkpoint=False):
        """As RowTrainer.train. Raises RewardError for a reward that fails, after a checkpoint."""
        _write_rows(self.run, self.datasets)
        if self.run.num_ranks > 1:
            train_on_ranks(self.command, self.run, resume_from_checkpoint, self.given_funcs, self.callbacks)
            return
        run = fit_to_device(self.command, self.run)
        with advise(self.command, run), given(self.callbacks):
            self.run_function(run, resume_from_checkpoint, self.reward_funcs)


class RLOOTrainer(GRPOTrainer):
    """REINFORCE Leave-One-Out; the arguments are GRPOTrainer's, args being an RLOOConfig."""

    command, config_class, run_class, run_function = "rloo", RLOOConfig, config.RLOORun, staticmethod(run_rloo)


class PPOTrainer(GRPOTrainer):
    """Proximal Policy Optimization; critic: keys of that section, a dict. The other arguments are GRPOTrainer's, args
    being a PPOConfig."""

    command, config_class, run_class, run_function = "ppo", PPOConfig, config.PPORun, staticmethod(run_ppo)

    def __init__(self, *arguments, critic=None, **keywords):
        super().__init__(*arguments, **keywords)
        self.run = replace(self.run, critic=CriticConfig(**(critic or {})))

    def _ahead(self, args):
        return {}


def _settings(model, args, datasets, data, engine, peft_config):
    """The keywords of a Run, but for [rewards]: dict."""
    paths = {
        name: str(dataset if isinstance(dataset, str | Path) else Path(args.output_dir) / f"{name}.jsonl")
        for name, dataset in datasets.items()
        if dataset is not None
    }
    sections = {"data": DataConfig(**paths, **(data or {})), "train": args}
    if engine is not None:
        sections["engine"] = EngineConfig(**engine)
    sections |= {"lora": peft_config, "deploy": _section(DeployConfig, args.deploy) or DeployConfig()}
    return {"model": str(model), "output_dir": args.output_dir, "seed": args.seed, **sections}


def _section(section_class, value):
    """A section from what a config has for it: itself, a dict of its keys, or None."""
    return section_class(**value) if isinstance(value, dict) else value


def _write_rows(run, datasets):
    for name, dataset in datasets.items():
        if dataset is not None and not isinstance(dataset, str | Path):
            make_folder(run.output_dir)
            with replacing(Path(run.output_dir) / f"{name}.jsonl") as file:
                file.writelines(to_line(row) for row in dataset)


def _spec(function):
    """package.module:function, or for what has no such name (a partial, an object) its class."""
    named = function if isinstance(function, type(_spec)) else type(function)
    return f"{named.__module__}:{named.__qualname__}"
