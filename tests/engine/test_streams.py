"""Outputs that grow, LLM.stream and AsyncLLM: each begins the next, the last is that of LLM.generate."""

import asyncio
import dataclasses
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba import AsyncLLM
from rlnumba.engine import LLM, PromptError, SamplingParams
from rlnumba.engine.adapters import LoRARequest
from rlnumba.engine.episodes import GroupRequest
from rlnumba.engine.requests.streams import OpenRequest, Streams
from rlnumba.engine.sequence import StepOutput
from rlnumba.errors import ConfigError
from tests.engine.test_llm import FOLDER, make_model

PROMPTS = ["what is 3+4? ", {"prompt": "a"}, [5, 6, 7]]
PARAMS = [
    SamplingParams(max_tokens=12, n=2, seed=3, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=9, temperature=0, logprobs=None, stop="z"),
    SamplingParams(max_tokens=1, skip_special_tokens=False),
]


def check_growth(outputs, wanted):
    """Whether an output's texts, tokens and log-probs begin those of the next, and the last is the one of generate."""
    assert outputs[-1].completions == wanted.completions and outputs[-1].finished
    assert outputs[-1].prompt_logprobs == wanted.prompt_logprobs and outputs[-1].prompt == wanted.prompt
    assert not any(output.finished for output in outputs[:-1])
    for before, after in zip(outputs, outputs[1:], strict=False):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert other.token_ids[: len(one.token_ids)] == one.token_ids and other.text.startswith(one.text)
            assert one.logprobs == (one.logprobs and other.logprobs[: len(one.logprobs)])
        assert sum(len(each.token_ids) for each in before.outputs) < sum(len(each.token_ids) for each in after.outputs)


def test_a_stream_grows_to_what_generate_returns():
    llm = LLM(FOLDER)
    wanted, found = llm.generate(PROMPTS, PARAMS), [[], [], []]
    for index, output in llm.stream(PROMPTS, PARAMS):
        found[index].append(output)
    for outputs, each in zip(found, wanted, strict=True):
        check_growth(outputs, each)
    assert len(found[1]) == len(wanted[1].outputs[0].token_ids) > 1
    next(llm.stream(PROMPTS, PARAMS))
    assert not llm.engine.has_unfinished and llm.generate(PROMPTS, PARAMS) == wanted


@pytest.mark.parametrize("logprobs", [True, False, None, 0, 2])
def test_a_growing_completion_has_the_log_prob_of_its_tokens(logprobs):
    params = SamplingParams(max_tokens=3, seed=3, logprobs=logprobs)
    outputs = [output.outputs[0] for _, output in LLM(FOLDER).stream(PROMPTS[:1], params)]
    every = outputs[-1].array("logprobs")
    for output in outputs:
        assert output.array("logprobs").tolist() == every[: len(output.token_ids)].tolist()
        assert (output.cumulative_logprob is None) == (logprobs is None)


def test_the_beginning_of_a_stop_string_is_not_handed_out():
    llm, free = LLM(FOLDER), SamplingParams(max_tokens=20, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[:1], free)
    params = dataclasses.replace(free, stop=output.outputs[0].text[6:9])
    (wanted,) = llm.generate(PROMPTS[:1], params)
    assert len(wanted.outputs[0].text) <= 6 and wanted.outputs[0].finish_reason == "stop"
    check_growth([output for _, output in llm.stream(PROMPTS[:1], params)], wanted)


def test_coroutines_share_an_engine():
    """Their requests are one batch; one that is left early is dropped."""
    llm, wanted = AsyncLLM(FOLDER), LLM(FOLDER).generate(PROMPTS, PARAMS)

    async def outputs_of(prompt, params):
        outputs = [output async for output in llm.generate(prompt, params, request_id=f"my {prompt}")]
        assert {output.request_id for output in outputs} == {f"my {prompt}"}
        return outputs

    async def left_early():
        iterator = llm.generate("what is ", SamplingParams(max_tokens=300, ignore_eos=True))
        async for _ in iterator:
            break
        await iterator.aclose()

    async def together():
        *found, _ = await asyncio.gather(*map(outputs_of, PROMPTS, PARAMS), left_early())
        with pytest.raises(ConfigError, match="stop_token_ids"):
            await outputs_of("a", SamplingParams(stop_token_ids=[10**6]))
        return found

    for _ in range(2):
        for outputs, each in zip(asyncio.run(together()), wanted, strict=True):
            check_growth(outputs, each)
    llm.shutdown()
    assert not llm.llm.engine.has_unfinished


