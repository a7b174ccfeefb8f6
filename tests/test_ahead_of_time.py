"""Kernels compiled in other processes before they are launched: the list, the files, and the end of the processes."""

import contextlib
import gc
import inspect
import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rlnumba.config import load_run
from rlnumba.engine import llm
from rlnumba.errors import DeviceError
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runs.run_folder import kernel_request
from rlnumba.runtime import device
from rlnumba.runtime.compile import ahead_of_time, cache, equal_functions, machine_code, pool
from rlnumba.runtime.compile.equal_functions import function_key
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import find_kernel
from tests import small_kernels

ROOT = pathlib.Path(__file__).parent.parent
H200 = device.GPUS["h200"]

if device.name() != "cpu":
    pytest.skip("on the cpu device, without the simulator", allow_module_level=True)


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """The folder of an empty cache of machine code, in a process that takes itself to be on an H200."""
    pytest.importorskip("cuda.bindings.nvjitlink")
    monkeypatch.setenv("RLNUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(device, "properties", lambda: H200)
    monkeypatch.setattr(ahead_of_time, "_request", None)
    monkeypatch.setattr(ahead_of_time, "_compiler", None)
    yield tmp_path / "cache"
    if ahead_of_time._compiler is not None:
        ahead_of_time._compiler.stop()


def paths_of(stages):
    signatures = [signature for stage in stages for signature in stage]
    return [cache.cache_path(find_kernel(*found[:3]), found[3], H200.capability) for found in signatures]


def test_a_launch_waits_for_its_kernel_and_for_no_other(cache_folder, capfd):
    first, second, broken = paths_of(small_kernels.list_signatures("request", H200))
    assert not ahead_of_time.wait_for(first)
    ahead_of_time.start("tests.small_kernels", "request")
    assert not ahead_of_time.wait_for(cache_folder / "of no kernel")
    compiler = ahead_of_time._compiler
    assert compiler.listed == {first.name, second.name, broken.name}
    for path in (first, second):
        assert ahead_of_time.wait_for(path)
        entry, code = cache.read(path)
        assert code.startswith(b"\x7fELF") and entry in code
    assert ahead_of_time.wait_for(broken)
    assert not broken.exists()
    assert compiler.process.wait(300) == 0
    compiler.errors.join(300)
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("compiling kernels: ")]) == 1
    (line,) = [line for line in lines if "compiled when it is launched" in line]
    assert line.startswith("rlnumba: elementwise_kernel is") and len(line) < 300


def test_a_list_is_compiled_at_once_and_again_only_where_a_kernel_is_missing(cache_folder):
    first, second, _ = paths_of(small_kernels.list_signatures("request", H200))
    ahead_of_time.start("tests.small_kernels", "request")
    before = ahead_of_time._compiler
    assert before.process.wait(300) == 0 and first.exists() and second.exists()
    ahead_of_time.start("tests.small_kernels", "request")
    assert ahead_of_time._compiler is before
    ahead_of_time._request = ahead_of_time._compiler = None
    ahead_of_time.start("tests.small_kernels", "request")
    assert ahead_of_time._compiler is None
    second.unlink()
    assert ahead_of_time.wait_for(second) and second.exists()
    ahead_of_time.start("tests.small_kernels", "another request")
    assert ahead_of_time._compiler is not None


def test_all_is_compiled_for_processes_that_share_the_cache(cache_folder, monkeypatch):
    ahead_of_time.finish()
    first, second, _ = paths_of(small_kernels.list_signatures("request", H200))
    ahead_of_time.start("tests.small_kernels", "request")
    ahead_of_time.finish()
    assert first.exists() and second.exists()
    ahead_of_time._request = ahead_of_time._compiler = None
    monkeypatch.setattr(ahead_of_time, "_is_elsewhere", False)
    ahead_of_time.leave_to_another()
    ahead_of_time.start("tests.small_kernels", "another request")
    assert ahead_of_time._compiler is None and ahead_of_time.is_started()
    assert not ahead_of_time.wait_for(second)


