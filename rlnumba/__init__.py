"""Reinforcement learning of language models in one Python process, every kernel a @cuda.jit function.

from rlnumba import LLM, SamplingParams
outputs = LLM("Qwen/Qwen3-0.6B").generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=64))
print(outputs[0].completions[0].text)
"""

import importlib

from rlnumba.runtime.folders import set_numba_cache

# Before any module of the package imports Numba, in whatever way this process was started.
set_numba_cache()

_ALGORITHMS = ("DPO", "GRPO", "KTO", "PPO", "RLOO", "Reward", "SFT")
_TRAINERS = [f"{name}{kind}" for name in _ALGORITHMS for kind in ("Config", "Trainer")]
_MODULES = {"LLM": "rlnumba.engine", "SamplingParams": "rlnumba.engine"}
_MODULES |= dict.fromkeys(("LoraConfig", "DeployConfig", "AsyncConfig"), "rlnumba.config")
_MODULES |= dict.fromkeys(_TRAINERS, "rlnumba.trainers.trainer")
_MODULES["TrainerCallback"] = "rlnumba.trainers.callbacks"
__all__ = list(_MODULES)


def __getattr__(name):
    # At first use, because importing the engine imports Numba, which takes a second.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


def __dir__():
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
