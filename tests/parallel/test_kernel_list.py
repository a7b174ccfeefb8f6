"""The kernels that are compiled before ranks with a part of a model each begin."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LISTED = """
import json
from rlnumba.config import EngineConfig, LoraConfig
from rlnumba.parallel.kernel_list import list_signatures
from rlnumba.engine import kernel_list
from rlnumba.engine.llm import kernel_request
from rlnumba.engine.sequence import SamplingParams
from rlnumba.model.config import ModelConfig
from rlnumba.runtime.device import GPUS

config = ModelConfig.from_dict({
    "model_type": "qwen3", "vocab_size": 1280, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 512, "tie_word_embeddings": True,
})
work = EngineConfig(), [20] * 16, [SamplingParams(max_tokens=8)], [28]
request, with_adapter = (kernel_request(config, "bfloat16", lora, *work) for lora in (None, LoraConfig(r=8)))

def named(signatures):
    return sorted({name for _, name, _, _ in signatures})

of_engine, of_scores = list_signatures((2, request), GPUS["h200"])
_, of_both = list_signatures((2, request, True), GPUS["h200"])
whole = kernel_list.list_signatures(request, GPUS["h200"])
adapted, _ = list_signatures((2, with_adapter), GPUS["h200"])
stacks = (LoraConfig(),), (LoraConfig(r=5), LoraConfig(r=20, target_modules=["q_proj", "down_proj"]))
of_adapters = [
    set(kernel_list.list_signatures(kernel_request(config, "bfloat16", lora, *work), GPUS["h200"])[0])
    for lora in stacks
]
print(json.dumps({
    "engine": named(of_engine), "scores": named(of_scores), "whole": named(whole[0]),
    "has whole scores": set(whole[1]) <= set(of_both), "alone": set(whole[1]) <= set(of_scores),
    "with an adapter": named(adapted), "of any adapters": of_adapters[0] == of_adapters[1],
}))
"""


def test_ranks_list_their_gathers_and_gemms():
    """In a process of its own, which takes itself to be on a GPU from then on."""
    found = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    found = json.loads(found.stdout)
    gathers = {"peer_gather_kernel", "peer_rmsnorm_kernel"}
    assert gathers <= set(found["engine"]) and not gathers & set(found["whole"])
    assert set(found["whole"]) - set(found["engine"]) <= {"rmsnorm_kernel", "decoder_kernel"}
    assert found["of any adapters"]
    assert set(found["with an adapter"]) - set(found["engine"]) == {"scale_adapters_kernel"}
    assert "peer_gather_kernel" in found["scores"] and found["has whole scores"] and not found["alone"]
