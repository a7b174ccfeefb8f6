"""LLM.generate: lists of token ids in, completions with their log-probs out. The engine is core.py's."""

from pathlib import Path

from rlnumba.engine.core import Engine
from rlnumba.engine.kernel_list import extras_of
from rlnumba.engine.sequence import RequestOutput, SamplingParams
from rlnumba.errors import ConfigError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.model.lora import AdapterStack
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import find_base, load_model, with_adapters
from rlnumba.runtime import ahead_of_time, device

# Tokens that a prompt given as text is taken to have, where only the size of a step follows from it.
TEXT_TOKENS = 64


class LLM:
    """A model that generates, offline: all prompts of a call are given at once.

    model: a Transformer, or a Hugging Face folder or hub id, also a PEFT adapter's, whose tokenizer is then the
    default. The other arguments are Engine's, and so are update_weights, needed after every change of the weights,
    sleep and wake. adapters: {name: PEFT adapter folder} of adapters on the model, which itself has none, for
    generate's `adapters`. engine: what has an Engine's methods and is to be used in its place, for a model whose
    weights are not all there.
    """

    def __init__(self, model, tokenizer=None, config=None, adapters=None, engine=None):
        if isinstance(model, str | Path):
            base, adapter = find_base(model)
            tokenizer = tokenizer or (adapter and Tokenizer.from_folder(adapter)) or Tokenizer.from_folder(base)
            model = load_model(adapter or base)
        self.adapter_ids = {name: index for index, name in enumerate(adapters or ())}
        if adapters:
            model = with_adapters(model, adapters.values())
        self.model, self.tokenizer = model, tokenizer
        self.engine = engine or Engine(model, tokenizer, config)
        self.max_model_len = self.engine.max_model_len

    def update_weights(self, version):
        self.engine.update_weights(version)

    def sleep(self):
        self.engine.sleep()

    def wake(self):
        self.engine.wake()

    def generate(self, prompts, params=None, progress=None, finished=None, adapters=None):
        """The completions of each prompt, in the order of the prompts.

        prompts: lists of token ids or, with a tokenizer, texts. params: a SamplingParams for all, or one for each.
        progress: called after every step with (completions finished, completions asked for, tokens sampled so far).
        finished: called with (index of the prompt, its RequestOutput) as soon as a prompt has all of its completions.
        adapters: the name of an adapter for all, or for each its name or None, which is the model without one. They are
        computed in one batch; a completion has the bits that it has with its adapter alone.
        Raises PromptError with the prompt's index and ConfigError before any work is done, and UserError where the
        model gives no number for a log-prob. After any exception the engine has no requests.
        """
        engine = self.engine
        if engine.has_unfinished:
            raise ValueError("generate: the engine has unfinished requests")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"generate: {len(prompts)} prompts with {len(params)} SamplingParams")
        if adapters is None or isinstance(adapters, str):
            adapters = [adapters] * len(prompts)
        if len(adapters) != len(prompts):
            raise ValueError(f"generate: {len(prompts)} prompts with {len(adapters)} adapters")
        adapter_ids = [-1 if name is None else self._adapter_id(name) for name in adapters]
        lengths = [len(p) if self.tokenizer is None or not isinstance(p, str) else TEXT_TOKENS for p in prompts]
        self.compile_ahead(lengths, params)
        total, num_finished, num_tokens = sum(p.n for p in params), 0, 0
        try:
            outputs = [
                RequestOutput(engine.add_request(index, prompt, p, adapter_id).tolist(), [None] * p.n)
                for index, (prompt, p, adapter_id) in enumerate(zip(prompts, params, adapter_ids, strict=True))
            ]
            while engine.has_unfinished:
                step = engine.step()
                for request_id, index, completion in step.finished:
                    outputs[request_id].completions[index] = completion
                    if finished is not None and None not in outputs[request_id].completions:
                        finished(request_id, outputs[request_id])
                num_finished += len(step.finished)
                num_tokens += step.num_tokens
                if progress is not None:
                    progress(num_finished, total, num_tokens)
        except BaseException:  # a signal, too: the next call finds an engine without requests
            engine.reset()
            raise
        return outputs

    def compile_ahead(self, lengths, params, scored=()):
        """Have the kernels of a first call of generate compiled on all cores: see compile_ahead below."""
        model, adapter = self.model, self.model.adapter
        lora = adapter.loras if isinstance(adapter, AdapterStack) else adapter and adapter.lora
        compile_ahead(model.config, model.dtype.name, lora, self.engine.config, lengths, params, scored)

    def _adapter_id(self, name):
        if name not in self.adapter_ids:
            known = ", ".join(self.adapter_ids) or "none"
            raise ConfigError(f"generate: no adapter {name!r}; the LLM was made with {known}")
        return self.adapter_ids[name]


def compile_ahead(config, dtype, lora, engine, lengths, params, scored=()):
    """Have the kernels of what a process does first compiled on all cores, before its weights are read.

    config, dtype: of the model; lora: a LoraConfig, a tuple of them for several adapters, or None; engine:
    EngineConfig; lengths: tokens of each prompt that is completed with `params`, SamplingParams of each; scored: tokens
    of each sequence that is scored. Does nothing in a process of which a trainer has done it, with its own kernels.
    """
    if lengths or scored:
        compile_list("rlnumba.engine.kernel_list", kernel_request(config, dtype, lora, engine, lengths, params, scored))


def compile_list(module, request):
    """Have what `module` lists for a request compiled on all cores, if there is a GPU and this process has not yet."""
    if device.name() == "cuda" and gemm.backend() == "native" and not ahead_of_time.is_started():
        ahead_of_time.start(module, request)


def kernel_request(config, dtype, lora, engine, lengths, params, scored=()):
    """What engine/kernel_list.py takes, for the arguments of compile_ahead."""
    n, max_tokens = (max([getattr(p, name) for p in params], default=1) for name in ("n", "max_tokens"))
    return config, dtype, lora, engine, tuple(lengths), n, max_tokens, extras_of(params), tuple(scored)
