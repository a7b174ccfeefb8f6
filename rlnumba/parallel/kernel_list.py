"""The kernels that ranks of a model that is cut over several GPUs are going to launch: see engine/kernel_list.py."""

from typing import NamedTuple

from rlnumba.engine import kernel_list
from rlnumba.model.shard import Shard
from rlnumba.parallel.planned_rank import ListedRank
from rlnumba.parallel.tensor_parallel import TensorParallel
from rlnumba.runtime.shapes import launches_only


class ShardsRequest(NamedTuple):
    """An engine on `parts` GPUs, and sequences that are scored by as many.

    whole: engine.kernel_list.Request of the model; scores_whole: whether one GPU with all of it scores them, too.
    """

    parts: int
    whole: tuple
    scores_whole: bool = False


def list_signatures(request, properties):
    """The kernels that a ShardsRequest needs on a GPU of these device.Properties: two lists of signatures, those of the
    engine and those that score."""
    request = ShardsRequest(*request)
    whole, make_model = kernel_list.Request(*request.whole), part_of(request.parts)
    with launches_only(properties) as of_engine:
        if whole.prompt_lengths:
            kernel_list.launch_steps(whole, make_model)
    with launches_only(properties) as of_scores:
        if whole.scored:
            kernel_list.launch_scores(whole, make_model)
        if whole.scored and request.scores_whole:
            kernel_list.launch_scores(whole)
    return [of_engine, of_scores]


def part_of(count):
    """The same as kernel_list.model_of, but for one of the `count` parts that an engine on as many GPUs cuts a model
    into."""
    shard = Shard(count - 1, count)

    def make_model(request, config):
        model = kernel_list.model_of(request, config, shard)
        model.ranks = TensorParallel(ListedRank(shard.rank, count), config.vocab_size)
        return model

    return make_model
