"""Does the server answer many clients at the engine's rate, in time, and none with a failure?

    python bench/server.py                                all parts; Qwen3-0.6B's shape on a GPU, else a tiny model
    python bench/server.py streams latency                some of them
    python bench/server.py hangups fuzz --hangups 20000 --fuzz 100000        each ends after --seconds at the latest
    python bench/server.py --model FOLDER --json FILE     the weights of a folder; results as JSON, too

streams   64 streams at once, tokens a second beside LLM.generate of the same prompts, without a server
latency   time to the first token and between pieces at 8, 64 and 256 clients, each of which sends one request after
          another, with the delay of admission (rlnumba/engine/run_ahead.py) and without
crowd     1,000 clients at once: every answer is 200, or 429 with Retry-After
hangups   clients that hang up at any time, in any way: all blocks of the cache are free afterwards
fuzz      random requests to every route: no 500, no traceback, no request without its answer

The server is `rlnumba serve` in a process of its own, and clients are in others. A part that fails ends the script with
exit code 1 after all others have run.
"""

import argparse
import asyncio
import contextlib
import json
import math
import pathlib
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import http_client
from http_client import Connection
from report import add_parts, row

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TINY, TEMPLATE = ROOT / "tests/golden/tiny-qwen3", ROOT / "tests/serve/template.jinja"
COMMAND = "from rlnumba import cli; import sys; sys.exit(cli.run(sys.argv[1:]))"
WITHOUT_DELAY = "from rlnumba.engine import run_ahead; run_ahead.ADMIT_BYTES = 0; "
# Seconds after which a request counts as one without an answer.
LATE_S = 120
# Connections that the parts hangups and fuzz have open at a time.
WORKERS = 64
ROUTES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


class Server:
    """`rlnumba serve` on a free port; a context manager. options: of the command line."""

    def __init__(self, arguments, *options, delays=True):
        self.log = tempfile.TemporaryFile()
        command = [sys.executable, "-c", COMMAND if delays else WITHOUT_DELAY + COMMAND]
        command += ["--device", arguments.device, "serve", "--model", str(arguments.folder), "--port", "0"]
        command += ["--chat-template", str(TEMPLATE), "--max-num-seqs", str(arguments.rows), *options]
        if arguments.gpu_memory_utilization:
            command += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        url = self.process.stdout.readline().strip()
        if not url:
            raise SystemExit(f"the server did not start:\n{self.text()}")
        self.port = int(url.rpartition(":")[2])

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.code = self.process.wait()

    def text(self):
        """Its log."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    async def state(self):
        """(sequences that run, that wait, share of the cache in use) as /metrics has them."""
        text = (await http_client.ask(self.port, "GET", "/metrics")).body.decode()
        names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
        return tuple(float(re.search(rf"(?m)^vllm:{name}{{.*}} (\S+)$", text)[1]) for name in names)

    async def wait_until_idle(self, seconds=30):
        """Its state, once that is idle or the time is over."""
        end = time.monotonic() + seconds
        while any(state := await self.state()) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return state

    async def end_of_part(self, num_places):
        """What is wrong after a part: list of str. num_places: sequences that it takes at a time, waiting ones too."""
        wrong, state = [], await self.wait_until_idle()
        if any(state):
            wrong.append(f"not idle: {state}")
        body, end = {"prompt": [5, 6], "max_tokens": 1, "n": min(num_places, 1024)}, time.monotonic() + 10
        while (answer := await http_client.ask(self.port, "POST", ROUTES[0], None, body)).status != 200:
            # A client that has just hung up may not have been noticed.
            if time.monotonic() > end:
                wrong.append(f"places are lost: {answer.status} {answer.body[:200]}")
                break
            await asyncio.sleep(0.1)
        await self.wait_until_idle()
        text = (await http_client.ask(self.port, "GET", "/metrics")).body.decode()
        self.num_blocks = int(re.search(r'num_gpu_blocks="(\d+)"', text)[1])
        if "Traceback" in (log := self.text()):
            wrong.append(log[log.index("Traceback") :][:2000])
        return wrong


def made_model(folder, device_name):
    """A folder with random weights of Qwen3-0.6B's shape, and a tokenizer of as many made words."""
    from shapes import in_own_process, write_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    in_own_process(write_model, folder, "qwen3-0.6b", device_name)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"Ġw{number}" for number in range(size - len(alphabet) - 1)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def workload(arguments, seed):
    """Bodies of the part streams: as many as there are streams."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, arguments.vocabulary) for _ in range(arguments.prompt)] for _ in range(64)]
    common = {"max_tokens": arguments.tokens, "ignore_eos": True}
    return [{"prompt": prompt, "seed": seed + index} | common for index, prompt in enumerate(prompts)]


def offline_rates(folder, device_name, rows, rounds):
    """Tokens a second of LLM.generate of each round's bodies, after one more: list. In a process of its own."""
    from rlnumba.config import EngineConfig
    from rlnumba.engine import LLM, SamplingParams
    from rlnumba.runtime import device

    device.select(device_name)
    llm, rates = LLM(str(folder), config=EngineConfig(max_num_seqs=rows)), []
    for bodies in rounds:
        prompts = [body["prompt"] for body in bodies]
        params = [SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True, seed=body["seed"]) for body in bodies]
        began = time.perf_counter()
        completions = [each for output in llm.generate(prompts, params) for each in output.completions]
        rates.append(sum(each.num_tokens for each in completions) / (time.perf_counter() - began))
    return rates[1:]


