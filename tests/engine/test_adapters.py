"""Adapters that come and go while an engine runs: each request has the bits that it has with its adapter alone."""

import asyncio
import dataclasses
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba import LLM, AsyncLLM, LoRARequest, SamplingParams
from rlnumba.config import EngineConfig
from rlnumba.engine import adapters
from rlnumba.engine.adapters import NamedAdapters, adapter_of, for_adapters, read_for
from rlnumba.engine.core import Engine, PromptError
from rlnumba.errors import ConfigError, UserError
from rlnumba.model import lora
from rlnumba.model.adapter_stack import AdapterStack
from rlnumba.model.transformer import load_model, save_model
from rlnumba.model.weights import open_tensors, write_tensors
from rlnumba.runtime import device, memory
from tests.close import assert_same_bits
from tests.model.test_lora import MODEL, golden_adapter, random_adapter, saved_adapters

# Fills a block of the cache, which others with the same adapter match.
PROMPT = [3 + (5 * i) % 40 for i in range(37)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, n=2, seed=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder} of adapters of other ranks and targets, PEFT's own among them."""
    found = saved_adapters(tmp_path_factory.mktemp("adapters"))
    return found | {"peft": golden_adapter("all_linear"), "rslora": golden_adapter("qv_rslora")}


@pytest.fixture(scope="module")
def alone(folders):
    """The completions of PROMPT with an adapter in an engine that has no other one; None: without any."""

    def draw(name):
        if name not in known:
            model = load_model(MODEL) if name is None else load_model(folders[name], base=MODEL)
            (output,) = LLM(model).generate([PROMPT], PARAMS)
            known[name] = drawn(output.completions)
        return known[name]

    known = {}
    return draw


def drawn(completions):
    """What has to be equal of completions."""
    return [(c.token_ids, c.array("logprobs").tobytes()) for c in completions]


class Running:
    """An engine with NamedAdapters, whose requests have the names of adapters."""

    def __init__(self, folders, most=4, **config):
        self.engine, self.folders = Engine(for_adapters(load_model(MODEL)), None, EngineConfig(**config)), folders
        self.adapters, self.users, self.found, self.cached = NamedAdapters(self.engine, most), {}, {}, {}

    def load(self, name, folder=None, **options):
        folder = self.folders[folder or name]
        return self.adapters.load(name, folder, read_for(self.engine.model, folder), **options)

    def submit(self, request_id, name):
        loaded = self.users[request_id] = None if name is None else self.adapters.acquire(name)
        self.engine.add_request(request_id, PROMPT, PARAMS, -1 if loaded is None else loaded.adapter_id)

    def steps(self, count=10**6):
        while self.engine.has_unfinished and count:
            count -= 1
            for request_id, index, completion in self.engine.step().finished:
                of_request = self.found.setdefault(request_id, {})
                of_request[index] = completion
                if len(of_request) == PARAMS.n:
                    if self.users[request_id] is not None:
                        self.adapters.release(self.users[request_id])
                        self.adapters.collect()
                    self.cached[request_id] = of_request[0].num_cached_tokens

    def of(self, request_id):
        return drawn([completion for _, completion in sorted(self.found[request_id].items())])


@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}, {"enforce_eager": True}])
def test_a_mixed_batch_is_each_alone(folders, alone, config):
    running = Running(folders, **config)
    running.submit("base", None)
    running.steps(2)
    running.load("peft")
    running.submit("a", "peft")
    running.steps(3)
    # More columns, and projections that the first one does not have, while requests run.
    for name in ("wide", "one"):
        running.load(name)
        running.submit(name, name)
        running.submit(f"{name} again", name)
        running.steps(1)
    running.adapters.unload("peft")
    assert "peft" not in running.adapters.by_name and running.adapters.acquire("peft") is None
    # Nor is the slot of one that is still used given to the next.
    running.load("rslora")
    running.submit("b", "rslora")
    running.steps()
    expected = {"base": None, "a": "peft", "wide": "wide", "wide again": "wide", "one": "one", "b": "rslora"}
    for request_id, name in expected.items():
        assert running.of(request_id) == alone(name), request_id
    assert len({str(alone(name)) for name in expected.values()}) == 5
    assert not running.adapters.leaving and not running.engine.requests
    assert running.engine.blocks.num_free == running.engine.blocks.num_blocks


