"""Gradients of one layer at a time, for an optimizer step inside the backward.

    update(start, gradients) for: an untied LM head, the layers from the last to the first, then all the rest

A layer's matrices, nearly all parameters, have gradients in the model's dtype in a buffer that the layers share: they
are written by one backward and read by one update, so nothing is added to them and nothing needs float32. Gradients to
which a backward adds more than once, or in parts, are float32: those of the embedding and heads, norms and biases.
Source: Lv et al. 2023, arXiv 2306.09782 (LOMO), for the order; torchtune's optimizer_in_bwd.
"""

import weakref

import numpy as np

from rlnumba.kernels.nn.elementwise import fill
from rlnumba.model.parameter import layer_spans
from rlnumba.runtime import device, memory

# Words in place of a layer's number: before the layers' backward, and after it.
BEFORE, AFTER = "before", "after"


class LayerGradients:
    """Gradients of a model's Weights: layers, norm, embed_tokens, lm_head and score are views, as there.

    buffers: how many there are for a layer's matrices, each as large as the largest layer's; the layers use them in
    turn. An untied LM head and the embedding share
    memory. adds: whether those of the matrices are float32 as all others, to which a backward adds.
    """

    def __init__(self, weights, buffers=1, adds=False):
        self.adds = adds
        spans = {p.name: (p.offset, p.offset + p.padded_size) for p in weights.parameters}
        matrices = layer_spans(weights.parameters)
        longest = max(end - first for first, end in matrices)
        dtype = np.float32 if adds else weights.dtype
        memories = [_zeros((0, longest), dtype) for _ in range(buffers)]
        # (first element, gradients (n,)) of each part of weights.flat.
        self._layers = [(first, memories[i % buffers][: end - first]) for i, (first, end) in enumerate(matrices)]
        self._vectors = weights.decay_end, _zeros((weights.decay_end, weights.size))
        self._embedding = spans["model.embed_tokens"][0], _zeros(spans["model.embed_tokens"])
        self._head = (spans["lm_head"][0], self._embedding[1]) if "lm_head" in spans else None
        self._score = (spans["score"][0], _zeros(spans["score"])) if "score" in spans else None
        self.nbytes = sum(array.nbytes for array in (*memories, *(array for _, array in self.rest())))
        memory.track("grads", self.nbytes)
        weakref.finalize(self, memory.track, "grads", -self.nbytes)
        views = {p.name: self._view(p) for p in weights.parameters}
        self.embed_tokens, self.norm = views["model.embed_tokens"], views["model.norm"]
        self.lm_head = views.get("lm_head", self.embed_tokens if weights.lm_head is not None else None)
        self.score = views.get("score")
        self.layers = [tuple(block.views(views) for block in blocks) for blocks in weights.config.blocks]

    def _view(self, p):
        """The gradients of a Parameter."""
        if not p.decays:
            start, array = self._vectors
        elif p.layer is not None:
            start, array = self._layers[p.layer]
        else:
            start, array = {"model.embed_tokens": self._embedding, "lm_head": self._head, "score": self._score}[p.name]
        return array[p.offset - start : p.offset - start + p.size].reshape(p.shape)

    def zero(self):
        """Set to zero what a backward adds to."""
        for _, array in self.rest():
            fill(0.0, array)

    def layer(self, index):
        """(first element, gradients (n,)) of a layer's matrices."""
        return self._layers[index]

    def begin_layer(self, index):
        """Set to zero what the backward of a layer adds to."""
        if self.adds:
            fill(0.0, self._layers[index][1])

    def head(self):
        """(first element, gradients (n,)) of an untied LM head; None without one."""
        return self._head

    def begin_embedding(self):
        """Let the memory of an untied head, whose gradients have been read, be that of the embedding's."""
        if self._head is not None:
            fill(0.0, self._embedding[1])

    def rest(self):
        """(first element, gradients (n,)) of the embedding, of biases and norms, and of a score head: list."""
        return [part for part in (self._embedding, self._vectors, self._score) if part is not None]


def _zeros(span, dtype=np.float32):
    size = span[1] - span[0]
    with memory.allocating("grads", size * np.dtype(dtype).itemsize):
        return device.xp().zeros(size, dtype)


def backward_and_update(model, dhidden, tape, grads, update):
    """model.backward with LayerGradients; update(start, gradients) is called as soon as gradients (n,) are complete.

    They are those of the elements of weights.flat from `start` on. The gradients of heads must have been added before.
    update may read them until it is called for the second time after: with two buffers, layers alternate.
    """
    order = dict(update_order(grads))
    for part in order[BEFORE]:
        update(*part)

    def on_layer(index):
        for part in order[index]:
            update(*part)
        if index:
            grads.begin_layer(index - 1)
        else:
            grads.begin_embedding()

    grads.begin_layer(len(grads.layers) - 1)
    model.backward(dhidden, tape, grads, on_layer)
    for part in order[AFTER]:
        update(*part)


def update_order(grads):
    """[(layer or BEFORE or AFTER, [(first element, gradients (n,))])]: what is updated when, with LayerGradients."""
    layers = [(index, [grads.layer(index)]) for index in reversed(range(len(grads.layers)))]
    return [(BEFORE, [grads.head()] if grads.head() else []), *layers, (AFTER, grads.rest())]