async def stream(port, path, body):
    """(seconds of perf_counter when it was sent, those of its pieces) of a request that is streamed."""
    connection = Connection(port)
    try:
        await connection.open()
        sent = time.perf_counter()
        answer = await connection.ask("POST", path, None, body)
    finally:
        connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path}: {answer.status} {answer.body[:300]}")
    return sent, answer.times


def stream_all(port, path, clients):
    """The `stream`s of clients, each a list of bodies that it sends one after another: list. In one process."""

    async def client(bodies):
        return [await stream(port, path, body) for body in bodies]

    async def everything():
        return await asyncio.gather(*map(client, clients))

    return [found for each in asyncio.run(everything()) for found in each]


class Clients:
    """Processes with clients; a context manager."""

    def __init__(self, count):
        self.count, self.pool = count, ProcessPoolExecutor(count, get_context("spawn"))

    def __enter__(self):
        list(self.pool.map(time.sleep, [0.2] * self.count))  # they have started
        return self

    def __exit__(self, *error):
        self.pool.shutdown()

    def run(self, port, path, clients):
        """`stream_all` of clients in all processes: list."""
        shares = [clients[start :: self.count] for start in range(self.count)]
        jobs = [self.pool.submit(stream_all, port, path, share) for share in shares if share]
        return [found for job in jobs for found in job.result()]


def tokens_per_s(found, num_tokens):
    """Tokens a second from the first request to the last piece."""
    return num_tokens / (max(times[-1] for _, times in found) - min(sent for sent, _ in found))


def measure_streams(arguments):
    """The part streams: its results, and what is wrong."""
    rounds = [workload(arguments, 1000 * number) for number in range(arguments.repeat + 1)]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        job = pool.submit(offline_rates, arguments.folder, arguments.device, arguments.rows, rounds)
        offline = statistics.median(job.result())
    found = {"offline tok/s": offline}
    row("64 prompts offline", f"{offline:.0f} tok/s")
    with Server(arguments) as server, Clients(arguments.processes) as clients:
        for name, path, more in (
            ("64 streams", "/v1/completions", {"stream": True}),
            ("64 streams of token ids", "/inference/v1/generate", {"stream": True}),
            ("64 plain requests", "/v1/completions", {}),
        ):
            rates = []
            for number, bodies in enumerate(rounds):
                bodies = [as_token_level(body) if path == ROUTES[2] else body for body in bodies]
                # Other salts: no prompt is in the cache.
                salt = {"cache_salt": f"{name} {number}"}
                measured = clients.run(server.port, path, [[body | more | salt] for body in bodies])
                rates.append(tokens_per_s(measured, 64 * arguments.tokens))
            rate = found[f"{name} tok/s"] = statistics.median(rates[1:])
            row(name, f"{rate:.0f} tok/s, {rate / offline:.1%} of offline", "90 %" if name == "64 streams" else "")
    return found, []