def test_new_weights_in_place_match_no_old_block(folders, alone):
    running = Running(folders, most=1)
    first = running.load("a", "peft")
    running.submit("old", "a")
    running.steps()
    running.submit("again", "a")
    running.steps(2)
    # It runs while the weights are replaced, and keeps those that it began with.
    with pytest.raises(ConfigError, match="adapter 'a' is loaded"):
        running.load("a", "wide")
    second = running.load("a", "wide", in_place=True)
    running.submit("new", "a")
    with pytest.raises(ConfigError, match="1 unloaded adapters are still used by requests, and max_loras is 1"):
        running.load("a", "one", in_place=True)
    running.steps()
    assert first.adapter_id != second.adapter_id
    assert running.of("old") == running.of("again") == alone("peft") and running.of("new") == alone("wide")
    assert (running.cached["again"], running.cached["new"]) == (32, 0)
    # The freed slot is taken again, and an equal number of slots has the same arrays.
    generation = running.engine.model.adapter.generation
    third = running.load("a", "all", in_place=True)
    assert running.engine.adapters.of_id == {third.adapter_id: 0}
    assert running.engine.model.adapter.generation == generation
    running.submit("third", "a")
    running.steps()
    assert running.of("third") == alone("all") and running.cached["third"] == 0
    # Nothing is left of a wider one that has had the slot.
    fourth = running.load("a", "one", in_place=True)
    assert running.engine.adapters.of_id == {fourth.adapter_id: 1}
    running.submit("fourth", "a")
    running.steps()
    assert running.of("fourth") == alone("one")


def test_the_number_of_adapters_is_bounded(folders):
    running = Running(folders, most=2)
    running.load("peft")
    running.load("one")
    with pytest.raises(ConfigError, match="2 adapters are loaded, and max_loras is 2: unload one"):
        running.load("wide")
    running.adapters.unload("one")
    running.load("wide")
    with pytest.raises(ConfigError, match="adapter 'one' is not loaded"):
        running.adapters.unload("one")
    with pytest.raises(ConfigError, match="adapter_id 1: the engine has no such adapter"):
        running.engine.add_request("x", PROMPT, PARAMS, 1)
    assert not running.engine.requests


def test_memory_is_that_of_the_slots(folders):
    model = for_adapters(load_model(MODEL))
    before = memory.allocated("adapter")
    stack = model.adapter
    read = {name: adapter_of(model, read_for(model, folder)) for name, folder in folders.items()}
    of_adapters = sum(adapter.nbytes for adapter in read.values())
    slots = [stack.put(adapter) for adapter in read.values()]
    assert slots == list(range(5)) and stack.num_slots == 8
    assert memory.allocated("adapter") == before + of_adapters + stack.nbytes
    for slot in slots:
        stack.remove(slot)
    assert (stack.num_slots, stack.nbytes, stack.layers) == (0, 0, [{}, {}])
    assert memory.allocated("adapter") == before + of_adapters
    # Those given at first have a slot each.
    stack = AdapterStack(model.config, "float32", list(read.values()))
    assert stack.num_slots == 5
    held = stack.nbytes
    del stack
    assert held and memory.allocated("adapter") == before + of_adapters


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_slots_have_the_adapters_values_on_a_gpu(folders, dtype):
    """In 16 bits, for whose slices CuPy has copies of its own; a slot that was left is zero outside of the next one."""
    model = for_adapters(load_model(MODEL, dtype))
    read = {name: adapter_of(model, read_for(model, folder)) for name, folder in folders.items()}
    stack = model.adapter
    slots = {name: stack.put(adapter) for name, adapter in read.items()}
    stack.remove(slots.pop("wide"))
    slots["one again"] = stack.put(read["one"])
    read["one again"] = read["one"]
    for name, slot in slots.items():
        for layer, own in zip(stack.layers, read[name].layers, strict=True):
            for projection, pair in layer.items():
                a, b = (device.to_host(part).astype(np.float32) for part in stack.part(pair, slot))
                expected_a, expected_b = np.zeros_like(a), np.zeros_like(b)
                if projection in own:
                    count = len(own[projection].a)
                    expected_a[:count] = device.to_host(own[projection].a).astype(np.float32)
                    expected_b[:, :count] = device.to_host(own[projection].b).astype(np.float32)
                assert_same_bits(a, expected_a, name)
                assert_same_bits(b, expected_b, name)


