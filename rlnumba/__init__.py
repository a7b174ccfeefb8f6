"""Reinforcement learning of language models in one Python process, every kernel a @cuda.jit function.

from rlnumba import LLM, SamplingParams
outputs = LLM("Qwen/Qwen3-0.6B").generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=64))
print(outputs[0].completions[0].text)
"""

import importlib

from rlnumba.runtime.folders import set_numba_cache

# Before any module of the package imports Numba, in whatever way this process was started.
set_numba_cache()

_MODULES = dict.fromkeys(("LLM", "AsyncLLM", "SamplingParams", "LoRARequest"), "rlnumba.engine")
_MODULES |= dict.fromkeys(("LoraConfig", "DeployConfig", "AsyncConfig"), "rlnumba.config")
_MODULES["TrainerCallback"] = "rlnumba.runs.callbacks"


def _names_of_trainers():
    """SFTConfig, SFTTrainer, GRPOConfig, ..., of rlnumba.trainers.trainer: list."""
    runs = importlib.import_module("rlnumba.config.runs").RUNS.values()
    trains = [run_class.__dataclass_fields__["train"].type.__name__ for run_class in runs]
    return [name for train in trains for name in (train, f"{train.removesuffix('Config')}Trainer")]


def __getattr__(name):
    # At first use, because importing the engine imports Numba, which takes a second.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name == "__all__":
        return [*_MODULES, *_names_of_trainers()]
    if name.endswith(("Config", "Trainer")) and name in _names_of_trainers():
        return getattr(importlib.import_module("rlnumba.trainers.trainer"), name)
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


def __dir__():
    return [*__getattr__("__all__"), *(name for name in globals() if name.startswith("__"))]