def as_token_level(body):
    """A body of /v1/completions as /inference/v1/generate has it."""
    params = {key: value for key, value in body.items() if key != "prompt"}
    return {"token_ids": body["prompt"], "sampling_params": params}


def percentile(values, share):
    """A percentile in milliseconds."""
    return 1000 * sorted(values)[min(int(len(values) * share), len(values) - 1)]


def measure_latency(arguments):
    """The part latency."""
    found, draw = {}, random.Random(0)

    def body():
        length, tokens = (draw.randint(most // 8, most) for most in (2 * arguments.prompt, arguments.tokens))
        prompt = [draw.randrange(5, arguments.vocabulary) for _ in range(length)]
        return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 0}

    for delays in (True, False):
        with Server(arguments, delays=delays) as server, Clients(arguments.processes) as clients:
            clients.run(server.port, ROUTES[0], [[body()] for _ in range(8)])
            for count in arguments.clients:
                bodies = [[body() for _ in range(arguments.requests)] for _ in range(count)]
                measured = clients.run(server.port, ROUTES[0], bodies)
                first = [times[0] - sent for sent, times in measured]
                # The last two pieces are an end and not a token.
                gaps = [b - a for _, times in measured for a, b in zip(times[:-2], times[1:-1], strict=True)]
                rate = tokens_per_s(measured, sum(each["max_tokens"] for each in sum(bodies, [])))
                values = {f"{name} p{p}": percentile(each, p / 100) for name, each in
                          (("first", first), ("between", gaps)) for p in (50, 99)}  # fmt: skip
                name = f"{count} clients, {arguments.rows} rows, {'with' if delays else 'without'} admission delay"
                found[name] = values | {"tok/s": rate}
                row(name, ", ".join(f"{key} {value:.1f} ms" for key, value in values.items()) + f"; {rate:.0f} tok/s")
    return found, []


def measure_crowd(arguments):
    """The part crowd: half of the clients find a place."""
    places = max(arguments.crowd // 2 - arguments.rows, 0)
    with Server(arguments, "--max-num-queued-reqs", str(places)) as server:

        async def crowd():
            body = {"prompt": [5, 6, 7], "max_tokens": 16, "ignore_eos": True}
            asks = [http_client.ask(server.port, "POST", ROUTES[0], None, body) for _ in range(arguments.crowd)]
            answers = await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), LATE_S)
            counts, wrong = Counter(), []
            for answer in answers:
                if isinstance(answer, BaseException):
                    counts["lost"] += 1
                    wrong.append(f"no answer: {answer!r}")
                    continue
                counts[answer.status] += 1
                if answer.status != 200 and (answer.status != 429 or "retry-after" not in answer.headers):
                    wrong.append(f"{answer.status} {answer.headers}")
            return counts, wrong + await server.end_of_part(arguments.rows + places)

        began = time.perf_counter()
        counts, wrong = asyncio.run(crowd())
    answered = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items(), key=str))
    row(f"{arguments.crowd} clients at once", f"{answered}; {time.perf_counter() - began:.1f} s", "200 or 429")
    return {str(status): count for status, count in counts.items()}, wrong


async def in_workers(count, work, seconds=math.inf):
    """Await work(number) for all numbers below count, WORKERS at a time; none begins after so many seconds."""
    numbers, end = iter(range(count)), time.monotonic() + seconds

    async def worker():
        for number in numbers:
            if time.monotonic() > end:
                return
            await work(number)

    await asyncio.gather(*(worker() for _ in range(WORKERS)))


