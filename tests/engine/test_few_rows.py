"""Decode steps of few sequences: the persistent kernel, or the separate ones, and the same text."""

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine import LLM, SamplingParams
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.engine.few_rows import FewRowsDecoder
from tests.graph_edges import edges_of
from tests.kernels.test_decoder import model_of

SHAPE = {
    "vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def completions_of(model, sequences, **config):
    """(token ids, log-probs) of so many prompts of several lengths, one of which outgrows the kernel's contexts."""
    llm = LLM(model, None, EngineConfig(num_gpu_blocks_override=1000, **config))
    generator = np.random.default_rng(0)
    prompts = [generator.integers(1, 1000, (20, 990, 130)[i % 3]).tolist() for i in range(sequences)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=80, ignore_eos=True))
    return [(done.token_ids, done.logprobs) for output in outputs for done in output.completions]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_texts_are_those_of_the_separate_kernels(monkeypatch, sequences):
    model, steps = model_of(**SHAPE), []
    forward = FewRowsDecoder.forward

    def counted(self, *arguments):
        steps.append(self)
        return forward(self, *arguments)

    monkeypatch.setattr(FewRowsDecoder, "forward", counted)
    found = [completions_of(model, sequences), completions_of(model, sequences, enforce_eager=True)]
    assert len(steps) > 20
    monkeypatch.setattr(FewRowsDecoder, "supports", lambda *_: False)
    assert found == [completions_of(model, sequences)] * 2


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("sequences", [12, 40])
def test_kernels_of_a_decode_graph_follow_each_other_by_pdl(sequences):
    """Each kernel of a captured decode step begins while the one before it runs, but for that after the list of items.

    Attention reads that list before its griddepcontrol.wait.
    """
    llm = LLM(model_of(**SHAPE), None, EngineConfig(num_gpu_blocks_override=1000))
    prompts = [[1 + i, 2, 3] for i in range(sequences)]
    llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    graphs = [
        step.graph
        for key, step in llm.engine.runner.graphs.items()
        if step.graph is not None and key.shape.max_seqlen_q == 1
    ]
    assert graphs
    for graph in graphs:
        edges = [edge for edge in edges_of(graph) if edge.source and edge.target]
        assert len([edge for edge in edges if "gemm_sm90" in edge.target]) >= 4 * SHAPE["num_hidden_layers"]
        serialized = [edge.source for edge in edges if not edge.is_programmatic]
        assert len(serialized) == 1 and "list_work_items" in serialized[0]


def test_without_its_kernels_nothing_is_supported():
    decoder = FewRowsDecoder(model_of(), BLOCK_SIZE)
    assert not decoder.supports({"context_lens": np.ones(1, np.int32)}, 1, 256)