def test_an_adapter_that_cannot_be_loaded_is_named(folders, tmp_path):
    model = for_adapters(load_model(MODEL))

    def fails(folder, line):
        with pytest.raises(UserError, match=line) as caught:
            read_for(model, folder)
        assert str(folder) in str(caught.value)

    fails(tmp_path / "none", "no such adapter folder")
    fails(MODEL, "not an adapter folder")
    for name, change in (("nan", np.nan), ("inf", np.inf)):
        shutil.copytree(folders["one"], tmp_path / name)
        files = open_tensors(tmp_path / name / "adapter_model.safetensors")
        tensors = {key: np.array(files[key].read(), np.float32) for key in files}
        next(iter(tensors.values()))[0, 0] = change
        write_tensors(tmp_path / name / "adapter_model.safetensors", tensors, {"format": "pt"})
        fails(tmp_path / name, "a value is NaN or beyond float32")
    for name, r, line in (("other", 3, "wrong shapes"), ("huge", 10**15, "at most 5 rows of A, and .* has r 10000000")):
        shutil.copytree(folders["all"], tmp_path / name)
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config | {"r": r}))
        fails(tmp_path / name, line)
    with pytest.raises(ConfigError, match="several adapters need a model without one"):
        for_adapters(random_adapter(load_model(MODEL)))


@pytest.mark.parametrize("size", [0, 3000])
def test_a_file_that_is_written_to_meanwhile_is_named(folders, tmp_path, monkeypatch, size):
    """Cut short after its header was read, and as long as before, with other values."""
    shutil.copytree(folders["all"], tmp_path / "torn")
    path, opened = tmp_path / "torn/adapter_model.safetensors", lora.open_tensors

    def open_and_change(given):
        found = opened(given)
        content = path.read_bytes()
        path.write_bytes(content[:size] if size else content)
        os.utime(path, ns=(0, 0))
        return found

    monkeypatch.setattr(lora, "open_tensors", open_and_change)
    with pytest.raises(UserError, match="adapter_model.safetensors: it was written to while it was read"):
        read_for(for_adapters(load_model(MODEL)), tmp_path / "torn")


def test_lora_request_is_an_adapter(folders, alone):
    llm = LLM(load_model(MODEL), enable_lora=True, max_loras=2, max_lora_rank=64)
    sql, other = LoRARequest("sql", 1, str(folders["peft"])), LoRARequest("other", 2, str(folders["one"]))
    outputs = llm.generate([PROMPT] * 3, PARAMS, lora_request=[sql, None, other])
    assert [drawn(output.completions) for output in outputs] == [alone("peft"), alone(None), alone("one")]
    (again,) = llm.generate([PROMPT], PARAMS, lora_request=LoRARequest("sql", 1, str(folders["peft"])))
    assert drawn(again.completions) == alone("peft")
    assert [request.lora_name for request in llm.requested.ids] == ["other", "sql"]
    *_, last = llm.stream([PROMPT], PARAMS, lora_request=other)
    assert drawn(last[1].completions) == alone("one")
    # The two used last are kept, and all of a call.
    for number, names in enumerate((["wide"], ["all", "wide", "rslora"], ["one"])):
        wanted = [LoRARequest(name, 5 + number, str(folders[name])) for name in names]
        outputs = llm.generate([PROMPT] * len(names), PARAMS, lora_request=wanted)
        assert [drawn(output.completions) for output in outputs] == [alone(name) for name in names]
        assert [request.lora_name for request in llm.requested.ids][-len(names) :] == names
        assert len(llm.requested.ids) == len(llm.engine.adapters.of_id) == max(len(names), 2)
    with pytest.raises(ConfigError, match="max_loras must be an integer >= 1, got 0"):
        LLM(load_model(MODEL), enable_lora=True, max_loras=0)
    with pytest.raises(TypeError, match="an adapter is a name or a LoRARequest, or a list of them, got int"):
        llm.generate([PROMPT], PARAMS, lora_request=1)
    with pytest.raises(TypeError, match="adapters and lora_request are the same"):
        llm.generate([PROMPT], PARAMS, adapters="a", lora_request=sql)
    with pytest.raises(ConfigError, match="lora_int_id must be an integer above 0, got 0"):
        LoRARequest("a", 0, "b")
    with pytest.raises(ConfigError, match=r"lora_request needs LLM\(..., enable_lora=True\)"):
        LLM(load_model(MODEL)).generate([PROMPT], PARAMS, lora_request=sql)


