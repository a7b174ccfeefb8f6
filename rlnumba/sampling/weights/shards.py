"""The places of a shard's weights in those of the whole model: the part of a push that one process of an engine copies.

Weights, or an adapter, are sent whole, and all engines read the same bytes. A shard has whole rows of the matrices
(model/shard.py), which are contiguous there, too, so each process copies ranges.

A rank of the trainer may have a part alone (layer_shards.py), and what is sent is then made of those of all ranks.
"""

from rlnumba.model.lora import Adapter, Places
from rlnumba.model.shard import WHOLE, Range
from rlnumba.model.weights import Weights, parameters
from rlnumba.parallel.layer_shards import SlicedLayers
from rlnumba.runtime import device


def whole_of(trained):
    """(elements of the flat buffer, decay_end) of the whole model; `trained`, a Weights or Adapter, may be a shard of
    it."""
    if is_in_parts(trained):
        return trained.size, trained.decay_end
    if trained.shard == WHOLE:
        return trained.flat.shape[0], trained.decay_end
    if isinstance(trained, Adapter):
        size = Places.of(trained.config, trained.lora).size
        return size, size
    placed = parameters(trained.config)
    return placed[-1].offset + placed[-1].padded_size, next(p.offset for p in placed if not p.decays)


def is_in_parts(trained):
    """Whether each rank of the trainer has a part of what is trained, so that all take part where it is sent."""
    return isinstance(trained, SlicedLayers)


def kind_of(trained):
    """Whether this is a Weights or an Adapter: str."""
    return Weights.__name__ if isinstance(trained, Weights) else type(trained).__name__


def whole_bytes(trained):
    """Bytes of all that is trained."""
    return whole_of(trained)[0] * trained.flat.itemsize


def host_part(trained, first, count):
    """Elements first, first + 1, ... of all that is trained, on the host: (count,); fewer at the end.

    If it is in parts, only rank 0 gets them; other ranks call this with the same arguments.
    """
    count = min(count, whole_of(trained)[0] - first)
    if is_in_parts(trained):
        return trained.host_part(first, count)
    return device.to_host(trained.flat[first : first + count])


def ranges_of(trained):
    """The Ranges that make up a Weights or Adapter, without the padding between parameters: list; of a whole one it is
    one Range."""
    if isinstance(trained, Adapter):
        return trained.places.ranges()
    shard = trained.shard
    if shard == WHOLE:
        return [Range(0, 0, trained.flat.shape[0])]
    found = []
    for own, whole in zip(trained.parameters, parameters(trained.config), strict=True):
        ranges = whole.ranges_of(shard)
        found += [Range(own.offset + first, whole.offset + source, count) for first, source, count in ranges]
    return found


def pieces_of(ranges, size):
    """Ranges of at most `size` elements that are together the same as `ranges`: iterator."""
    for first, source, count in ranges:
        for at in range(0, count, size):
            yield Range(first + at, source + at, min(size, count - at))
