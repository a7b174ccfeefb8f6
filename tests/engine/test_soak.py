"""A short run of bench/soak.py: a full cache, stop strings and aborts at any time, every block returned, equal text."""

import importlib
import pathlib
from collections import Counter

import numpy as np
import pytest

from rlnumba.engine import Engine
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model

ROOT = pathlib.Path(__file__).parent.parent
LONGEST = 128


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT.parent / "bench"))
    return importlib.import_module("soak")


@pytest.mark.parametrize("caching", [True, False])
def test_requests_at_a_full_cache_return_all_blocks_and_have_their_own_text(soak, caching):
    folder = ROOT / "golden" / "tiny-qwen3"
    model, tokenizer = load_model(folder, "float32"), Tokenizer(folder)
    vocab_size = model.config.vocab_size
    stop = soak.stop_strings(model, tokenizer, vocab_size, LONGEST)
    requests = soak.Requests(vocab_size, LONGEST, stop, seed=caching)
    engine = soak.soak_engine(model, tokenizer, LONGEST, max_num_seqs=12, enable_prefix_caching=caching)
    count = 100
    sample = set(np.random.default_rng(1).choice(count, 40, replace=False).tolist())
    kept, counters = soak.soak(engine, requests, count, sample, log=None)
    assert counters["full"] > 0.5 and counters["preemptions"] > 5 and counters["aborted"] > 5, counters
    reasons = Counter(completion.finish_reason for completion in kept.values())
    assert len(kept) > 30 and reasons["stop"] > 5 and reasons["length"] > 5
    changed = max(kept)
    kept[changed].logprobs[-1] += 1e-6
    assert soak.different_alone(model, tokenizer, requests, kept, log=None) == [changed]


def test_a_block_that_is_not_returned_is_found(soak, monkeypatch):
    folder = ROOT / "golden" / "tiny-qwen3"
    model = load_model(folder, "float32")
    engine = soak.soak_engine(model, None, LONGEST, max_num_seqs=4)
    requests = soak.Requests(model.config.vocab_size, LONGEST, [])
    monkeypatch.setattr(requests, "request", lambda number: ([1, 2], soak.SamplingParams(max_tokens=4)))
    leaked, abort = [], Engine.abort

    def leak(engine, number):
        abort(engine, number)
        if engine.blocks.num_free and not leaked:
            leaked.extend(engine.blocks.allocate(1))

    monkeypatch.setattr(soak, "ABORTS", 0.2)
    monkeypatch.setattr(Engine, "abort", leak)
    with pytest.raises(AssertionError, match="were not returned"):
        soak.soak(engine, requests, 20, set(), log=None)
    assert leaked