def test_an_adapter_that_a_request_still_has_is_not_removed(monkeypatch):
    removed, numbers = [], iter(range(9))
    monkeypatch.setattr(adapters, "find_model", lambda path: path)
    monkeypatch.setattr(adapters, "read_for", lambda model, folder: None)
    monkeypatch.setattr(adapters, "adapter_of", lambda model, read: None)
    monkeypatch.setattr(adapters, "add_adapter", lambda engine, adapter: next(numbers))
    monkeypatch.setattr(adapters, "remove_adapter", lambda engine, number: removed.append(number))
    engine = SimpleNamespace(model=None, requests={5: {0: SimpleNamespace(adapter_id=0)}})
    requested = adapters.RequestedAdapters(engine, 1)
    first, second = (LoRARequest(name, number, name) for number, name in enumerate("ab", 1))
    requested.load([first])
    requested.load([second])
    assert removed == [] and requested.ids == {first: 0, second: 1}
    engine.requests.clear()
    requested.load([second])
    assert removed == [0] and requested.ids == {second: 1}


def test_lora_request_of_a_coroutine(folders, alone, monkeypatch):
    """Its adapter is loaded while others run, of which one ends with a prompt that has no log-probs."""
    llm = AsyncLLM(load_model(MODEL), enable_lora=True)
    engine, damaged = llm.llm.engine, []
    synchronize = engine.synchronize

    def synchronize_once():
        lengths = {number: next(iter(each.values())).params.max_tokens for number, each in engine.requests.items()}
        if 150 in lengths.values() and not damaged:
            damaged.extend(number for number, length in lengths.items() if length == 150)
            raise PromptError(damaged[0], "no numbers", tuple(damaged))
        synchronize()

    async def last(params, name, start=None):
        if start is not None:
            await start.wait()
        request = None if name is None else LoRARequest(name, 1, str(folders[name]))
        return [output async for output in llm.generate(PROMPT, params, lora_request=request)][-1]

    async def together():
        start, long = asyncio.Event(), dataclasses.replace(PARAMS, max_tokens=150)
        tasks = [asyncio.create_task(last(*each)) for each in ((long, None), (PARAMS, None), (PARAMS, "wide", start))]
        async for _ in llm.generate(PROMPT, PARAMS):
            monkeypatch.setattr(engine, "synchronize", synchronize_once)
            start.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    error, plain, wide = asyncio.run(together())
    assert isinstance(error, PromptError) and error.reason == "no numbers"
    assert drawn(plain.completions) == alone(None) and drawn(wide.completions) == alone("wide")
    llm.shutdown()


def test_lora_request_beside_named_adapters(folders, alone, tmp_path):
    save_model(random_adapter(load_model(MODEL), 7), tmp_path / "seventh")
    llm = LLM(load_model(MODEL), adapters={"wide": folders["wide"]})
    request = LoRARequest("one", 1, str(folders["one"]))
    outputs = llm.generate([PROMPT] * 2, PARAMS, adapters=["wide", request])
    assert [drawn(output.completions) for output in outputs] == [alone("wide"), alone("one")]