@pytest.mark.parametrize(
    "name, backend, is_started, count",
    [
        ("cuda", "native", False, 1),
        ("cuda", "native", True, 0),
        ("cuda", "cublas", False, 0),
        ("cpu", "native", False, 0),
    ],
)
def test_an_engine_has_its_kernels_compiled_once_on_a_gpu(monkeypatch, name, backend, is_started, count):
    started = []
    monkeypatch.setattr(device, "name", lambda: name)
    monkeypatch.setattr(llm.gemm, "backend", lambda: backend)
    monkeypatch.setattr(ahead_of_time, "is_started", lambda: is_started)
    monkeypatch.setattr(ahead_of_time, "start", lambda *request: started.append(request))
    llm.compile_list("a module", "its request")
    assert started == [("a module", "its request")] * count


def test_a_process_is_prepared_where_no_list_was_compiled(cache_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead_of_time, "DRIVER_FILES", (str(tmp_path / "no driver"),))
    ahead_of_time.prepare("tests.small_kernels")
    assert ahead_of_time._compiler is None
    monkeypatch.setattr(ahead_of_time, "DRIVER_FILES", (str(tmp_path),))
    ahead_of_time.prepare("tests.small_kernels")
    assert ahead_of_time._compiler is None, "on the cpu device"
    monkeypatch.setattr(device, "_chosen", None)
    monkeypatch.setenv("RLNUMBA_DEVICE", "auto")
    ahead_of_time.prepare("tests.small_kernels")
    prepared = ahead_of_time._compiler
    assert not prepared.has_request
    ahead_of_time.start("tests.small_kernels", "request")
    assert ahead_of_time._compiler is prepared and prepared.process.wait(300) == 0
    ahead_of_time._request = ahead_of_time._compiler = None
    ahead_of_time.prepare("tests.small_kernels")
    assert ahead_of_time._compiler is None


def test_a_list_that_fails_costs_a_line_alone(cache_folder, capfd):
    ahead_of_time.start("tests.small_kernels", "no such request")
    assert not ahead_of_time.wait_for(cache_folder / "of no kernel")
    assert ahead_of_time._compiler.process.wait(300) == 0
    assert not ahead_of_time.wait_for(cache_folder / "of no kernel")
    ahead_of_time._compiler.errors.join(300)
    assert "rlnumba: kernels are compiled one by one: ValueError: 'no such request'" in capfd.readouterr().err
    assert not list(cache_folder.glob("*.list"))


