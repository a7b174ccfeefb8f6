"""`rlnumba eval`: a model on a run's held-out rows, as the run would evaluate it.

grpo, rloo, ppo            completions of the prompts, sampled with [eval] and scored by the rewards
sft, dpo, kto, reward      the loss of the rows, and the trainer's other metrics

With deploy.num_train_gpus as many ranks share the prompts, or the rows.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from rlnumba.config import LoraConfig
from rlnumba.distributed.replicas import launch_replicas, llm_on_ranks
from rlnumba.engine.llm import LLM
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.model.lora import is_adapter
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import find_base, find_model, load_model, read_config
from rlnumba.reporting.files import make_folder, replacing, to_line
from rlnumba.rewards import TrainerState
from rlnumba.trainers import evaluation, reward
from rlnumba.trainers.loading import load_policy
from rlnumba.trainers.plan import ROW_TRAINERS
from rlnumba.trainers.prompt_run import check_stops_of, eval_params, load_prompts
from rlnumba.trainers.ranks import check_picklable, resolve_if_named
from rlnumba.trainers.reward_model import load_rewards
from rlnumba.trainers.run_folder import silence, start_compiling
from rlnumba.trainers.shared_rollout import RewardsOnRanks


class RowError(UserError):
    """Rows that a trainer cannot read."""


def run_eval(run, model=None, output=None, dtype=None, status=None, kind="grpo", reward_funcs=()):
    """Evaluate a folder of a model or adapter on a run's data.eval: metrics by name.

    kind: the trainer's name. model: the folder or hub id, by default the run's. output: None, or a folder, in which
    metrics.json and, of prompts, completions.jsonl are written. reward_funcs: functions or names, in place of those
    that the run names. Raises ConfigError without data.eval, and RowError,
    before any weights are loaded, for rows that sft, dpo, kto or reward cannot read.
    """
    if run.data.eval is None:
        raise ConfigError("eval: data.eval is not set; give --data.eval FILE")
    if dtype is not None:
        run = replace(run, train=replace(run.train, dtype=dtype))
    if kind in ROW_TRAINERS and run.num_ranks > 1:
        # Here, because an error of a rank is a RankError.
        load_rows(kind, run, find_model(run.model))
    if run.num_ranks > 1:
        start_compiling(kind, run)
    limits = {"timeout_s": run.deploy.dist_timeout_seconds}
    if run.num_ranks > 1:
        for each in reward_funcs:
            check_picklable(each, run.num_ranks)
    arguments = "deploy.num_train_gpus", kind, run, model, status, list(reward_funcs)
    found, completions = launch_replicas(evaluate, run.num_ranks, *arguments, **limits)
    if output is not None:
        make_folder(output)
        if completions:
            with replacing(Path(output) / "completions.jsonl") as file:
                file.writelines(map(to_line, completions))
        with replacing(Path(output) / "metrics.json") as file:
            file.write(to_line(found))
    return found


def describe_model(kind, run, model=None):
    """The model that run_eval has evaluated, for the same arguments: "model DIR" or "adapter DIR on base DIR"."""
    name = model or run.model
    folder = find_model(name)
    if not is_adapter(folder):
        return f"model {name}"
    return f"adapter {name} on base {run.model if kind in ROW_TRAINERS else find_base(folder)[0]}"


def evaluate(communicator, kind, run, model, status, reward_funcs):
    """(metrics by name, lines of completions.jsonl), on each rank. The arguments are run_eval's."""
    gemm.set_backend(run.gemm)
    if communicator.rank:
        silence()
    if kind in ROW_TRAINERS:
        return evaluate_rows(kind, run, model, communicator), []
    return evaluate_prompts(run, model, status if communicator.rank == 0 else None, communicator, reward_funcs)


def evaluate_prompts(run, model, status, communicator, reward_funcs):
    """(metrics by name, lines of completions.jsonl) of a GRPORun, RLOORun or PPORun."""
    params = eval_params(run)
    if params.temperature == 0 and params.n > 1:
        raise ConfigError(f"eval.num_generations ({params.n}) completions at temperature 0 are all the same")
    rewards = load_rewards(run, [resolve_if_named(each) for each in reward_funcs]) if communicator.rank == 0 else None
    base, _ = find_base(model or run.model)
    check_stops_of(params, base)
    llm = LLM(load_model(model or run.model, run.train.dtype), Tokenizer.from_folder(base), run.engine)
    if communicator.world_size > 1:
        llm, rewards = llm_on_ranks(llm, communicator), RewardsOnRanks(rewards, communicator)
    prompts = load_prompts(run.data.eval, run, llm, for_eval=True)
    generation = evaluation.generate(llm, rewards, prompts, params, TrainerState(0, 0, 0.0), status)
    rows = generation.rows(rewards.names)
    for row in rows:
        del row["advantage"]
    return evaluation.metrics_of(generation, rewards.names, run), rows


@dataclass
class Source:
    """What load_rows reads of a model, its `config`, and load_policy of a RunFolder: where the weights are, and which
    ranks take part."""

    config: object
    model_folder: Path | None
    communicator: object


def load_rows(kind, run, base):
    """The rows of a run's data.eval, for the model in the folder `base`. Raises RowError for such as it cannot read."""
    try:
        source = Source(read_config(base), None, None)
        return ROW_TRAINERS[kind].module.load_rows(
            run.data.eval, run, source, Tokenizer.from_folder(base), for_eval=True
        )
    except ConfigError:
        raise
    except UserError as error:
        raise RowError(str(error)) from error


def evaluate_rows(kind, run, model, communicator):
    """Metrics of the rows by name. A reference, where the trainer has one, is the run's `model`."""
    trainer, weights = ROW_TRAINERS[kind], None if model is None else find_model(model)
    if weights is not None:
        run = replace(run, lora=LoraConfig(init=str(weights)) if is_adapter(weights) else None)
    base = find_model(run.model)
    source = Source(read_config(base), None if run.lora else weights, communicator)
    rows = load_rows(kind, run, base)
    policy, tokenizer = load_policy(run, source, trainer.reference, heads=trainer.heads)
    if trainer.module is reward:
        reward.set_pad_token(policy.model, tokenizer)
    with policy.context.use():
        return {f"eval_{name}": value for name, value in trainer.module.evaluate(policy, rows).items()}
