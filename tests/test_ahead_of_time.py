"""Kernels compiled in other processes before they are launched: the list, the files, and the end of the processes."""

import json
import os
import pathlib
import pickle
import subprocess
import sys
import time

import pytest

from rlnumba.runtime import ahead_of_time, compile, device
from rlnumba.runtime.launch import find_kernel
from tests import small_kernels

ROOT = pathlib.Path(__file__).parent.parent
H200 = device.GPUS["h200"]

if device.name() != "cpu":
    pytest.skip("on the cpu device, without the simulator", allow_module_level=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of an empty cache of machine code, in a process that takes itself to be on an H200."""
    pytest.importorskip("cuda.bindings.nvjitlink")
    monkeypatch.setenv("RLNUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(device, "properties", lambda: H200)
    monkeypatch.setattr(ahead_of_time, "_request", None)
    monkeypatch.setattr(ahead_of_time, "_compiler", None)
    return tmp_path / "cache"


def paths_of(signatures):
    return [compile.cache_path(find_kernel(*found[:3]), found[3], H200.capability) for found in signatures]


def test_a_launch_waits_for_its_kernel_and_for_no_other(cache, capfd):
    first, second, broken = paths_of(small_kernels.list_signatures("request", H200))
    assert not ahead_of_time.started_for(first)
    ahead_of_time.start("tests.small_kernels", "request")
    assert not ahead_of_time.started_for(cache / "of no kernel")
    compiler = ahead_of_time._compiler
    while not compiler.total:
        time.sleep(0.05)
    assert compiler.missing <= {first.name, second.name, broken.name}
    for path in (first, second):
        assert ahead_of_time.started_for(path) or path.exists()
        entry, code = compile.read_cache(path)
        assert code.startswith(b"\x7fELF") and entry in code
    ahead_of_time.started_for(broken)
    assert not broken.exists()
    assert compiler.process.wait(30) == 0
    assert not ahead_of_time.started_for(second)
    lines = [line for line in capfd.readouterr().err.splitlines() if "compiled when it is launched" in line]
    assert len(lines) == 1 and lines[0].startswith("rlnumba: elementwise_kernel is") and len(lines[0]) < 300


def test_a_list_that_fails_costs_a_line_alone(cache, capfd):
    ahead_of_time.start("tests.small_kernels", "no such request")
    assert not ahead_of_time.started_for(cache / "of no kernel")
    assert ahead_of_time._compiler.process.wait(30) == 0
    assert not ahead_of_time.started_for(cache / "of no kernel")
    assert "rlnumba: kernels are compiled one by one: ValueError: 'no such request'" in capfd.readouterr().err


def test_the_process_ends_with_the_one_that_started_it(cache):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.small_kernels"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    pickle.dump(("request", H200), process.stdin)
    process.stdin.flush()
    process.stdin.close()
    assert process.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def test_what_is_not_used_leaves_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLNUMBA_CACHE_DIR", str(tmp_path))
    now = time.time()
    for name, days in (("old", 61), ("used", 59), ("new", 0)):
        (tmp_path / f"{name}.cubin").write_bytes(b"entry\0code")
        os.utime(tmp_path / f"{name}.cubin", (now - days * 86400,) * 2)
    assert compile.read_cache(tmp_path / "used.cubin") == [b"entry", b"code"]
    assert (tmp_path / "used.cubin").stat().st_mtime == pytest.approx(now, abs=60)
    compile.prune_cache()
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["new", "used"]


LISTED = """
import json, sys
from rlnumba.config import load_run
from rlnumba.runtime.device import GPUS
from rlnumba.trainers.kernel_list import list_signatures

for kind, path in json.loads(sys.argv[1]):
    run = load_run(kind, path, [("train.dtype", "bfloat16")])
    print(json.dumps(sorted({name for _, name, _, _ in list_signatures((kind, run), GPUS["h200"])})))
"""
RUNS = {"grpo": "quickstart.toml", "rloo": "rloo.toml", "ppo": "ppo.toml", "reward": "reward.toml"}
OF_ALL = {"gemm_sm90_kernel", "attention_backward_kernel", "adamw_kernel", "embedding_backward_kernel"}
OF_PROMPTS = {"draw_kernel", "scan_kernel", "logp_backward_kernel"}
OF_PROMPTS |= {"paged_attention_sm90_kernel", "paged_attention_qkv_sm90_kernel"}
OF_PROMPTS |= {"advance_decode_state_kernel", "edit_decode_state_kernel"}
OF = {
    "grpo": OF_PROMPTS | {"policy_loss_kernel", "advantage_kernel"},
    "rloo": OF_PROMPTS | {"policy_loss_kernel", "rloo_kernel"},
    "ppo": OF_PROMPTS | {"ppo_loss_kernel", "gae_kernel", "ppo_rewards_kernel", "scalar_head_backward_kernel"},
    "reward": {"reward_loss_kernel", "scalar_head_kernel"},
}


def test_a_run_lists_the_kernels_of_its_steps():
    """In a process of its own, which takes itself to be on a GPU from then on."""
    requests = [(kind, str(ROOT / "examples" / path)) for kind, path in RUNS.items()]
    command = [sys.executable, "-c", LISTED, json.dumps(requests)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    for kind, line in zip(RUNS, found.stdout.splitlines(), strict=True):
        assert not (OF_ALL | OF[kind]) - set(json.loads(line)), kind
