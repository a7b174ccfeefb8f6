"""One decoder-only transformer for training, scoring, prefill and decode, which differ in the attention backend.

    token ids -> embedding -> the blocks of each layer (model/blocks) -> rmsnorm -> hidden states (N, D)

Everything is N packed tokens: sequences end to end, position ids restart. There is no autograd: `backward` reads in
reverse the tape that `forward` wrote. Log-probs come from the hidden states (model/heads.py); the logits of all tokens
never exist at once.
"""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from rlnumba.data.prefix_tree import ANY_LEVELS, PrefixRule
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.attention.ops import prefix_levels, supports_prefixes
from rlnumba.kernels.experts.ops import router_loss
from rlnumba.kernels.gemm.ops import linear
from rlnumba.kernels.logprob.ops import IGNORED, linear_logp
from rlnumba.kernels.logprob.terms import LogprobOutputs
from rlnumba.kernels.nn.elementwise import scale
from rlnumba.kernels.nn.embedding import embedding, embedding_backward, list_tokens
from rlnumba.kernels.nn.qkv import Rotation
from rlnumba.kernels.nn.rmsnorm import rmsnorm, rmsnorm_backward
from rlnumba.kernels.nn.rope import rope_table
from rlnumba.model.adapter_stack import AdapterStack, check_stackable
from rlnumba.model.blocks.attention import PackedAttention
from rlnumba.model.blocks.block import ForwardContext, norm_rows
from rlnumba.model.blocks.low_rank import Dropout, LoraContext, projection_numbers
from rlnumba.model.config import LM_HEAD
from rlnumba.model.config_values import read_json
from rlnumba.model.hub import find_base, find_model, read_config
from rlnumba.model.lora import check_other_kind, load_adapter, save_adapter
from rlnumba.model.quantized.weights import weights_in
from rlnumba.model.router_loss import RouterTerm
from rlnumba.model.shard import WHOLE
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.weights import Weights, load_weights, save_weights, write_json
from rlnumba.runtime import device
from rlnumba.runtime.arena import HeapAllocator

F32 = np.dtype(np.float32)


@dataclass
class Tape:
    """Arrays that a forward leaves for its backward. recompute: keep only every layer's input (gradient checkpointing).

    dropout: the Dropout of the adapter's inputs, or None. router: a RouterTerm, or None. layers: of each layer what its
    blocks saved, a list, or its input alone. Without recompute: modules, those of block.MODULES whose outputs are not
    kept but computed again; num_layers, the number of layers, from the first on, that keep only their input.
    """

    recompute: bool = False
    dropout: Dropout | None = None
    layers: list = field(default_factory=list)
    ctx: ForwardContext | None = None
    input_ids: object = None
    token_list: object = None
    last: tuple = ()
    modules: frozenset = frozenset()
    num_layers: int = 0
    router: RouterTerm | None = None

    def keeps_input_only(self, index):
        """Whether only the input of this layer is kept."""
        return self.recompute or index < self.num_layers