def test_a_task_that_is_cancelled_while_its_request_is_submitted_drops_it(monkeypatch):
    llm, began, goes_on = AsyncLLM(FOLDER), threading.Event(), threading.Event()

    def compile_ahead(*arguments):
        began.set()
        goes_on.wait(60)

    monkeypatch.setattr(llm.llm, "compile_ahead", compile_ahead)

    async def cancelled():
        task = asyncio.create_task(anext(llm.generate("what is ", SamplingParams(max_tokens=300, ignore_eos=True))))
        await asyncio.to_thread(began.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()

    asyncio.run(cancelled())
    llm.shutdown()
    assert not llm.llm.engine.has_unfinished and not llm._streams.open


def test_wrong_arguments_of_a_coroutine_are_those_of_generate():
    llm, lora = AsyncLLM(FOLDER), LoRARequest("a", 1, "folder")
    for keys, line in (
        ({"sampling_params": {"n": 2}}, "sampling_params must be SamplingParams, got dict"),
        ({"adapter": "a", "lora_request": lora}, "adapters and lora_request are the same, and both are given"),
        ({"adapter": 1}, "an adapter is a name or a LoRARequest, .* got int"),
    ):
        with pytest.raises(TypeError, match=f"^generate: {line}"):
            asyncio.run(anext(llm.generate("a", **keys)))
    llm.shutdown()
    assert not llm._queues


def test_a_damaged_prompt_ends_alone():
    model = make_model(tie_word_embeddings=False)
    model.weights.embed_tokens[7] = np.nan
    llm = AsyncLLM(model)
    params = SamplingParams(max_tokens=1)
    wanted = LLM(make_model(tie_word_embeddings=False)).generate([[5, 6]], params)

    async def last(prompt):
        return [output async for output in llm.generate(prompt, params)][-1]

    async def together():
        return await asyncio.gather(last([5, 6]), last([5, 7]), return_exceptions=True)

    found, error = asyncio.run(together())
    assert found.completions == wanted[0].completions and isinstance(error, PromptError)
    with pytest.raises(PromptError, match="not finite"):
        list(LLM(model).stream([[5, 7]], params))
    llm.shutdown()


def test_completions_that_are_done_stay_when_another_request_is_damaged():
    """The others are drawn again, and the last output has them all."""
    model = make_model(tie_word_embeddings=False)
    model.weights.embed_tokens[7] = np.nan
    streams, params = Streams(LLM(model).engine), SamplingParams(n=4, max_tokens=60, seed=3, logit_bias={7: -100})
    (wanted,) = LLM(make_model(tie_word_embeddings=False)).generate([[5, 6]], params)
    lengths = [len(each.token_ids) for each in wanted.completions]
    streams.submit(0, [5, 6], params)
    outputs, errors = [], []
    while streams.open:
        has_done = outputs and any(each.finish_reason for each in outputs[-1].completions)
        if has_done and not errors and 1 not in streams.open:
            streams.submit(1, [5, 7], SamplingParams(max_tokens=1))
        for number, output in streams.step():
            (errors if number else outputs).append(output)
    assert min(lengths) < max(lengths) and [type(each) for each in errors] == [PromptError]
    assert outputs[-1].completions == wanted.completions and outputs[-1].finished
    check_growth(outputs, wanted)


def test_no_completion_is_shorter_than_it_was_when_it_is_drawn_again():
    """One that had waited for another request has its first tokens sooner then."""
    engine = LLM(make_model(), max_num_seqs=2).engine
    streams, params = Streams(engine), SamplingParams(n=2, max_tokens=30, ignore_eos=True, seed=3)
    (wanted,) = LLM(make_model()).generate([[5, 6]], params)
    streams.submit(1, [8, 9], SamplingParams(max_tokens=60, ignore_eos=True))
    streams.submit(0, [5, 6], params)
    outputs = []
    while 0 in streams.open:
        outputs += [output for number, output in streams.step() if not number]
        if len(outputs) == 9 and 1 in streams.open:
            assert [len(each.token_ids) for each in outputs[-1].outputs] == [9, 0]
            streams._drop(PromptError(1, "damaged"))
    check_growth(outputs, wanted)


def test_chat_shows_tools(tmp_path):
    for path in FOLDER.iterdir():
        if path.name != "tokenizer_config.json":
            (tmp_path / path.name).symlink_to(path)
    tokenizer = json.loads((FOLDER / "tokenizer_config.json").read_text())
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": template}))
    llm, params = AsyncLLM(tmp_path), SamplingParams(max_tokens=2, temperature=0)
    messages = [{"role": "user", "content": "what is 3"}]
    tools = [{"type": "function", "function": {"name": "a", "parameters": {}}}]
    (output,) = llm.llm.chat(messages, params, tools=tools)
    assert output.prompt_token_ids == llm.llm.tokenizer.encode("a what is 3")

    async def last():
        return [each async for each in llm.chat(messages, params, tools=tools)][-1]

    assert asyncio.run(last()).completions == output.completions
    (plain,) = llm.llm.chat(messages, params, tools=[])
    assert plain.prompt_token_ids == llm.llm.tokenizer.encode("what is 3")
    llm.shutdown()


def test_progress(capsys):
    """A line on stderr, or what is called as tqdm is."""
    llm, params = LLM(FOLDER), SamplingParams(max_tokens=3, n=2)
    llm.generate(["a", "b"], params, use_tqdm=True)
    assert capsys.readouterr().err.endswith("Processed prompts: 4/4\n")
    seen = []

    class Bar:
        def __init__(self, total, desc):
            self.n = 0
            seen.append((total, desc))

        def update(self, count):
            self.n += count

        def close(self):
            seen.append(self.n)

    llm.generate(["a", "b"], params, use_tqdm=Bar)
    assert seen == [(4, "Processed prompts"), 4]
    llm.generate(["a"], dataclasses.replace(params, n=1))
    llm.sleep()
    llm.wake_up()
    assert capsys.readouterr().err == ""


def test_requests_of_one_step_list_as_many_tokens_as_each_asks_for():
    engine, streams = SimpleNamespace(tokenizer=None, token_text=str), Streams.__new__(Streams)
    params = [SamplingParams(logprobs=count) for count in (1, 3, None)]
    requests = [GroupRequest(number, [5], each) for number, each in enumerate(params)]
    streams.open = {request.number: OpenRequest(engine, request, None) for request in requests}
    sequences = [SimpleNamespace(request_id=number, index=0, params=each) for number, each in enumerate(params)]
    listings = np.array([[9, 0, 1, 2, 3, 0, 0, 0]] * 3, np.int32)
    output = StepOutput([], np.array(sequences), np.full(3, 7), np.zeros(3, np.float32), 0, listings)
    found = [grown.outputs[0].logprobs for _, grown in streams._take(output)]
    assert [each and list(each[0]) for each in found] == [[7, 1], [7, 1, 2, 3], None]
