"""On how many GPUs an inference engine of a run is: deploy.tensor_parallel_size, checked before anything is loaded."""

from dataclasses import replace

from rlnumba.engine.parallel_size import choose_size, warn_if_slow
from rlnumba.model.config import LM_HEAD
from rlnumba.model.transformer import find_model, read_config
from rlnumba.parallel.placement import num_sharing
from rlnumba.runtime import device


def with_engine_size(run, on_gpu, total_bytes, warns=False):
    """A run whose deploy.tensor_parallel_size is a number that its model can be cut into.

    on_gpu, total_bytes: whether for a GPU, and of how many bytes. warns: whether to print where it is slow. Raises
    ConfigError for a number that does not divide the model's sizes or deploy.num_infer_gpus.
    """
    deploy = run.deploy
    if deploy.tensor_parallel_size == 1:
        return run
    config = replace(read_config(find_model(run.model, weights=False)), heads=LM_HEAD)
    dtype = run.train.dtype or (config.dtype if on_gpu else "float32")
    here = deploy.num_train_gpus + (0 if deploy.launcher == "ray" else deploy.num_infer_gpus)
    share = total_bytes * run.engine.gpu_memory_utilization / num_sharing(here)
    size = choose_size(deploy.tensor_parallel_size, config, dtype, share, on_gpu)
    if warns:
        warn_if_slow(size, config, dtype)
    return replace(run, deploy=replace(deploy, tensor_parallel_size=size))


def engine_size_of(run, communicator):
    """with_engine_size on this process's device, which rank 0 alone prints about."""
    is_first = communicator is None or communicator.rank == 0
    return with_engine_size(run, device.name() == "cuda", device.memory_info()[1], is_first)
