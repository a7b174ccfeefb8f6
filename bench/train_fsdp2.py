"""SFT steps of PyTorch's FSDP2 on 1, 2 and 4 GPUs, as many tokens on each: the peer of bench/train_ranks.py.

    python bench/train_fsdp2.py --gpus 1 2
    python bench/train_fsdp2.py --gpus 2 --shape qwen3-8b --activations minimal --forms compiled

transformers' model of a shape with random weights, cut by layers with fully_shard: float32 weights and moments, of
which each GPU has its share, bfloat16 products, gradients summed in float32, their norm clipped, fused AdamW. Rows of
one length need no mask; attention is cuDNN's, or with --attention flash FlashAttention-2. The cross entropy has the
logits of CHUNK tokens at a time, and computes their gradient with them. Form `compiled` runs each layer and that
gradient through torch.compile. Activations `minimal` recompute each layer. Gathered weights stay for the backward, as
rlnumba's do, unless --zero-stage 3. Without its first --warmup steps; medians of steps that end with a synchronisation,
and the most memory that torch had given out. Needs torch and transformers. On the cpu device a GPU is a process.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from report import row
from shapes import SHAPES

FORMS = ("eager", "compiled")
NEEDED = ("torch", "transformers")
# Tokens whose logits are there at a time.
CHUNK = 2048
# Of train.max_grad_norm's default.
LARGEST_NORM = 1.0
# Of ranks that wait for one another, as for one that still compiles.
TIMEOUT_S = 180


def arguments_of(parser):
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: qwen3-0.6b on a GPU, else stories-15m")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch, of which each GPU has one")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--activations", choices=("full", "minimal"), default="full")
    parser.add_argument("--zero-stage", type=int, choices=(2, 3), default=2, help="3: gather weights again backwards")
    parser.add_argument("--attention", choices=("cudnn", "flash"), default="cudnn")
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=list(FORMS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not counted")
    return parser.parse_args()


def loss_function(form):
    """function(hidden, weight, labels): the mean cross entropy of (N,) labels, from (N, D) hidden and (V, D) weight."""
    import torch

    def chunk_loss(logits, labels):
        """The sum of the chunk's losses, and its derivative by the logits."""
        log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)
        loss, gradient = -log_probs.gather(-1, labels[:, None]).sum(), log_probs.exp()
        if form == "compiled":
            # Fuses with what is around it, which the other does not.
            gradient = gradient - (torch.arange(logits.shape[-1], device=logits.device) == labels[:, None])
        else:
            gradient.scatter_add_(-1, labels[:, None], gradient.new_full((len(labels), 1), -1.0))
        return loss, gradient.to(logits.dtype)

    chunk_loss = torch.compile(chunk_loss) if form == "compiled" else chunk_loss

    class HeadLoss(torch.autograd.Function):
        @staticmethod
        def forward(context, hidden, weight, labels):
            total = hidden.new_zeros((), dtype=torch.float32)
            by_hidden, by_weight = torch.empty_like(hidden), torch.zeros_like(weight)
            for begin in range(0, len(labels), CHUNK):
                part = slice(begin, begin + CHUNK)
                loss, gradient = chunk_loss(hidden[part] @ weight.T, labels[part])
                total += loss
                torch.mm(gradient, weight, out=by_hidden[part])
                by_weight.addmm_(gradient.T, hidden[part])
            context.save_for_backward(by_hidden, by_weight)
            return total / len(labels)

        @staticmethod
        def backward(context, by_loss):
            by_hidden, by_weight = context.saved_tensors
            scale = by_loss / len(by_hidden)
            return by_hidden * scale.to(by_hidden.dtype), by_weight * scale.to(by_weight.dtype), None

    return HeadLoss.apply


