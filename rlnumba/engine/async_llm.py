"""AsyncLLM: requests of coroutines in one batch, each an asynchronous iterator of its growing output."""

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor

from rlnumba.engine.adapters import LoRARequest
from rlnumba.engine.llm import LLM, asked_adapters, chat_prompts, text_and_prompt
from rlnumba.engine.requests.streams import Streams
from rlnumba.engine.sequence import SamplingParams


class AsyncLLM:
    """An LLM for asyncio, with its arguments; all of its work is done in one thread of its own.

    async for output in llm.generate(prompt, SamplingParams(...)):
        print(output.outputs[0].text)

    An output has all that was drawn so far; the last one is `finished` and equals that of LLM.generate. Where the
    iterator is closed, or its task cancelled, the request is dropped. `shutdown` ends the thread.
    """

    def __init__(self, *arguments, **keys):
        self._thread = ThreadPoolExecutor(1, "engine")
        self.llm = self._thread.submit(LLM, *arguments, **keys).result()
        self._streams = Streams(self.llm.engine)
        self._numbers, self._queues, self._task = itertools.count(), {}, None

    async def generate(self, prompt, sampling_params=None, adapter=None, lora_request=None, request_id=None):
        """Yields RequestOutputs of one prompt: a text, token ids, or vLLM's dicts. adapter: the name of one;
        lora_request: a LoRARequest, instead; request_id: that of the outputs, by default a number.

        Raises as LLM.generate does, at the first step of the iteration.
        """
        number, queue = next(self._numbers), asyncio.Queue()
        if not isinstance(sampling_params, SamplingParams | None):
            raise TypeError(
                f"generate: sampling_params must be SamplingParams, got {type(sampling_params).__qualname__}"
            )
        params = sampling_params or SamplingParams()
        text, prompt = text_and_prompt(number, prompt)
        adapter = asked_adapters(adapter, {"lora_request": lora_request})
        # Its place is there before the first output. Whatever ends this early, the request is dropped after it is
        # submitted: the engine's thread does one after the other.
        self._queues[number] = queue
        try:
            await self._call(self._submit, number, text, prompt, params, adapter)
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._run())
            while True:
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                if request_id is not None:
                    output.request_id = request_id
                yield output
                if output.finished:
                    return
        finally:
            if self._queues.pop(number, None) is not None:
                self._thread.submit(self._streams.abort, number)

    async def chat(self, messages, sampling_params=None, adapter=None, tools=None, chat_template_kwargs=None):
        """Yields RequestOutputs of the answer to a list of messages, as LLM.chat writes them."""
        (prompt,) = chat_prompts(self.llm.tokenizer, [messages], tools, chat_template_kwargs)
        async for output in self.generate(prompt, sampling_params, adapter):
            yield output

    def shutdown(self):
        """End the thread, once it has done what it was given."""
        self._thread.shutdown()

    def _submit(self, number, text, prompt, params, adapter):
        if isinstance(adapter, LoRARequest):
            # Its loading waits for what is in flight, of other requests.
            self._streams.settle()
        (adapter_id,) = self.llm.adapter_ids_of([adapter])
        length = len(prompt if text is None else self.llm.tokenizer.encode(text)) if self.llm.tokenizer else len(prompt)
        self.llm.compile_ahead([length], [params])
        self._streams.submit(number, prompt, params, adapter_id)

    async def _call(self, function, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _run(self):
        """Steps, while there are requests, whose outputs go to their queues."""
        try:
            while self._queues:
                for number, output in await self._call(self._streams.step):
                    self._send(number, output)
        except BaseException as error:
            for number in list(self._queues):
                self._send(number, error)
            self._thread.submit(self._streams.reset)
            raise

    def _send(self, number, output):
        if (queue := self._queues.get(number)) is None:
            return
        # An output that was not yet taken is part of this one.
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(output)
        if isinstance(output, BaseException) or output.finished:
            del self._queues[number]
