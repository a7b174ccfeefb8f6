"""A run as everything after its command reads it, from what its file says, the model and the device.

    run = resolve(run, on_gpu, total_bytes)     sizes of all ranks, importance weights, GPUs of an engine

What its model cannot do is an error here, before anything is loaded.
"""

from dataclasses import replace

from rlnumba.data.files import check_there
from rlnumba.engine.parallel_size import choose_size, warn_if_slow
from rlnumba.model.config import LM_HEAD
from rlnumba.model.hub import find_model, read_config
from rlnumba.model.quantized.copies import check_copies
from rlnumba.model.router_loss import check_router_loss, check_router_replay
from rlnumba.parallel.placement import num_sharing
from rlnumba.runs.prompt_run import check_sampling
from rlnumba.runs.run_inputs import located
from rlnumba.runtime import device
from rlnumba.trainers.teacher import check_teachers


def resolve(run, on_gpu, total_bytes, warns=False):
    """The Run.resolved of a run, whose deploy.tensor_parallel_size is a number that its model can be cut into.

    on_gpu, total_bytes: whether for a GPU, and of how many bytes; None where they are not known yet: "auto" stays.
    warns: whether to print where it is slow. Raises ConfigError for a number that does not divide the model's sizes or
    deploy.num_infer_gpus, and for parameters of sampling that are wrong, or cannot act on the model; UserError for a
    model or a file of rows that is not there. A resolved run's is itself.
    """
    run = run.resolved()
    here = located(run)
    check_there(here.data)
    find_model(here.model, weights=False)
    if run.generates:
        check_sampling(run)
        check_teachers(run)
    check_router_loss(run.train, lambda: read_config(find_model(here.model, weights=False)))
    if run.generates and run.train.generation.replays_experts:
        check_router_replay(read_config(find_model(here.model, weights=False)))
    if run.rollout_is_quantized:
        check_copies(read_config(find_model(here.model, weights=False)), run.engine.quantization)
    deploy = run.deploy
    if deploy.tensor_parallel_size == 1 or (not deploy.tensor_parallel_size and total_bytes is None):
        return run
    config = replace(read_config(find_model(here.model, weights=False)), heads=LM_HEAD)
    dtype = run.train.dtype or (config.dtype if on_gpu else "float32")
    here = deploy.num_train_gpus + (0 if deploy.launcher == "ray" else deploy.num_infer_gpus)
    share = (total_bytes or 0) * run.engine.gpu_memory_utilization / num_sharing(here)
    size = choose_size(deploy.tensor_parallel_size, config, dtype, share, on_gpu, run.quantization)
    if warns:
        warn_if_slow(size, config, dtype)
    return replace(run, deploy=replace(deploy, tensor_parallel_size=size))


def resolve_here(run, communicator):
    """resolve on this process's device, which rank 0 alone prints about. communicator: the ranks', or None."""
    is_first = communicator is None or communicator.rank == 0
    return resolve(run, device.name() == "cuda", device.memory_info()[1], is_first)
