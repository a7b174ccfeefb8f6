"""Chains of kernels whose launches overlap (PDL) have the bits of kernels that run one after the other."""

import numpy as np
import pytest

from rlnumba.config.lora import LoraConfig
from rlnumba.engine import LLM, SamplingParams
from rlnumba.engine.few_rows import FewRowsDecoder
from rlnumba.engine.runner import Runner
from rlnumba.kernels.experts.ops import Dispatch, Routing, combine, dispatch, gather_rows, route
from rlnumba.kernels.gemm.ops import linear, linear_swiglu, reduce_rank
from rlnumba.kernels.gemm.reduction import Reduction
from rlnumba.kernels.nn.rmsnorm import rmsnorm
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.kernels.quantized.linear import packed_linear, packed_linear_swiglu
from rlnumba.kernels.quantized.ops import QuantizedWeight, quantize
from rlnumba.model.lora import Adapter
from rlnumba.model.transformer import pack, score
from rlnumba.runtime import device, launch
from rlnumba.runtime.dispatch import forced
from rlnumba.runtime.launch import pdl_scope
from tests.close import assert_same_bits
from tests.engine.test_llm import drawn, make_model

pytestmark = pytest.mark.sim
if device.name() != "sim":
    pytest.skip("the simulator runs each kernel as early as PDL allows", allow_module_level=True)


