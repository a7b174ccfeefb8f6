"""LLM.generate: lists of token ids in, completions with their log-probs out. The engine is core.py's."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np

from rlnumba.config import EngineConfig
from rlnumba.config.keys import refuse_unknown
from rlnumba.config.lora import MAX_LORAS
from rlnumba.data import check_messages, encode_prompt
from rlnumba.engine.adapters import LoRARequest, RequestedAdapters, for_adapters
from rlnumba.engine.core import Engine, PromptError
from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.engine.kernel_list import extras_of
from rlnumba.engine.requests.streams import Streams
from rlnumba.engine.sequence import RequestOutput, SamplingParams
from rlnumba.errors import ConfigError, shown
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.model.adapter_stack import AdapterStack
from rlnumba.model.hub import find_base, find_model
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model, with_adapters
from rlnumba.runtime import device
from rlnumba.runtime.compile import ahead_of_time

# Tokens that a prompt given as text is taken to have, where only the size of a step follows from it.
TEXT_TOKENS = 64
# The parts that vLLM's sleep lets go of, as its wake_up names them.
SLEEPERS = "weights", "kv_cache"
ENGINE_KEYS = frozenset(field.name for field in fields(EngineConfig))
# Arguments of vLLM's LLM and its generate: how that is said here. None, False, one GPU and NO_REQUEST are no request.
LLM_ELSEWHERE = {
    "tensor_parallel_size": "one process has the whole model; `rlnumba generate --tp` cuts it",
    "data_parallel_size": "one process has one model; `rlnumba generate --num-gpus` has several",
    "pipeline_parallel_size": "`rlnumba generate --tp` cuts a model",
    "seed": "it is of a SamplingParams",
    "kv_cache_dtype": "the KV cache has the model's dtype",
}
NO_REQUEST = {"seed": (None, 0), "kv_cache_dtype": (None, False, "auto")}
# Others that need nothing here: models are read by rlnumba itself, from safetensors; ranks have no bound.
LLM_WITHOUT_EFFECT = ("trust_remote_code", "max_cpu_loras", "max_lora_rank")
GENERATE_ELSEWHERE = {
    "prompt_token_ids": "give lists of token ids as prompts",
}


class LLM:
    """A model that generates, offline: all prompts of a call are given at once.

    model: a Transformer, or a Hugging Face folder or hub id, also a PEFT adapter's, whose tokenizer is then the
    default. tokenizer: a Tokenizer, or the folder or hub id that has one. config: an EngineConfig; its keys may also be
    given one by one, as in vLLM: LLM(folder, max_model_len=1024). dtype: the weights', by default the checkpoint's.
    update_weights, needed after every change of the weights, sleep and wake are Engine's. adapters: {name: PEFT adapter
    folder} of adapters on the model, which itself has none, for generate's `adapters`. enable_lora: others may be given
    to generate as vLLM's lora_request, of which max_loras are kept, the last used.
    """

    def __init__(self, model, tokenizer=None, config=None, adapters=None, dtype=None, **keys):
        enable_lora, max_loras = keys.pop("enable_lora", False), keys.pop("max_loras", MAX_LORAS)
        if not isinstance(max_loras, int) or max_loras < 1:
            raise ConfigError(f"LLM: max_loras must be an integer >= 1, got {shown(max_loras)}")
        config = _engine_config(config, keys)
        if isinstance(tokenizer, str | Path):
            tokenizer = Tokenizer.from_folder(find_model(tokenizer))
        if isinstance(model, str | Path):
            base, adapter = find_base(model)
            tokenizer = tokenizer or (adapter and Tokenizer.from_folder(adapter)) or Tokenizer.from_folder(base)
            model = load_model(adapter or base, None if dtype == "auto" else dtype)
        elif dtype not in (None, "auto", model.dtype.name):
            raise ConfigError(f"LLM: dtype {shown(dtype)} is for a folder, and the model has weights of {model.dtype}")
        self.adapter_ids = {name: index for index, name in enumerate(adapters or ())}
        if adapters:
            model = with_adapters(model, adapters.values())
        elif enable_lora:
            model = for_adapters(model)
        self.model, self.tokenizer = model, tokenizer
        self.engine = Engine(model, tokenizer, config)
        self.requested = RequestedAdapters(self.engine, max_loras)
        self.max_model_len = self.engine.max_model_len

    def update_weights(self, version):
        self.engine.update_weights(version)

    def sleep(self, level=1):
        """Let others use the KV cache's memory. level: vLLM's, 1 or 2; the weights stay with either. Raises
        ConfigError."""
        if isinstance(level, bool) or level not in (1, 2):
            raise ConfigError(f"sleep: level must be 1 or 2, got {shown(level)}")
        self.engine.sleep()

    def wake(self):
        self.engine.wake()

    def wake_up(self, tags=None):
        """Wake as `wake` does, under vLLM's name. tags: of what alone, a list of SLEEPERS; with the weights, which
        never slept, the cache sleeps on. Raises ConfigError."""
        if tags is not None and (isinstance(tags, str) or not all(tag in SLEEPERS for tag in tags)):
            raise ConfigError(f"wake_up: tags must be a list of {', '.join(SLEEPERS)}, got {shown(tags)}")
        if tags is None or "kv_cache" in tags:
            self.engine.wake()

    def get_tokenizer(self):
        """The Tokenizer, None without one."""
        return self.tokenizer

    def reset_prefix_cache(self):
        """Let no call share the cached blocks of an earlier one any more: True, as vLLM has it."""
        self.engine.reset_prefix_cache()
        return True

    def generate(self, prompts, params=None, progress=None, finished=None, adapters=None, failed=None, **others):
        """The completions of each prompt, in the order of the prompts: list of RequestOutput.

        A RequestOutput has request_id, prompt, prompt_token_ids, finished and outputs (also `completions`), as in vLLM,
        and each of these index, text, token_ids, logprobs, cumulative_logprob, finish_reason and stop_reason.
        prompts: lists of token ids or, with a tokenizer, texts, or vLLM's dicts {"prompt": text} and
        {"prompt_token_ids": ids}; one that is in no list is a list of one. params: a SamplingParams for all, or one for
        each, None for the defaults; sampling_params is the same.
        progress: called after every step with (completions finished, completions asked for, tokens sampled so far).
        finished: called with (index of the prompt, its RequestOutput) as soon as a prompt has all of its completions.
        adapters: the name of an adapter for all, or for each its name or None, which is the model without one. They are
        computed in one batch; a completion has the bits that it has with its adapter alone. lora_request: a LoRARequest
        for all, or for each its own or None, instead; its folder is read at the first call that has it.
        failed: called with (index of the prompt, PromptError) where the model gives no number for a log-prob; the other
        prompts go on, and some completions of this one are None. Without it the PromptError is raised, and nothing is
        returned of the others. Raises PromptError with the prompt's index and ConfigError before any work is done.
        After any exception the engine has no requests.
        """
        engine = self.engine
        texts, prompts, params, adapter_ids = self._requests(
            prompts, _params(params, others), asked_adapters(adapters, others)
        )
        total, episodes, outputs = sum(p.n for p in params), Episodes(engine), []
        bar = progress_bar(others.get("use_tqdm"), total)
        try:
            for index, each in enumerate(zip(texts, prompts, params, adapter_ids, strict=True)):
                text, prompt, p, adapter_id = each
                p = p.seeded()
                prompt, _ = engine.check_request(index, prompt, p)
                episodes.submit(GroupRequest(index, prompt, p, adapter_id=adapter_id))
                outputs.append(RequestOutput(prompt.tolist(), [None] * p.n, text, str(index)))
            while engine.has_unfinished:
                try:
                    complete = episodes.step()
                except PromptError as error:
                    if failed is None:
                        raise
                    for index in error.request_ids:
                        for i, completion in episodes.running[index].done.items():
                            outputs[index].completions[i] = completion
                        failed(index, error)
                    episodes.begin_again(error.request_ids)
                    continue
                for request in complete:
                    outputs[request.number].completions[:] = request.completions
                    if finished is not None:
                        finished(request.number, outputs[request.number])
                if progress is not None:
                    progress(episodes.num_finished, total, episodes.num_tokens)
                if bar is not None:
                    bar.update(episodes.num_finished - bar.n)
        except BaseException:  # a signal, too: the next call finds an engine without requests
            engine.reset()
            raise
        finally:
            if bar is not None:
                bar.close()
        return outputs

    def generate_episodes(self, prompts, params, episodes, progress=None, finished=None):
        """The completions of prompts that are episodes (engine/episodes.py): list of RequestOutput.

        prompts: lists of token ids; params: SamplingParams of each; episodes: the coroutine function of each. progress,
        finished: those of generate. Raises what an episode raises. After any exception the engine has no requests.
        """
        driver, total = Episodes(self.engine), sum(each.n for each in params)
        outputs = [RequestOutput(list(prompt)) for prompt in prompts]
        try:
            for number, (output, each, episode) in enumerate(zip(outputs, params, episodes, strict=True)):
                driver.submit(GroupRequest(number, output.prompt_token_ids, each, episode=episode))
            while not driver.is_idle:
                for request in driver.step():
                    outputs[request.number].completions = request.completions
                    if finished is not None:
                        finished(request.number, outputs[request.number])
                if progress is not None:
                    progress(driver.num_finished, total, driver.num_tokens)
        except BaseException:  # a signal, too: the next call finds an engine without requests
            driver.reset()
            raise
        return outputs

    def stream(self, prompts, params=None, adapters=None, **others):
        """Yields (index of the prompt, its RequestOutput so far) after every step, for each prompt that has grown.

        Arguments are those of generate. The last output of a prompt is `finished`, and the one that generate returns.
        The text of the others lacks what is not decided: a part of a character, or of a stop string. Where the
        iterator is closed, all requests are dropped. Raises as generate does, PromptError for the first damaged prompt.
        """
        texts, prompts, params, adapter_ids = self._requests(
            prompts, _params(params, others), asked_adapters(adapters, others)
        )
        streams = Streams(self.engine)
        try:
            for index, (prompt, p, adapter_id) in enumerate(zip(prompts, params, adapter_ids, strict=True)):
                streams.submit(index, prompt, p, adapter_id)
            while streams.open:
                for index, output in streams.step():
                    if isinstance(output, PromptError):
                        raise output
                    output.prompt = texts[index]
                    yield index, output
        finally:
            if streams.open:
                self.engine.reset()

    def _requests(self, prompts, params, adapters):
        """(texts, prompts, params, adapter ids) of a call of generate, an entry a prompt; compiles what they need."""
        if self.engine.has_unfinished:
            raise ValueError("generate: the engine has unfinished requests")
        prompts = _listed(prompts)
        taken = [text_and_prompt(*each) for each in enumerate(prompts)]
        texts, prompts = [text for text, _ in taken], [prompt for _, prompt in taken]
        if params is None or isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        params = [SamplingParams() if each is None else each for each in params]
        if len(params) != len(prompts):
            raise ValueError(f"generate: {len(prompts)} prompts with {len(params)} SamplingParams")
        if adapters is None or isinstance(adapters, str | LoRARequest):
            adapters = [adapters] * len(prompts)
        if len(adapters) != len(prompts):
            raise ValueError(f"generate: {len(prompts)} prompts with {len(adapters)} adapters")
        adapter_ids = self.adapter_ids_of(adapters)
        lengths = [len(p) if self.tokenizer is None or not isinstance(p, str) else TEXT_TOKENS for p in prompts]
        self.compile_ahead(lengths, params)
        return texts, prompts, params, adapter_ids

    def chat(self, messages, params=None, progress=None, finished=None, adapters=None, **others):
        """Complete a list of messages, or several, as generate does, each as the model's chat template writes it.

        tools: JSON schemas of functions that the template shows. chat_template_kwargs: variables of the template.
        """
        tools, template = others.pop("tools", None), others.pop("chat_template_kwargs", None)
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = chat_prompts(self.tokenizer, chats, tools, template)
        return self.generate(prompts, params, progress, finished, adapters, **others)

    def compile_ahead(self, lengths, params, scored=()):
        """Have the kernels of a first call of generate compiled on all cores: see compile_ahead below."""
        model, adapter = self.model, self.model.adapter
        lora = adapter and adapter.lora if not isinstance(adapter, AdapterStack) else tuple(filter(None, adapter.loras))
        quantization = model.weights.quantization
        compile_ahead(model.config, model.dtype.name, lora, self.engine.config, lengths, params, scored, quantization)

    def adapter_ids_of(self, adapters):
        """The ids of a list of adapters: names, LoRARequests, whose folders are read at first, and None. Raises
        UserError."""
        if requested := [each for each in adapters if isinstance(each, LoRARequest)]:
            if not isinstance(self.model.adapter, AdapterStack):
                raise ConfigError("generate: lora_request needs LLM(..., enable_lora=True)")
            self.requested.load(requested)
        return [self._adapter_id(each) for each in adapters]

    def _adapter_id(self, adapter):
        if adapter is None:
            return -1
        if isinstance(adapter, LoRARequest):
            return self.requested.ids[adapter]
        if adapter not in self.adapter_ids:
            known = ", ".join(self.adapter_ids) or "none"
            raise ConfigError(f"generate: no adapter {adapter!r}; the LLM was made with {known}")
        return self.adapter_ids[adapter]


def _engine_config(config, keys):
    """The EngineConfig of an LLM's arguments. Raises TypeError for others of vLLM's that ask for something."""
    own_names = "model", "tokenizer", "config", "adapters", "dtype", "enable_lora"
    refuse_unknown("LLM", keys, {*ENGINE_KEYS, *LLM_ELSEWHERE, *LLM_WITHOUT_EFFECT, *own_names})
    own = {name: value for name, value in keys.items() if name in ENGINE_KEYS}
    for name, value in keys.items():
        if name in LLM_ELSEWHERE and value not in NO_REQUEST.get(name, (None, False, 1)):
            raise TypeError(f"LLM takes no {name}: {LLM_ELSEWHERE[name]}")
    if own and config is not None:
        raise TypeError(f"LLM: config and {', '.join(own)} are both given")
    return EngineConfig(**own) if own else config


def _params(params, others):
    """The SamplingParams of a call of generate: `params`, or vLLM's keyword for it."""
    refuse_unknown(
        "generate", others, {"prompts", "params", "sampling_params", "use_tqdm", "lora_request"}, GENERATE_ELSEWHERE
    )
    if others.get("sampling_params") is not None:
        if params is not None:
            raise TypeError("generate: params and sampling_params are the same, and both are given")
        params = others["sampling_params"]
    for each in params if isinstance(params, list | tuple) else [params]:
        if not isinstance(each, SamplingParams | None):
            raise TypeError(
                f"generate: params must be SamplingParams, or a list of them, got {type(each).__qualname__}"
            )
    return params