def test_the_process_ends_with_the_one_that_started_it(cache_folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "rlnumba.runtime.compile.pool", "tests.small_kernels"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    pickle.dump(("request", H200, cache_folder / "a.list"), process.stdin)
    process.stdin.flush()
    process.stdin.close()
    assert process.wait(300) != 0
    with pytest.raises(ProcessLookupError):
        for _ in range(3000):
            os.killpg(process.pid, 0)
            time.sleep(0.1)


ENDING = """
import contextlib, os, pathlib, sys
from rlnumba.runtime import device
from rlnumba.runtime.compile import ahead_of_time, cache, machine_code, pool

device.properties = lambda: device.GPUS["h200"]
ahead_of_time.start("tests.small_kernels", "request")
other = pathlib.Path(f"/proc/{ahead_of_time._compiler.process.pid}/fd")
own = os.readlink("/proc/self/fd/2")
held = set()
for file in other.iterdir():
    with contextlib.suppress(FileNotFoundError):  # closed since it was listed
        held.add(os.readlink(file))
print("held" if own in held else "not held", file=sys.stderr, flush=True)
os._exit(130)
"""


def test_the_process_holds_no_output_of_the_one_that_started_it(cache_folder):
    """As at a second signal: who reads stderr to its end need not wait until the process has noticed."""
    process = subprocess.Popen([sys.executable, "-c", ENDING], stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stderr.read() == b"not held\n"
    assert process.wait() == 130


def test_kernels_go_to_processes_that_may_end(cache_folder, capfd, monkeypatch):
    """A process that dies costs its kernel alone; the others, and what comes after them, are compiled."""
    stages = small_kernels.list_signatures("request", H200)
    monkeypatch.setattr(machine_code, "compile_to_cache", dies_of_elementwise)
    missing = pool.missing_of([stages[0][:2], stages[0][:2]], H200.capability)
    assert len(missing) == 2
    assert sorted(pool.compile_all(missing, H200.capability, processes=1)) == sorted(missing)
    gc.unfreeze()
    assert "elementwise_kernel is compiled when it is launched: its process has ended" in capfd.readouterr().err


def dies_of_elementwise(kernel, type_names, capability):
    if kernel.py_func.__name__ == "elementwise_kernel":
        os._exit(1)


def test_a_kernel_is_compiled_by_one_of_those_that_want_it(cache_folder, monkeypatch):
    """Also where the first one fails: then by the next."""
    kernel, types = find_kernel(*(signature := small_kernels.list_signatures("request", H200)[0][0])[:3]), signature[3]
    begun, results = [], []

    def compiled(*arguments):
        begun.append(threading.current_thread().name)
        # All others wait by now, or look for the file right afterwards.
        time.sleep(0.2)
        if len(begun) == 1:
            raise DeviceError("the first one fails")
        return "entry", b"code"

    def want():
        with contextlib.suppress(DeviceError):
            results.append(machine_code.compile_to_cache(kernel, types, H200.capability))

    monkeypatch.setattr(machine_code, "machine_code", compiled)
    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 2 and [(bytes(entry), code) for entry, code in results] == [(b"entry", b"code")] * 5
    (path,) = cache_folder.iterdir()
    assert path == cache.cache_path(kernel, types, H200.capability)


HOLDS = """
import pathlib, sys, time
from rlnumba.runtime.compile import cache
with cache.compiled_by_one(pathlib.Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_does_not_end_its_compilation_stops_no_other(cache_folder, monkeypatch, end):
    path = cache_folder / "kernel.cubin"
    monkeypatch.setattr(cache, "LONGEST_WAIT_S", 1000 if end == signal.SIGKILL else 0.1)
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout.readline() == b"holds\n"
            process.send_signal(end)
            with cache.compiled_by_one(path):
                pass
        finally:
            process.kill()


def test_a_signal_leaves_no_lock_file_open(tmp_path, monkeypatch):
    """While another process is waited for."""

    def interrupted(descriptor):
        opened.append(descriptor)
        raise KeyboardInterrupt

    opened = []
    monkeypatch.setattr(cache, "_locks_in_time", interrupted)
    with pytest.raises(KeyboardInterrupt), cache.compiled_by_one(tmp_path / "kernel.cubin"):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_a_cache_that_cannot_be_written_has_no_locks(tmp_path):
    (tmp_path / "file").write_text("")
    with cache.compiled_by_one(tmp_path / "file" / "kernel.cubin"):
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_shortcuts_of_the_compiler_change_no_machine_code(tmp_path):
    """One process remembers operators and shares equal functions, one does neither."""
    pytest.importorskip("cuda.bindings.nvjitlink")
    forget = "from rlnumba.runtime.compile import machine_code\n"
    forget += "machine_code.remember_operators = machine_code.share_equal_functions = lambda: None\n"
    hashes = [
        subprocess.run([sys.executable, "-c", before + HASHED], capture_output=True, text=True, cwd=ROOT, check=True)
        for before in ("", forget)
    ]
    assert hashes[0].stdout == hashes[1].stdout != ""


HASHED = """
import hashlib
import re
from rlnumba.runtime.compile import machine_code
from rlnumba.runtime.device import cuda
from rlnumba.kernels.nn.reduce import group_mean_std_kernel, sum_kernel
from rlnumba.kernels.ptx.warp import device_function

F1, F2 = "float32[::1]", "float32[:,::1]"

@cuda.jit
def choosing_kernel(x, n):
    function = max if n > 3 else max
    for i in range(n):
        x[i] = function(x[i], x[i + 1]) + x[i] * n


def scaling_kernel(factor, offset):
    @device_function
    def scale(value):
        return value * factor

    @device_function
    def scale_and_add(value):
        return scale(value) + offset

    @cuda.jit
    def scaling_kernel(x):
        x[0] = scale_and_add(x[1])

    return scaling_kernel


kernels = (sum_kernel, (F1, "int64", F1)), (group_mean_std_kernel, (F2, F1, F1)), (choosing_kernel, (F1, "int64"))
for kernel, types in kernels:
    print(hashlib.sha256(machine_code.machine_code(kernel, types, (9, 0))[1]).hexdigest())
for a, b in ((2, 1), (2, 3), (2, 1), (2.0, 3), (True, 1), (1, 3)):
    ptx = machine_code.lower(scaling_kernel(a, b), (F1,), (9, 0)).get_asm_str(cc=(9, 0))
    # Numba counts the functions that it compiles in their names.
    lines = [line for line in ptx.splitlines() if line.strip() and not line.startswith((".common", "//"))]
    print(hashlib.sha256(re.sub(r"_Z\\w+", "name", "\\n".join(lines)).encode()).hexdigest())
"""


FACTOR = 3.0


def device_functions(constant):
    """Of one factory: two that call a third, which closes over a constant; the second has a shared array."""

    def inner(value):
        return value * constant * FACTOR

    inner = device_function(inner)

    def outer(value):
        return inner(value)

    def with_memory(value):
        return inner(cuda.shared.array(1, np.float32)[0])

    return device_function(outer), device_function(with_memory)


AT_ONCE = """
import sys, threading
from rlnumba.runtime import launch
from rlnumba.runtime.compile import machine_code
from tests.small_kernels import list_signatures

sys.setswitchinterval(1e-6)
together, found = threading.Barrier(2), []

def lower(module, name, constants, types):
    kernel = launch.find_kernel(module, name, constants)
    together.wait()
    found.append(len(machine_code.lower(kernel, types, (9, 0)).get_asm_str(cc=(9, 0))) > 0)

threads = [threading.Thread(target=lower, args=each) for each in list_signatures("", None)[0][:2]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*found)
"""


def test_two_threads_compile_their_first_kernels_at_the_same_time():
    found = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.split() == ["True", "True"], found.stderr


def test_equal_functions(monkeypatch):
    """Functions are equal if their machine code is."""
    constants = [2, 2.0, np.float32(2), np.float64(2), True, 1, 0.0, -0.0, (1, 2), (1, 2.0), ((1,), 2), "2"]
    keys = [function_key(device_functions(constant)[0]) for constant in constants]
    assert len(set(keys)) == len(constants)
    assert keys == [function_key(device_functions(constant)[0]) for constant in constants]
    assert function_key(device_functions([2])[0]) != function_key(device_functions([2])[0])
    assert function_key(device_functions(2)[1]) != function_key(device_functions(2)[1])
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    assert function_key(device_functions(2)[0]) != keys[0]


def test_an_unknown_dispatcher_is_left_as_it_is(monkeypatch):
    from numba.cuda.dispatcher import CUDADispatcher

    assert equal_functions.is_known(inspect.unwrap(CUDADispatcher.compile_device))

    def compile_device(self, args, return_type=None, *, target=None):
        return self.results[args]

    monkeypatch.setattr(CUDADispatcher, "compile_device", compile_device)
    with pytest.warns(RuntimeWarning, match="numba-cuda .* compiles device functions in a way that rlnumba does not"):
        equal_functions.share_equal_functions.__wrapped__()
    assert CUDADispatcher.compile_device is compile_device


def test_what_is_not_used_leaves_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLNUMBA_CACHE_DIR", str(tmp_path))
    now = time.time()
    for name, days in (("old", 61), ("used", 59), ("new", 0)):
        (tmp_path / f"{name}.cubin").write_bytes(b"entry\0code")
        os.utime(tmp_path / f"{name}.cubin", (now - days * 86400,) * 2)
    assert cache.read(tmp_path / "used.cubin") == [b"entry", b"code"]
    assert (tmp_path / "used.cubin").stat().st_mtime == pytest.approx(now, abs=60)
    cache.prune()
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["new", "used"]


LISTED = """
import dataclasses, json, sys
from rlnumba.config import load_run
from rlnumba.engine import llm
from rlnumba.runtime.device import GPUS
from rlnumba.runs.planning.kernel_list import list_signatures

for kind, path in json.loads(sys.argv[1]):
    run = load_run(kind, path, [("train.dtype", "bfloat16")])
    stages = list_signatures(run, GPUS["h200"])
    print(json.dumps(sorted({name for stage in stages for _, name, _, _ in stage})))
run = load_run("sft", sys.argv[2], [("train.dtype", "bfloat16"), ("model", sys.argv[3])])
modes = [{"activation_memory": mode} for mode in ("full", "selective", "minimal")]
modes += [{"activation_memory": "selective", "recompute_modules": ["norm"], "recompute_num_layers": 1}]
run = dataclasses.replace(run, train=dataclasses.replace(run.train, gradient_checkpointing=None))
runs = [run, *(dataclasses.replace(run, train=dataclasses.replace(run.train, **mode)) for mode in modes)]
of_auto, *of_modes = [set(list_signatures(run, GPUS["h200"])[1]) for run in runs]
print(json.dumps([of_auto == set.union(*of_modes), of_auto > of_modes[0], of_auto > of_modes[1]]))
"""
RUNS = {"grpo": "quickstart.toml", "rloo": "rloo.toml", "ppo": "ppo.toml", "reward": "reward.toml"}
OF_ALL = {"gemm_sm90_kernel", "attention_backward_kernel", "adamw_kernel", "clip_kernel", "embedding_backward_kernel"}
OF_PROMPTS = {"draw_kernel", "scan_kernel", "logp_backward_kernel"}
OF_PROMPTS |= {"paged_attention_sm90_kernel"}
OF_PROMPTS |= {"advance_decode_state_kernel", "edit_decode_state_kernel"}
OF = {
    "grpo": OF_PROMPTS | {"policy_loss_kernel", "advantage_kernel"},
    "rloo": OF_PROMPTS | {"policy_loss_kernel", "rloo_kernel"},
    "ppo": OF_PROMPTS | {"ppo_loss_kernel", "gae_kernel", "ppo_rewards_kernel", "scalar_head_backward_kernel"},
    "reward": {"reward_loss_kernel", "scalar_head_kernel"},
}


LISTED_AHEAD = """
import json, sys
from rlnumba.config import load_run
from rlnumba.engine import llm
from rlnumba.engine.steps.shapes import token_bucket_of
from rlnumba.kernels.gemm.scheduler import GemmProblem, tokens_of_choice
from rlnumba.kernels.gemm.sm90_config import best_config
from rlnumba.runtime.device import GPUS
from rlnumba.runs.planning.kernel_list import list_signatures
from rlnumba.runs.run_folder import kernel_request

def listed(max_staleness=2, **deploy):
    options = [("model", sys.argv[2]), ("train.dtype", "bfloat16"), ("async.max_staleness", str(max_staleness))]
    options += [(f"deploy.{name}", str(value)) for name, value in deploy.items()]
    stages = list_signatures(kernel_request(load_run("grpo", sys.argv[1], options).resolved()), GPUS["h200"])
    return [set(stage) for stage in stages]

one, two = listed(num_train_gpus=1), listed(num_train_gpus=2, num_infer_gpus=2)
parts = listed(num_train_gpus=2, num_infer_gpus=2, tensor_parallel_size=2)
losses = [str(constants) for _, name, constants, _ in two[1] if name == "policy_loss_kernel"]
added = sorted({name for _, name, _, _ in parts[0] - two[0]})

def tiles_of(rows):  # of the GEMM by which so many rows become gate and up
    return best_config(GemmProblem(rows, 512, 256, "bfloat16", False, False, "same"), 132, True)

configs = {constants[0] for _, name, constants, _ in one[0] if name == "gemm_sm90_kernel"}
sizes = {token_bucket_of(rows) for rows in range(1, 2049)} | {tokens_of_choice(rows) for rows in range(2049, 8193)}
lacking = [rows for rows in sorted(sizes) if tiles_of(rows) not in configs]
some = listed(max_staleness=0, num_train_gpus=1)
print(json.dumps([one == two, losses, parts[1] == two[1], two[0] <= parts[0], added, lacking, some[0] < one[0]]))
"""


def test_an_asynchronous_run_lists_the_kernels_of_old_completions_and_of_parts_of_a_model(tmp_path):
    """However many GPUs train; in a process of its own, as the one below."""
    shutil.copytree(ROOT / "examples" / "quickstart" / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    arguments = [str(ROOT / "examples" / "many_gpus.toml"), str(tmp_path / "model")]
    found = subprocess.run([sys.executable, "-c", LISTED_AHEAD, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    are_equal, losses, trains_alike, has_all, added, lacking, has_more = json.loads(found.stdout)
    assert are_equal and trains_alike and has_all
    assert not lacking and has_more, "sequences begin while others decode, in steps of any size"
    assert losses and all("correction_level='token', correction_truncates=True" in each for each in losses)
    assert added, "a part has GEMMs of its own"


def request_of(kind, *options):
    """What KERNEL_LIST is asked for a run of an example."""
    run = load_run(kind, str(ROOT / "examples" / RUNS.get(kind, "sft.toml")), options)
    return kernel_request(run)


OF_ANY_RUN = [("output_dir", "other"), ("train.learning_rate", "1e-3"), ("train.run_name", "other")]
# What a run chooses by the memory that is free, or its file does.
OF_ANY_RUN += [("train.activation_memory", "selective"), ("train.recompute_num_layers", "1")]
OF_ANY_RUN += [("train.gradient_checkpointing", "true"), ("train.recompute_modules", "norm")]
OF_PROMPTS_RUN = [("seed", "7"), ("train.max_steps", "9"), ("train.num_train_epochs", "2")]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_a_run_with_another_seed_has_the_list_of_the_first(kind):
    assert request_of(kind, *OF_ANY_RUN, *OF_PROMPTS_RUN) == request_of(kind)
    assert request_of(kind, ("train.max_completion_length", "9")) != request_of(kind)


def test_rows_in_another_order_have_a_list_of_their_own():
    assert request_of("sft", *OF_ANY_RUN) == request_of("sft")
    for option in OF_PROMPTS_RUN:
        assert request_of("sft", option) != request_of("sft")


TRAINED = """
import json, sys
from rlnumba.config import load_run
from rlnumba.engine import llm
from rlnumba.data.files import sampled_rows
from rlnumba.runtime.device import GPUS
from rlnumba.runtime.shapes import launches_only
from rlnumba.runs.planning import kernel_list, plan, planned
from rlnumba.trainers import grpo

options = [("train.dtype", "bfloat16"), ("train.max_completion_length", "48"), ("train.num_generations", "64")]
# With a reference model, whose log-probs the loss of each micro-batch reads.
options += [("train.per_device_train_batch_size", "512"), ("model", sys.argv[2]), ("train.beta", "0.1")]
run = load_run("grpo", sys.argv[1], options)
listed = set(kernel_list.list_signatures(run, GPUS["h200"])[1])
lacking = {}
with sampled_rows(1024):
    planner = plan.Planner(run, True, 64 << 30)
    step = plan.step_of(planner, run)
    for length in range(1, 49):
        with launches_only(GPUS["h200"]) as found:
            policy, _ = planned.make_policies(planner.config, "bfloat16", run, step)
            with policy.context.use():
                rollouts = planned.invented_rollouts(run.train, step.prompts, length, 512)
                grpo.add_logprobs(policy, rollouts, on_policy=True)
                grpo.train_step(policy, rollouts.parts(512, True), 0.0)
        if missing := set(found) - listed:
            lacking[length] = sorted(name for _, name, _, _ in missing)
print(json.dumps([lacking, len({key for key in listed if key[1] == "gemm_sm90_kernel"})]))
"""


def test_a_run_lists_the_kernels_of_micro_batches_of_all_sizes(tmp_path):
    """Completions become shorter or longer in a run. In a process of its own, as the ones around it."""
    shutil.copytree(ROOT / "examples" / "quickstart" / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    arguments = [str(ROOT / "examples" / "quickstart.toml"), str(tmp_path / "model")]
    found = subprocess.run([sys.executable, "-c", TRAINED, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    lacking, num_gemms = json.loads(found.stdout)
    assert not lacking and num_gemms > 10


def test_a_run_lists_the_kernels_of_its_steps():
    """In a process of its own, which takes itself to be on a GPU from then on."""
    requests = [(kind, str(ROOT / "examples" / path)) for kind, path in RUNS.items()]
    quickstart = ROOT / "examples" / "quickstart"
    arguments = [json.dumps(requests), str(quickstart / "sft.toml"), str(quickstart / "model")]
    command = [sys.executable, "-c", LISTED, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    *lines, of_modes = found.stdout.splitlines()
    assert json.loads(of_modes) == [True, True, True], "a run that may choose any mode of activations"
    for kind, line in zip(RUNS, lines, strict=True):
        assert not (OF_ALL | OF[kind]) - set(json.loads(line)), kind
