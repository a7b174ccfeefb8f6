"""`rlnumba eval`: a model on a run's held-out prompts, sampled and scored as the run would."""

from pathlib import Path

from rlnumba.engine.llm import LLM
from rlnumba.errors import ConfigError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import find_base, load_model
from rlnumba.reporting.files import make_folder, replacing, to_line
from rlnumba.rewards import TrainerState
from rlnumba.trainers import evaluation
from rlnumba.trainers.grpo import eval_params, load_prompts
from rlnumba.trainers.reward_model import load_rewards


def run_eval(run, model=None, output=None, dtype=None, status=None):
    """Evaluate a folder of a model or adapter on a run's data.eval: metrics by name.

    model: the folder or hub id, by default the run's. output: None, or a folder, in which metrics.json and
    completions.jsonl are written. Raises ConfigError without data.eval.
    """
    if run.data.eval is None:
        raise ConfigError("eval: data.eval is not set; give --data.eval FILE")
    params = eval_params(run)
    if params.temperature == 0 and params.n > 1:
        raise ConfigError(f"eval.num_generations ({params.n}) completions at temperature 0 are all the same")
    rewards = load_rewards(run)
    base, _ = find_base(model or run.model)
    llm = LLM(load_model(model or run.model, dtype or run.train.dtype), Tokenizer.from_folder(base), run.engine)
    prompts = load_prompts(run.data.eval, run, llm, for_eval=True)
    generation = evaluation.generate(llm, rewards, prompts, params, TrainerState(0, 0, 0.0), status)
    found = evaluation.metrics_of(generation, rewards.names, run)
    if output is not None:
        make_folder(output)
        with replacing(Path(output) / "completions.jsonl") as file:
            for row in generation.rows(rewards.names):
                del row["advantage"]
                file.write(to_line(row))
        with replacing(Path(output) / "metrics.json") as file:
            file.write(to_line(found))
    return found