def asked_adapters(adapters, others):
    """The adapters of a call of generate: `adapters`, or vLLM's keyword for it."""
    if others.get("lora_request") is not None:
        if adapters is not None:
            raise TypeError("generate: adapters and lora_request are the same, and both are given")
        adapters = others["lora_request"]
    for each in adapters if isinstance(adapters, list | tuple) else [adapters]:
        if not isinstance(each, str | LoRARequest | None):
            kind = type(each).__qualname__
            raise TypeError(f"generate: an adapter is a name or a LoRARequest, or a list of them, got {kind}")
    return adapters


def _listed(prompts):
    """The prompts of a call: a text, a dict or a list of token ids that is in no list is the only one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = prompts if isinstance(prompts, list | tuple | np.ndarray) else list(prompts)
    is_ids = len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    return [prompts] if is_ids else prompts


def chat_prompts(tokenizer, chats, tools=None, template=None):
    """The token ids of each chat, a list of messages. tools: JSON schemas or None; template: its variables."""
    if tokenizer is None:
        raise ConfigError("chat: messages need a tokenizer, and the model folder has none")
    variables = dict(template or {})
    if tools:
        variables["tools"] = tools
    for index, chat in enumerate(chats):
        check_messages(chat, f"chat: messages {index}")
    return [encode_prompt(tokenizer, chat, **variables) for chat in chats]


class ProgressLine:
    """A line on stderr that counts finished completions, used as tqdm's bars are. n: those so far."""

    def __init__(self, total, desc):
        self.total, self.desc, self.n = total, desc, 0

    def update(self, count):
        self.n += count
        if count:
            print(f"\r{self.desc}: {self.n}/{self.total}", end="", file=sys.stderr, flush=True)

    def close(self):
        print(file=sys.stderr)