async def hang_up(port, draw, body):
    """Send a request, or a part of it, and hang up at any time; returns the way."""
    way = draw.choice(("connected", "part", "sent", "sent", "first piece", "pieces", "half", "reset"))
    path, connection = draw.choice(ROUTES), Connection(port)
    own = {"prompt": [5, 6]}, {"messages": [{"role": "user", "content": "a"}]}, {"token_ids": [5, 6]}
    body = own[ROUTES.index(path)] | ({"sampling_params": body} if path == ROUTES[2] else body)
    body["stream"] = draw.random() < 0.5
    data = http_client.request_bytes("POST", path, None, body)
    await connection.open()
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        if way != "connected":
            connection.writer.write(data[: draw.randrange(len(data))] if way == "part" else data)
        if way == "half":
            connection.writer.write_eof()
        if way in ("first piece", "pieces"):
            async with asyncio.timeout(draw.expovariate(10)):
                _, headers = await connection.head()
                left = 1 if way == "first piece" else draw.randrange(1, 20)
                async for _ in connection.pieces(headers):
                    if not (left := left - 1):
                        break
        else:
            await asyncio.sleep(draw.expovariate(20))
    if way == "reset":
        connection.reset()
    connection.close()
    return way


def measure_hangups(arguments):
    """The part hangups."""
    draw, ways = random.Random(0), Counter()
    with Server(arguments, "--max-num-queued-reqs", "960") as server:

        async def hangups():
            async def work(number):
                body = {"max_tokens": draw.randrange(1, arguments.tokens), "ignore_eos": True}
                body["n"] = draw.choice((1, 1, 2, 4))
                ways[await asyncio.wait_for(hang_up(server.port, draw, body), LATE_S)] += 1

            await in_workers(arguments.hangups, work, arguments.seconds)
            return await server.end_of_part(min(arguments.rows + 960, 1024))

        began = time.perf_counter()
        wrong = asyncio.run(hangups())
        seconds = time.perf_counter() - began
    value = f"all {server.num_blocks} blocks and places free" if not wrong else "; ".join(wrong)
    row(f"{sum(ways.values())} hang-ups", f"{value}; {seconds:.0f} s", "all free")
    return dict(ways) | {"seconds": seconds}, wrong


class Fuzzing:
    """Random requests to a server. statuses: counts of answers; wrong: what must not be."""

    def __init__(self, port, seed):
        from tests.serve.fuzz import Fuzz

        self.port, self.fuzz = port, Fuzz(seed, opens_gated=True)
        self.statuses, self.wrong, self.idle = Counter(), [], []

    async def work(self, number):
        """One request, on a connection that an earlier one has left open, if any."""
        request = self.fuzz.request()
        connection = self.idle.pop() if self.idle else await Connection(self.port).open()
        try:
            answer = await asyncio.wait_for(connection.ask(*request), LATE_S)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
            self.wrong.append(f"no answer: {error!r} to {request}")
            connection.close()
            return
        self.statuses[answer.status] += 1
        if trouble := trouble_of(request.method, answer):
            self.wrong.append(f"{trouble}: {answer.status} {answer.body[:300]} to {request}")
        if answer.headers.get("connection") == "close" or request.headers.get("connection") == "close":
            connection.close()
        else:
            self.idle.append(connection)


def fuzz(port, seed, count, seconds):
    """(statuses, what must not be) of so many random requests."""

    async def everything():
        fuzzing = Fuzzing(port, seed)
        await in_workers(count, fuzzing.work, seconds)
        for connection in fuzzing.idle:
            connection.close()
        return fuzzing.statuses, fuzzing.wrong

    return asyncio.run(everything())


async def go_on(port):
    """Let a server go on that a random request has paused or put to sleep."""
    while True:
        for path in ("/wake_up", "/resume"):
            await http_client.ask(port, "POST", path, http_client.JSON)
        await asyncio.sleep(0.02)


def trouble_of(method, answer):
    """What is wrong with an answer to a fuzzed request, "" if nothing is."""
    if answer.status >= 500:
        return "a failure of the server"
    if not answer.headers.get("x-request-id"):
        return "no request id"
    if method == "HEAD":
        return ""
    try:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            errors = [event["error"] for event in http_client.events(answer.body) if "error" in event]
            return "a failure in a stream" if any(error["type"] == "server_error" for error in errors) else ""
        if answer.status >= 400:
            error = answer.json["error"]
            return "" if error["message"] and error["type"] else "no message"
    except (ValueError, KeyError, TypeError) as error:
        return f"not as it should be ({error!r})"
    return ""