class Transformer:
    """A model: config, weights, and the forward and backward between token ids and hidden states.

    generation_config: the contents of generation_config.json, written back by save_model and not read here. adapter: an
    Adapter, which is what is then trained, or an AdapterStack, or None. ranks: None, or what this rank's shard of the
    model does with the others (parallel/tensor_parallel.py); config and weights are then the shard's. All ranks do
    the same forward at the same time, and have the hidden states of the whole model. There is no backward.
    """

    def __init__(self, config, weights, generation_config=None, adapter=None, ranks=None):
        self.ranks = ranks
        self.config, self.weights, self.dtype = config, weights, weights.dtype
        self.lm_head, self.adapter = weights.lm_head, adapter
        self.blocks = weights.config.blocks
        self.generation_config = generation_config or {}
        self.ropes = {"full_attention": _rope_of(config, config.rope_theta, config.rope_scaling)}
        if "sliding_attention" in config.layer_types:
            self.ropes["sliding_attention"] = _rope_of(config, config.rope_local_base_freq, None)
        self.embedding_scale = embedding_scale(config, self.dtype)

    @property
    def rope(self):
        """The tables (cos, sin) of layers of full attention."""
        return self.ropes["full_attention"]

    @property
    def trained(self):
        """The parameters that an optimizer updates: the Adapter if there is one, else the Weights."""
        return self.weights if self.adapter is None else self.adapter

    @property
    def score(self):
        """The score head (1, D), the adapter's where it has one, or None."""
        trained = self.trained.score
        return self.weights.score if trained is None else trained

    @property
    def nbytes(self):
        """Bytes of the weights and the adapter."""
        return self.weights.nbytes + (0 if self.adapter is None else self.adapter.nbytes)

    @property
    def prefix_sharing(self):
        """The PrefixRule of packed sequences with prefixes in the rows of others (PackedPrefixes) on this device.

        None where they may have none.
        """
        config, blocks = self.config, (block for blocks in self.blocks for block in blocks)
        multiples = [block.prefix_multiple(config, self.dtype) for block in blocks]
        if self.ranks is not None or None in multiples:
            return None
        gqa_ratio = config.num_attention_heads // config.num_key_value_heads
        has_window = any(map(config.window_of, range(config.num_hidden_layers)))
        if not supports_prefixes(self.dtype.name, config.head_dim, gqa_ratio, has_window):
            return None
        return PrefixRule(max(multiples), prefix_levels() or ANY_LEVELS)

    def without_adapter(self):
        """The same model, weights shared, with its adapter switched off."""
        model = copy.copy(self)
        model.adapter = None
        return model

    def forward(
        self, input_ids, position_ids, attention, tape=None, arena=None, adapter_ids=None, replayed=None, records=None
    ):
        """Hidden states (N, D) after the final norm, in the model's dtype.

        input_ids, position_ids: (N,) int32 on the device, ids below vocab_size and positions below
        num_positions (not checked here). attention: the attention backend, such as PackedAttention. tape: a
        new Tape, if backward is to be called. arena: activations come from it and are valid in the scope around this
        call; without a tape only the result is. adapter_ids: (N,) int32, each row's adapter in the AdapterStack, -1 for
        none; None: all rows have the first. replayed (L, N, k) int32: the experts of the L mixtures to take instead of
        the routers' choice, -1 for none; records: ExpertRecords that the experts are written to.
        """
        config, weights, memory = self.config, self.weights, arena or HeapAllocator()
        lora = None
        if self.adapter is not None:
            dropout = tape and tape.dropout
            numbers = projection_numbers(self.blocks) if dropout else None
            lora = LoraContext(self.adapter.layers, self.adapter.scales, adapter_ids, dropout, numbers)
        rotations = {kind: Rotation(*tables, position_ids) for kind, tables in self.ropes.items()}
        of_layers = tuple(rotations.get(kind) for kind in config.layer_kinds)
        if replayed is not None:
            replayed = dict(zip(config.mixture_layers, replayed, strict=True))
        choices = {"replayed_experts": replayed, "expert_records": records}
        ctx = ForwardContext(config, of_layers, attention, memory, lora, ranks=self.ranks, **choices)
        N, D = input_ids.shape[0], config.hidden_size
        hidden, rstd = memory.empty((N, D), self.dtype), memory.empty((N,), F32)
        if tape is None:
            with memory.scope():
                x = memory.empty((N, D), self.dtype)
                self._embed(input_ids, x)
                if self.ranks is not None:
                    x = self.ranks.own_columns(x, memory)
                out = memory.empty(x.shape, self.dtype)
                for index, blocks in enumerate(self.blocks):
                    for block, w in zip(blocks, weights.layer(index), strict=True):
                        with memory.scope():
                            block.forward(x, w, ctx, out)
                        x, out = out, x
                norm_rows(x, weights.norm, ctx, hidden, rstd)
            return hidden
        tape.ctx, tape.input_ids, router = ctx, input_ids, tape.router
        if router is not None:
            # The load is not the backward's, which may run layers again.
            tape.ctx = replace(ctx, router_gradient=router if router.has_gradient else None)
            ctx = replace(ctx, router_load=router.load)
        if lora is None:
            tape.token_list = list_tokens(input_ids, weights.embed_tokens.shape, config.pad_token_id)
        x = memory.empty((N, D), self.dtype)
        self._embed(input_ids, x)
        for index in range(len(self.blocks)):
            w, y = weights.layer(index), memory.empty((N, D), self.dtype)
            if tape.keeps_input_only(index):
                tape.layers.append(x)
                with memory.scope():
                    self._layer(index, x, w, ctx, y)
            else:
                tape.layers.append(self._layer(index, x, w, ctx, y, tape.modules))
            x = y
        rmsnorm(x, weights.norm, config.rms_norm_eps, hidden, rstd, config.norm_offset)
        tape.last = x, rstd
        if router is not None:
            router_loss(router.load, len(config.mixture_layers), router.weight, router.loss, router.slopes)
        return hidden

    def _embed(self, input_ids, x):
        embedding(input_ids, self.weights.embed_tokens, x)
        if self.embedding_scale is not None:
            scale(x, self.embedding_scale, x)

    def _layer(self, index, x, w, ctx, y, recomputed=()):
        """Run the blocks of a layer from x to y: what each saved, a list. y: None where it need not be computed."""
        blocks, saved = self.blocks[index], []
        for block, of_block in zip(blocks, w, strict=True):
            out = y if block is blocks[-1] else ctx.memory.empty(x.shape, self.dtype)
            saved.append(block.forward(x, of_block, ctx, out, recomputed))
            x = out
        return saved

    def logits(self, hidden, out, memory=None):
        """Write the logits (N, V) float32 of hidden states (N, D). Each of several ranks computes its columns of them
        in memory of an Arena, inside its scope."""
        if self.ranks is None:
            linear(hidden, self.lm_head, out)
        else:
            self.ranks.logits(hidden, self.lm_head, out, memory or HeapAllocator())

    def backward(self, dhidden, tape, grads, on_layer=None, embed_grads=None):
        """Add the gradients of all that is trained to `grads`, but for the heads' (model/heads.py).

        Each parameter's is complete before it is added, by one addition an element, so that the sum over micro-batches
        does not depend on where they are computed. The embedding's is added to embed_grads (V, D) f32, if given: that
        of a head with the same weights, to which grads.embed_tokens has not been added yet.

        dhidden: (N, D), the gradient of forward's result; tape: the one that forward wrote, emptied here; grads: those
        of `trained` (trained.grads()). Gradients of activations come from forward's arena, in a scope of their own.
        on_layer(index) is called as soon as those of a layer's matrices are complete, the last layer first; layers may
        then share the memory for them. Unless grads.adds they are written instead of added.
        """
        weights, ctx = self.weights, tape.ctx
        if ctx.lora is not None:
            ctx = replace(ctx, lora=replace(ctx.lora, grads=grads))
        ctx = replace(ctx, adds_gradients=on_layer is None or grads.adds)
        memory = ctx.memory
        with memory.scope():
            x, rstd = tape.last
            dx = memory.empty(x.shape, self.dtype)
            rmsnorm_backward(dhidden, x, weights.norm, rstd, dx, grads.norm, unit_offset=self.config.norm_offset)
            for index, blocks in reversed(list(enumerate(self.blocks))):
                w, saved = weights.layer(index), tape.layers.pop()
                with memory.scope():
                    if tape.keeps_input_only(index):
                        saved = self._layer(index, saved, w, ctx, None, tape.modules)
                    for i, block in reversed(list(enumerate(blocks))):
                        g = block.Weights() if ctx.lora is not None else grads.layers[index][i]
                        with memory.scope():
                            block.backward(dx, w[i], g, ctx, saved[i])
                    if on_layer is not None:
                        on_layer(index)
            if ctx.lora is not None:
                grads.zero_outside_blocks()
            else:
                # A padding token inside a text has its embedding, which is not trained, as in transformers.
                embed_grads = grads.embed_tokens if embed_grads is None else embed_grads
                if self.embedding_scale is not None:
                    scale(dx, self.embedding_scale, dx)
                embedding_backward(tape.input_ids, dx, embed_grads, self.config.pad_token_id, tape.token_list)
        tape.last, tape.token_list = (), None