def progress_bar(use_tqdm, total):
    """The bar of generate's use_tqdm: None, True for a line on stderr, or a class such as tqdm."""
    if not use_tqdm:
        return None
    return (ProgressLine if use_tqdm is True else use_tqdm)(total=total, desc="Processed prompts")


def text_and_prompt(index, prompt):
    """(the text or None, what the engine takes) of a prompt. Raises TypeError with the forms that there are."""
    if isinstance(prompt, str):
        return prompt, prompt
    if not isinstance(prompt, Mapping):
        return None, prompt
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    more = [name for name in prompt if name not in ("prompt", "prompt_token_ids")]
    if (text is None and ids is None) or more or not isinstance(text, str | None):
        raise TypeError(
            f"generate: prompt {index} must be a text, token ids, {{'prompt': text}} or {{'prompt_token_ids': ids}}, "
            f"got a dict of {', '.join(map(str, prompt)) or 'nothing'}; messages are for chat()"
        )
    return text, text if ids is None else ids


def compile_ahead(config, dtype, lora, engine, lengths, params, scored=(), quantization=None):
    """Have the kernels of what a process does first compiled on all cores, before its weights are read.

    config, dtype: the model's; lora: a LoraConfig, a tuple of them for several adapters, or None; engine:
    EngineConfig; lengths: tokens of each prompt that is completed with `params`, SamplingParams of each; scored: tokens
    of each sequence that is scored; quantization: the QuantizationConfig of the weights, or None. Does nothing in a
    process whose trainer has done it, with its own kernels.
    """
    if lengths or scored:
        request = kernel_request(config, dtype, lora, engine, lengths, params, scored, quantization)
        compile_list("rlnumba.engine.kernel_list", request)


def compile_list(module, request):
    """Have what `module` lists for a request compiled on all cores, if there is a GPU and this process has not yet."""
    if device.name() == "cuda" and gemm.backend() == "native" and not ahead_of_time.is_started():
        ahead_of_time.start(module, request)


def kernel_request(config, dtype, lora, engine, lengths, params, scored=(), quantization=None):
    """The arguments of compile_ahead as engine/kernel_list.py takes them."""
    n, max_tokens = (max([getattr(p, name) for p in params], default=1) for name in ("n", "max_tokens"))
    lengths, extras, scored = tuple(lengths), extras_of(params), tuple(scored)
    return config, dtype, lora, engine, lengths, n, max_tokens, extras, scored, False, quantization