def measure_fuzz(arguments):
    """The part fuzz."""
    options = "--max-body-bytes", str(1 << 20), "--served-model-name", "org/tiny"
    options += "--dev-endpoints", "--allow-runtime-lora", "--lora-root", str(ROOT / "tests/golden/lora")
    with Server(arguments, *options) as server:

        async def everything(pool):
            loop, going_on = asyncio.get_running_loop(), asyncio.ensure_future(go_on(server.port))
            counts = [len(range(i, arguments.fuzz, arguments.processes)) for i in range(arguments.processes)]
            parts = [
                loop.run_in_executor(pool, fuzz, server.port, arguments.seed + 1000 * i, count, arguments.seconds)
                for i, count in enumerate(counts)
            ]
            found = await asyncio.gather(*parts)
            going_on.cancel()
            return found, await server.end_of_part(1024)

        with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
            began = time.perf_counter()
            found, wrong = asyncio.run(everything(pool))
            seconds = time.perf_counter() - began
    counts, wrong = sum((statuses for statuses, _ in found), Counter()), sum((each for _, each in found), []) + wrong
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    value = f"{statuses}; {len(wrong)} failures; {server.num_blocks} blocks free; {seconds:.0f} s"
    row(f"{counts.total()} fuzzed requests", value, "0 failures")
    return {str(status): count for status, count in counts.items()} | {"seconds": seconds}, wrong


PARTS = {
    "streams": measure_streams,
    "latency": measure_latency,
    "crowd": measure_crowd,
    "hangups": measure_hangups,
    "fuzz": measure_fuzz,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_parts(parser, PARTS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", help="a Hugging Face folder; default: random weights")
    parser.add_argument("--json", help="a file for the results")
    parser.add_argument("--rows", type=int, default=64, help="sequences of a step")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt of streams; default: 128, elsewhere 16")
    parser.add_argument("--tokens", type=int, help="tokens of a completion; default: 512, elsewhere 64")
    parser.add_argument("--gpu-memory-utilization", type=float, help="of each server; default: serve's")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="*", default=(8, 64, 256))
    parser.add_argument("--requests", type=int, default=2, help="of a client of latency")
    parser.add_argument("--processes", type=int, help="processes of clients; default: 8, elsewhere 1")
    parser.add_argument("--crowd", type=int, default=1000)
    parser.add_argument("--hangups", type=int, help="default: 20,000, elsewhere 1,000")
    parser.add_argument("--fuzz", type=int, help="default: 20,000, elsewhere 2,000")
    parser.add_argument("--seconds", type=float, default=60, help="of hangups and of fuzz at most, each; default: 60")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzzed requests")
    arguments = parser.parse_args()
    from rlnumba.runtime import device

    on_gpu = device.select(arguments.device) == "cuda"
    usual = {"prompt": (128, 16), "tokens": (512, 64), "processes": (8, 1), "hangups": (20_000, 1_000),
             "fuzz": (20_000, 2_000)}  # fmt: skip
    for name, (large, small) in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, large if on_gpu else small)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard >= 0 else 65536, hard))
    results, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model:
            arguments.folder = pathlib.Path(arguments.model)
        else:
            arguments.folder = made_model(pathlib.Path(folder), arguments.device) if on_gpu else TINY
        arguments.vocabulary = json.loads((arguments.folder / "config.json").read_text())["vocab_size"]
        for part in arguments.parts:
            results[part], wrong = PARTS[part](arguments)
            failed += [f"{part}: {each}" for each in wrong]
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results | {"failed": failed[:100]}, indent=1))
    if failed:
        raise SystemExit(f"{len(failed)} failures:\n" + "\n".join(failed[:20]))


if __name__ == "__main__":
    main()