def embedding_scale(config, dtype):
    """The factor of embeddings: sqrt(hidden_size), rounded to a dtype as in transformers; None where there is none."""
    return float(dtype.type(np.float32(config.hidden_size**0.5))) if config.scales_embedding else None


def _rope_of(config, theta, scaling):
    """The tables (cos, sin) of all positions of a model, on the device."""
    cos, sin = rope_table(config.num_positions, config.rotary_dim, theta, scaling)
    return device.asarray(cos), device.asarray(sin)


@dataclass(frozen=True)
class Batch:
    """Packed sequences on the device. input_ids, position_ids, targets (N,) int32; cu_seqlens (B + 1,) int32.

    targets: the next token inside each sequence, -100 at its end.
    """

    input_ids: object
    position_ids: object
    cu_seqlens: object
    targets: object
    max_seqlen: int
    lengths: list[int]
    prefixes: ClassVar[None] = None


def packed_positions(lengths):
    """(position_ids (N,), cu_seqlens (B + 1,)) int32 on the host, of sequences of these lengths laid end to end."""
    if 0 in lengths:
        raise ValueError(f"pack: sequence {list(lengths).index(0)} is empty")
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths), cu_seqlens


def pack(sequences):
    """A Batch of token id lists, end to end in the order given. ValueError for an empty sequence."""
    lengths = [len(ids) for ids in sequences]
    position_ids, cu_seqlens = packed_positions(lengths)
    input_ids = np.concatenate([np.asarray(ids, np.int32) for ids in sequences] or [np.empty(0, np.int32)])
    targets = np.append(input_ids[1:], np.int32(IGNORED))[: len(input_ids)]
    targets[cu_seqlens[1:] - 1] = IGNORED
    arrays = (device.asarray(array) for array in (input_ids, position_ids, cu_seqlens, targets))
    return Batch(*arrays, max_seqlen=max(lengths, default=0), lengths=lengths)