def sharded_model(arguments, form, mesh):
    """A module of (ids, labels) -> loss on this rank's device, its parameters cut over the mesh, random weights."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[arguments.shape], attn_implementation="sdpa", use_cache=False)

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            self.loss = loss_function(form)

        def forward(self, ids, labels):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            return self.loss(hidden.flatten(0, 1), self.model.lm_head.weight, labels.flatten())

    with torch.device("meta"):
        whole = WithLoss().train()
    on_gpu = mesh.device_type == "cuda"
    options = {"mesh": mesh, "reshard_after_forward": arguments.zero_stage == 3}
    if on_gpu:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in whole.model.model.layers:
        # On the instance: the hooks of fully_shard stay outside of what is compiled and recomputed.
        if form == "compiled":
            layer.forward = torch.compile(layer.forward)
        if arguments.activations == "minimal":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, **options)
    fully_shard(whole, **options)
    whole.to_empty(device=mesh.device_type)
    whole.model.tie_weights()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            part = parameter.to_local()
            part.fill_(1) if name.endswith("norm.weight") else part.normal_(std=0.02)
    # Its frequencies are no parameter.
    with torch.device(mesh.device_type):
        whole.model.model.rotary_emb = type(whole.model.model.rotary_emb)(config=config)
    return whole


def attention_backend(arguments):
    """A context in which attention is what --attention says."""
    if arguments.device != "cuda":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION if arguments.attention == "cudnn" else SDPBackend.FLASH_ATTENTION)


def train_rank(rank, world_size, arguments, form, folder):
    """What each rank does; rank 0 writes the seconds of each step, the losses and bytes of memory to a file."""
    import torch
    import torch.distributed as dist

    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    place = {"timeout": timeout, "init_method": f"file://{folder}/meeting", "rank": rank, "world_size": world_size}
    if on_gpu:
        place["device_id"] = torch.device("cuda", rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", **place)
    torch.manual_seed(rank)
    mesh = dist.init_device_mesh(arguments.device, (world_size,))
    model = sharded_model(arguments, form, mesh)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0, fused=True)
    vocabulary, shape = SHAPES[arguments.shape]["vocab_size"], (arguments.batch, arguments.length + 1)
    seconds, losses = [], []
    with attention_backend(arguments):
        for _ in range(arguments.steps):
            ids = torch.randint(vocabulary, shape, device=arguments.device)
            begin = time.perf_counter()
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps({"seconds": seconds, "losses": losses, "peak": peak}))
    dist.barrier()
    dist.destroy_process_group()


def measure(arguments, count, form):
    """{"seconds" of each step, "losses" of rank 0, "peak": bytes} of `count` GPUs; a str says why there is none."""
    import torch

    if arguments.device == "cuda" and count > torch.cuda.device_count():
        return f"not run: this machine has {torch.cuda.device_count()} GPUs"
    # Of its allocator: without it, memory that is cut into pieces of other sizes is counted out.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    folder = tempfile.mkdtemp()
    try:
        torch.multiprocessing.spawn(train_rank, (count, arguments, form, folder), nprocs=count)
        return json.loads((Path(folder) / "found.json").read_text())
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        if "OutOfMemoryError" in str(error):
            return "not run: out of memory"
        print(error, file=sys.stderr, flush=True)
        return f"failed: {str(error).strip().splitlines()[-1][:160]}".replace("|", "/")
    finally:
        shutil.rmtree(folder)


def complete(arguments):
    """Fill in the device and the shape that arguments leave open. Returns the packages that are missing: list."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        import torch

        if arguments.device == "auto":
            arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
        arguments.shape = arguments.shape or ("qwen3-0.6b" if arguments.device == "cuda" else "stories-15m")
    return missing


def print_rows(arguments):
    """Measure and print a row for each number of GPUs and form. Returns their tokens a second, by (GPUs, form)."""
    missing, rates = complete(arguments), {}
    if missing:
        row("SFT by FSDP2", f"not run: {' and '.join(missing)} not installed")
        return rates
    import torch

    for count in arguments.gpus:
        for form in arguments.forms:
            found = measure(arguments, count, form)
            what = f"SFT of {arguments.batch} x {arguments.length} tokens on each of {count}"
            what += f", FSDP2 of torch {torch.__version__}, {form}"
            if isinstance(found, str):
                row(what, found)
                continue
            seconds = statistics.median(found["seconds"][arguments.warmup :])
            rates[count, form] = count * arguments.batch * arguments.length / seconds
            value = f"{rates[count, form]:.0f} tokens/s, {1e3 * seconds:.1f} ms a step"
            row(what, f"{value}, {found['peak'] / (1 << 30):.1f} GiB on each")
    return rates


def main():
    print_rows(arguments_of(argparse.ArgumentParser(description=__doc__.partition("\n")[0])))


if __name__ == "__main__":
    main()