def test_a_layers_gemms_and_norms(rng):
    bf16, rows, hidden = device.dtype("bfloat16"), 3, 64

    def random(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(bf16)

    x, norm, up, down = random(rows, hidden), random(hidden), random(4 * hidden, hidden), random(hidden, 2 * hidden)

    def chain():
        """The stream after two MLP blocks: every array is written by one kernel and read by the next."""
        stream, normed = x.copy(), np.zeros_like(x)
        gate_up, activated = np.zeros((rows, 4 * hidden), bf16), np.zeros((rows, 2 * hidden), bf16)
        for _ in range(2):
            rmsnorm(stream, norm, 1e-6, normed, np.zeros(rows, np.float32))
            linear_swiglu(normed, up, gate_up, activated)
            linear(activated, down, stream, residual=stream)
        return stream

    with forced("sm90"):
        expected = chain()
        with pdl_scope():
            overlapped = chain()
    assert_same_bits(overlapped, expected)


def test_a_layers_gemms_by_packed_weights(rng):
    """The same with weights of 4 bits, whose copies wait for no kernel; its A, residual and outputs do."""
    bf16, rows, hidden = device.dtype("bfloat16"), 3, 128

    def packed(*shape):
        weight = QuantizedWeight.empty(FORMATS["int4"], shape, 64, "bfloat16")
        quantize((rng.standard_normal(shape) / shape[-1] ** 0.5).astype(bf16), 0, weight)
        return weight

    x, up, down = rng.standard_normal((rows, hidden)).astype(bf16), packed(2 * hidden, hidden), packed(hidden, hidden)

    def chain():
        stream, gate_up, activated = x.copy(), np.zeros((rows, 2 * hidden), bf16), np.zeros((rows, hidden), bf16)
        for _ in range(2):
            packed_linear_swiglu(stream, up, gate_up, activated)
            packed_linear(activated, down, stream, residual=stream)
        return stream

    with forced("sm90"):
        expected = chain()
        with pdl_scope():
            overlapped = chain()
    assert_same_bits(overlapped, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_a_layers_gemms_with_an_adapter(rng, packed):
    """The same with an adapter, whose first products are in the kernels; the counters there are zeros for each one."""
    bf16, rows, hidden, rank = device.dtype("bfloat16"), 3, 128, 16

    def random(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(bf16)

    def weight(*shape):
        if not packed:
            return random(*shape)
        found = QuantizedWeight.empty(FORMATS["int4"], shape, 64, "bfloat16")
        quantize(random(*shape), 0, found)
        return found

    x, up, down, scales = random(rows, hidden), weight(2 * hidden, hidden), weight(hidden, hidden), np.float32([2])
    (up_a, up_b), (down_a, down_b) = ((random(rank, hidden), random(n, rank)) for n in (2 * hidden, hidden))

    def chain(in_kernel):
        stream, gate_up, activated = x.copy(), np.zeros((rows, 2 * hidden), bf16), np.zeros((rows, hidden), bf16)
        # One place for both, as an arena has: the next kernel writes what this one still reads.
        xa = np.zeros((rows, rank), bf16)
        reductions = [Reduction(a, scales) for a in (up_a, down_a)]
        for _ in range(2):
            for x_of, reduction in zip((stream, activated), reductions, strict=True):
                of_kernel = reduction if in_kernel else None
                if not in_kernel:
                    reduce_rank(x_of, reduction, xa)
                if x_of is stream:
                    swiglu = packed_linear_swiglu if packed else linear_swiglu
                    swiglu(stream, up, gate_up, activated, (xa, up_b), reduction=of_kernel)
                else:
                    product = packed_linear if packed else linear
                    product(activated, down, stream, None, stream, (xa, down_b), of_kernel)
        return stream

    with forced("sm90"):
        expected = chain(False)
        assert_same_bits(chain(True), expected)
        with pdl_scope():
            overlapped = chain(True)
    assert_same_bits(overlapped, expected)


def test_experts_of_a_layer(rng):
    """Router, dispatch, rows of experts and their sum, one after the other."""
    bf16, tokens, num_experts, top_k, columns = device.dtype("bfloat16"), 3, 8, 2, 64
    x, router = (rng.standard_normal((n, columns), np.float32).astype(bf16) for n in (tokens, num_experts))

    def chain():
        """Every array is written by one kernel and read by the next; the experts themselves change nothing."""
        scores, routing = np.zeros((tokens, num_experts), bf16), Routing.empty(tokens, top_k, bf16, np.zeros)
        dispatched = Dispatch.empty(tokens, top_k, num_experts, np.zeros)
        rows, out = np.zeros((tokens * top_k, columns), bf16), np.zeros((tokens, columns), bf16)
        linear(x, router, scores)
        route(scores, True, routing)
        dispatch(routing.experts, dispatched)
        gather_rows(x, dispatched, rows)
        combine(rows, routing.weights, dispatched, out)
        return scores, *routing, *dispatched, rows, out

    with forced("sm90"):
        expected = chain()
        with pdl_scope():
            overlapped = chain()
    for found, wanted in zip(overlapped, expected, strict=True):
        assert_same_bits(found, wanted)


def test_decode_steps_of_the_engine(monkeypatch):
    """Every kernel of a decode step, from the embedding to the sampled token and the next step's state."""
    model = make_model(
        "bfloat16", vocab_size=20, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    params = SamplingParams(temperature=0.8, max_tokens=2, n=2, ignore_eos=True)
    compute = Runner.compute
    # The layers of a decode step are separate kernels.
    monkeypatch.setattr(FewRowsDecoder, "supports", lambda *_: False)

    def overlapped(runner, *step):
        with pdl_scope():
            compute(runner, *step)

    with forced("sm90"):
        expected = drawn(LLM(model).generate([[1, 2, 3]], params))
        monkeypatch.setattr(Runner, "compute", overlapped)
        assert drawn(LLM(model).generate([[1, 2, 3]], params)) == expected


def overlap_steps(monkeypatch):
    """Run the engine's steps in a pdl_scope; returns a list that gets (shape, names of its kernels) of each."""
    compute, steps = Runner.compute, []

    def overlapped(runner, arrays, shape, *part):
        names = []
        steps.append((shape, names))
        launch.observers.append(observe := lambda kernel, _: names.append(kernel.py_func.__name__))
        with pdl_scope():
            compute(runner, arrays, shape, *part)
        launch.observers.remove(observe)

    monkeypatch.setattr(Runner, "compute", overlapped)
    return steps


def test_decode_steps_with_an_adapter(rng, monkeypatch):
    """The kernels of a decode step that compute x A^T beside x W^T have the bits of training."""
    model = make_model(
        "bfloat16", vocab_size=20, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    model.adapter = Adapter.new(model.config, LoraConfig(r=4), "bfloat16", "", 0)
    for pair in model.adapter.layers[0].values():
        pair.b[...] = rng.standard_normal(pair.b.shape) / 4
    params = SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True)
    steps = overlap_steps(monkeypatch)
    with forced("sm90"):
        output = LLM(model).generate([[1, 2, 3]], params)[0].completions[0]
        # More rows than the GEMMs of few rows take: the training forward of other kernels.
        ids = [[1, 2, 3, *output.token_ids], np.arange(20).repeat(4)[:70].tolist()]
        logprobs = score(model, pack(ids), params.temperature).logprobs
    of_decode = [names for shape, names in steps if shape.max_seqlen_q == 1]
    assert len(of_decode) >= 2 and not any("scale_adapters_kernel" in names for names in of_decode)
    assert_same_bits(output.array("logprobs"), device.to_host(logprobs)[3:6])


def test_decode_steps_with_linear_attention(monkeypatch):
    """The kernel of a layer's decode step reads its state before the kernels ahead have ended: the bits of training."""
    model = make_model(
        "bfloat16", model_type="qwen3_5_text", vocab_size=20, hidden_size=64, intermediate_size=64, head_dim=64,
        num_attention_heads=2, num_key_value_heads=1, layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=4, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=128,
        linear_value_head_dim=128, hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    params = SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True)
    steps = overlap_steps(monkeypatch)
    with forced("sm90"):
        output = LLM(model).generate([[1, 2, 3]], params)[0].completions[0]
        ids = [1, 2, 3, *output.token_ids]
        logprobs = score(model, pack([ids]), params.temperature).logprobs
    assert len([shape for shape, _ in steps if shape.max_seqlen_q == 1]) >= 2
    assert_same_bits(output.array("logprobs"), device.to_host(logprobs)[-3:])