def packed_attention(model, batch, arena=None):
    """The attention backend of training and scoring for a batch with cu_seqlens, max_seqlen and prefixes."""
    return PackedAttention(batch.cu_seqlens, batch.max_seqlen, model.config.scale, arena, batch.prefixes)


class Score(NamedTuple):
    """The model's log-probs of packed tokens and what belongs to them, (N,) each, on the device.

    Entry n is about token n given those before it: logprobs float32 (0 at sequence starts), entropy float32 of
    the distribution it was drawn from (0 there), top1 int32, the likeliest id there (-1 at sequence starts).
    """

    logprobs: object
    entropy: object
    top1: object


def whole_sequences(lengths, max_tokens):
    """Slices of neighbouring sequences of at most max_tokens tokens together, or of a single longer one: iterator."""
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > max_tokens:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    if lengths:
        yield slice(start, len(lengths))


def score(model, batch, temperature=1.0, max_tokens=8192, arena=None):
    """The Score of a Batch, from the training forward, of logits divided by `temperature`.

    Whole sequences are taken together up to max_tokens tokens a forward, so that memory does not grow with the
    batch; how they are grouped does not change a bit. Raises UserError for a sequence longer than the model.
    """
    limit = model.config.num_positions
    if batch.max_seqlen > limit:
        raise UserError(f"a sequence of {batch.max_seqlen} tokens is longer than the model's {limit} positions")
    xp, N = device.xp(), int(batch.input_ids.shape[0])
    result = Score(xp.zeros(N, np.float32), xp.zeros(N, np.float32), xp.full(N, -1, np.int32))
    memory, end = arena or HeapAllocator(), 0
    for part in whole_sequences(batch.lengths, max_tokens):
        lengths = batch.lengths[part]
        tokens, start = sum(lengths), end
        end = start + tokens
        cu_seqlens = batch.cu_seqlens[part.start : part.stop + 1] - np.int32(start)
        attention = PackedAttention(cu_seqlens, max(lengths), model.config.scale, arena)
        with memory.scope():
            hidden = model.forward(batch.input_ids[start:end], batch.position_ids[start:end], attention, arena=arena)
            logprobs, lse, entropy = (memory.empty((tokens,), F32) for _ in range(3))
            top1 = memory.empty((tokens,), np.int32)
            targets = batch.targets[start:end]
            outputs = LogprobOutputs(logprobs, lse, entropy, top1)
            if model.ranks is None:
                linear_logp(hidden, model.lm_head, targets, temperature, outputs)
            else:
                model.ranks.linear_logp(hidden, model.lm_head, targets, temperature, *outputs)
            # The row before a sequence's start has target -100, which gave 0, 0 and -1.
            for shifted, values in zip(result, (logprobs, entropy, top1), strict=True):
                shifted[start + 1 : end] = values[:-1]
    return result


NOT_FINITE = "the model's log-probs are not finite: its weights hold NaN, or values too large for the dtype"


def check_finite(logprobs):
    """Raise UserError if a log-prob in a NumPy array is not finite."""
    if not np.isfinite(logprobs).all():
        raise UserError(NOT_FINITE)


