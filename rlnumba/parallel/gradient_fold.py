"""The fold of gradients over ranks: ((g_0 + g_1) + g_2) + ... of a step's micro-batches, whatever the number of ranks.

    for each round of R micro-batches, one on each rank                  rounds(count, communicator)
        fold.begin(round)
        forward, backward                 fold.add_part of each layer, where gradients are folded by layer
        or join(folds, before)            of a rank without a micro-batch: what the others do layer by layer
        fold.add()                        of the whole gradient elsewhere
    fold.finish()

A fold has two halves: the first begins to move gradients between ranks, the second adds them up. One is under way at a
time. `finish` is called before the memory that it reads is written, so that a round moves beside the next forward.
"""

from typing import NamedTuple

from rlnumba.model.layer_gradients import AFTER, BEFORE, LayerGradients, update_order


class Round(NamedTuple):
    """Micro-batches [first, first + count) of a step, on ranks 0, 1, ...; own: this rank's, None on ranks >= count."""

    first: int
    count: int
    own: int | None

    @property
    def is_first(self):
        return self.first == 0


def rounds(count, communicator):
    """Iterate over the Rounds of a step of `count` micro-batches."""
    rank, world_size = communicator.rank, communicator.world_size
    for first in range(0, count, world_size):
        yield Round(first, min(world_size, count - first), first + rank if first + rank < count else None)


def join(folds, before=()):
    """Join the collectives of the others' forwards and then backwards, where this rank has no micro-batch in a round.

    folds: the GradientFolds of the models, in the order of the forwards and of the backwards. before: models that are
    run forward first.
    """
    for model in before:
        gather_layers(model.weights)
    for fold in folds:
        fold.join_forward()
    for fold in folds:
        fold.join_backward()


def gather_layers(weights):
    """Gather the layers of Weights, where these are in parts, as a forward does."""
    for index in range(len(weights.layers)):
        weights.layer(index)


class GradientFold:
    """The fold of one model's gradients.

    optimizer: the ShardedOptimizer that has this rank's part of the sum; grads: the gradients of a micro-batch, in
    which `flat` is folded as a whole, or LayerGradients, folded as soon as they are complete. shards: the weights with
    SlicedLayers that forward and backward gather layer by layer, also if an adapter is trained and not they, or None.
    """

    def __init__(self, optimizer, grads, shards=None):
        self.optimizer, self.grads, self.shards = optimizer, grads, shards
        self.is_by_layer = isinstance(grads, LayerGradients)
        self._round = Round(0, 1, 0)
        # The second half of the fold that is under way, or None.
        self._finish = None

    def begin(self, round_):
        """Begin a round."""
        self._round = round_

    def join_forward(self):
        """Gather layers in parts as a forward does."""
        if self.shards is not None:
            gather_layers(self.shards)

    def join_backward(self):
        """Join the collectives of a backward, those of a fold by layers and of layers in parts, with no gradient."""
        # As the others do before their backward.
        self.finish()
        layers = [] if self.shards is None else self.shards.layers
        if not self.is_by_layer:
            for index in reversed(range(len(layers))):
                self.shards.layer(index)
            return
        for index, parts in update_order(self.grads):
            if layers and index not in (BEFORE, AFTER):
                self.shards.layer(index)
            for part in parts:
                self.add_part(*part)
        self.finish()

    def add_part(self, start, gradient):
        """Begin to add gradient (n,), of the elements from `start` on, after finishing the part before."""
        self.finish()
        self._finish = self.optimizer.begin_fold_part(start, gradient, self._round.count, self._round.is_first)

    def add(self):
        """Begin to add the whole gradient of the round's micro-batch; nothing where parts have been added."""
        if not self.is_by_layer:
            gradient = None if self._round.own is None else self.grads.flat
            self._finish = self.optimizer.begin_fold(gradient, self._round.count, self._round.is_first)

    def finish(self):
        """Finish the fold that is under way; returns whether there was one."""
        if self._finish is None:
            return False
        finish, self._finish = self._finish, None
        finish()
        return True