def load_model(
    path_or_hub_id, dtype=None, heads=LM_HEAD, head_init="zeros", seed=0, base=None, shard=WHOLE, make_weights=Weights
):
    """A Transformer from a Hugging Face folder or hub id, or from those of an adapter, with its base.

    dtype: "float32", "bfloat16" or "float16"; by default the checkpoint's, and float32 on the cpu device, which
    has no other (ConfigError). heads: those of the result, one of HEADS; others in the folder are dropped. head_init,
    seed: the values of a score head that the folder does not have, "zeros" or "normal" (Weights.init_score). base: as
    find_base takes it. shard: the part of the model, and of the adapter, to read; the caller sets the model's `ranks`.
    make_weights: as load_weights takes it. Raises UserError naming the file, key or tensor at fault, or
    a folder without a language-model head where one is wanted.
    """
    folder, adapter_folder = find_base(path_or_hub_id, base)
    config = read_config(folder, adapter_folder)
    base_config = replace(read_config(folder), eos_token_ids=config.eos_token_ids)
    check_shard(shard, config)
    if "lm" in heads and "lm" not in config.heads:
        raise UserError(f"{folder}: {config.architecture} has no language-model head, only one that scores sequences")
    on_cpu = device.name() == "cpu"
    if on_cpu and dtype not in (None, "float32"):
        raise ConfigError(f"dtype {dtype}: the cpu device computes in float32 only")
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.exists() else {}
    dtype = dtype or ("float32" if on_cpu else config.dtype)
    weights = load_weights(folder, base_config, dtype, heads, shard, make_weights)
    if "score" in heads and "score" not in base_config.heads:
        weights.init_score(head_init, seed)
    model = Transformer(shard.config_of(weights.config), weights, generation_config)
    if adapter_folder is not None:
        model.adapter = load_adapter(adapter_folder, weights, dtype, str(folder))
    return model


class Checkpoint(NamedTuple):
    """The files of a model, and how load_model reads them.

    base: the folder of an adapter's base, None for a model; quantization: a QuantizationConfig, whose format the linear
    layers of the model have in memory, or None.
    """

    folder: Path
    base: Path | None = None
    dtype: str | None = None
    heads: tuple = LM_HEAD
    quantization: object = None

    def load(self, shard=WHOLE):
        """The Transformer, or a shard of it."""
        kind = weights_in(self.quantization)
        return load_model(self.folder, self.dtype, self.heads, base=self.base, shard=shard, make_weights=kind)

    def tokenizer(self):
        """The Tokenizer of the adapter or else of the base, None if neither has one."""
        folders = filter(None, (self.folder, self.base))
        return next(filter(None, map(Tokenizer.from_folder, folders)), None)


def check_shard(shard, config):
    """Raise ConfigError if a model cannot be cut like this on this device."""
    if shard.count == 1:
        return
    if device.name() == "sim":
        raise ConfigError(f"tensor_parallel_size {shard.count} needs GPUs, or --device cpu, where a rank is a process")
    shard.check(config, device.name() == "cuda")


def with_adapters(model, folders):
    """A model that shares its weights, with an AdapterStack of the adapters in PEFT folders, in their order."""
    if model.adapter is not None:
        raise ConfigError("several adapters need a model without one of its own")
    loaded = [load_adapter(folder, model.weights, model.dtype.name, "the model") for folder in map(find_model, folders)]
    for folder, adapter in zip(folders, loaded, strict=True):
        check_stackable(adapter.lora, folder)
    result = model.without_adapter()
    result.adapter = AdapterStack(model.config, model.dtype.name, loaded)
    return result


def host_copy(model, part=slice(None)):
    """A copy of a model, for saving alone: what is saved is on the host and does not change any more.

    part: the elements of weights.flat that are copied; an adapter is copied whole.
    """
    copied = copy.copy(model)
    if model.adapter is None:
        copied.weights = model.weights.host_copy(part)
    else:
        copied.adapter = model.adapter.host_copy()
    return copied


def save_model(model, folder, tokenizer=None, dtype=None, heads=None, write_weights=save_weights):
    """Write a Hugging Face folder that transformers and vLLM load: config.json, generation_config.json,
    *.safetensors in `dtype` (default: the model's), and the tokenizer's files if one is given.

    heads: those that are written, by default all; with both, transformers loads the causal language model. A model
    with an adapter is written as PEFT's folder of the adapter instead. write_weights: create_weights, to write no
    values yet. Raises UserError for a model where an adapter is, and the other way round.
    """
    folder = Path(folder)
    check_other_kind(folder, model.adapter is not None)
    folder.mkdir(parents=True, exist_ok=True)
    if model.adapter is not None:
        save_adapter(model.adapter, folder, heads)
        if tokenizer is not None:
            tokenizer.save(folder)
        return
    config = replace(model.config, dtype=dtype or model.dtype.name, heads=heads or model.config.heads)
    config = config.ending_at(tokenizer and tokenizer.eos_token_id)
    write_json(folder / "config.json", config.to_dict())
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    kept = {key: value for key, value in ids.items() if value is not None}
    write_json(folder / "generation_config.json", {**model.generation_config, **kept})
    if tokenizer is not None:
        tokenizer.save(folder)
    write_weights(model.weights, folder, config.dtype, config.heads)
