"""The policy that trainers share: it turns packed batches into log-probs, takes gradients back, and is updated.

policy.zero_grad(learning_rate)
for each micro-batch:
    with policy.scope():
        forward = policy.forward(batch, logprobs, entropy)     ids -> hidden -> log-probs of the targets
        ...                                                    the loss: log-probs -> dlogprobs
        policy.backward(forward, dlogprobs)                    dlogprobs -> gradients
policy.step(learning_rate)                                     gradients -> weights

The gradients of a step are ((g_0 + g_1) + g_2) + ...: that of each micro-batch is completed as if it were alone, then
added to those before by one float32 addition an element. A step's bits therefore do not depend on which GPU computes
which micro-batch.
"""

import math
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rlnumba.checkpoint import ArrayPart
from rlnumba.data.prefix_tree import PrefixRule
from rlnumba.errors import ConfigError
from rlnumba.kernels.nn.elementwise import add, gather_rows, scale
from rlnumba.model.blocks.low_rank import Dropout
from rlnumba.model.config_mixture import idle_parameters
from rlnumba.model.heads import HeadGradients, LogprobHead, ValueHead
from rlnumba.model.layer_gradients import backward_and_update
from rlnumba.model.router_loss import RouterLosses
from rlnumba.model.transformer import Tape, packed_attention
from rlnumba.optim import AdamWConfig, Optimizer
from rlnumba.parallel.gradient_fold import GradientFold, join, rounds
from rlnumba.parallel.layer_shards import LayerOptimizer, LayerShards, SlicedLayers
from rlnumba.parallel.zero import Part, ShardedOptimizer
from rlnumba.reporting.stderr import log
from rlnumba.runs.gradients import Gradients
from rlnumba.runs.graphs import MicroBatchGraphs
from rlnumba.runtime import device, signals
from rlnumba.runtime.arena import Arena
from rlnumba.runtime.context import Context
from rlnumba.runtime.transfer import copy_to_device


class Forward(NamedTuple):
    """A forward whose backward has not begun: its Tape, its head, and what the head has saved."""

    tape: Tape
    head: object
    saved: object


class Policy:
    """A model in training: weights, gradients, optimizer, activation arena, the Context its kernels run in.

    model, reference: Transformers, the latter None where the loss has no KL term; train: the [train] section;
    temperature: divides the logits; seed: draws stochastic rounding, and dropout. A model with an adapter trains that
    alone. communicator: that of the ranks that train together, each a part of every step's micro-batches
    (each_micro_batch), or None: this process alone.
    """

    def __init__(self, model, train, reference=None, temperature=1.0, seed=0, communicator=None):
        self.model, self.reference, self.train = model, reference, train
        self.temperature, self.logprob_head = temperature, LogprobHead(temperature)
        self.seed, self.micro_batch = seed, 0
        # With deploy.zero_stage = 3, also where they are the frozen base of an adapter.
        self.shards_layers = isinstance(model.weights, SlicedLayers)
        self.communicator = communicator if communicator is not None and communicator.world_size > 1 else None
        self.gradients = Gradients(model, train, self.communicator)
        self.grads = self.gradients.arrays
        config = AdamWConfig.of(train, seed)
        if self.communicator is None:
            self.optimizer = Optimizer(model.trained, self.grads, config)
        else:
            kind = LayerOptimizer if isinstance(model.trained, LayerShards) else ShardedOptimizer
            self.optimizer = kind(model.trained, communicator, config)
        self.fold = None
        if self.communicator is not None:
            self.fold = GradientFold(self.optimizer, self.grads, model.weights if self.shards_layers else None)
        if model.adapter is not None:
            self._share_master(model.adapter)
        self.arena = Arena("activations", lends=True)
        self.context = Context()
        self._is_training = True
        # Whether, for now, sequences of a micro-batch have all of their own rows.
        self._computes_apart = False
        self.router = RouterLosses(model.config, train)
        if train.share_prefixes == "always" and self.prefix_sharing(model) is None:
            raise ConfigError(
                "train.share_prefixes true needs a model of attention, dense MLPs and mixtures of experts, no "
                "lora.lora_dropout, no loss of routers (router_aux_loss_coef 0), and on a GPU kernels of an H100 or "
                "H200, linear attention in bfloat16; `auto` shares prefixes where it can"
            )
        # Those of the optimizer step that each_micro_batch goes through, on all ranks.
        self.num_micro_batches, self._has_said_who_waits = 1, False
        of_token = model.weights.num_parameters - idle_parameters(model.config)
        # A graph cannot gather layers from other ranks.
        captures = not (self.folds_layers or self.shards_layers)
        self.graphs = MicroBatchGraphs(train, self.has_dropout, of_token, captures)
        # With optimizer_in_backward, of the backward to come.
        self._learning_rate = None
        # Values that a loss carries from one step to the next, by name: JSON, part of the checkpoint.
        self.loss_state = {}
        # From the first write of an optimizer step on, until the trainer's loop says that the step is complete.
        self.is_updating = False
        # Functions that are called before each micro-batch of any rank, and before the weights are written: those of an
        # engine that uses the same weights meanwhile.
        self.before_micro_batch, self.before_update = [], []
        # The GrammarReplay of the run's completions, where they are drawn with a grammar.
        self.grammar = None
        # Whether the engine reads copies in 8 bits of the weights (engine.quantization).
        self.rollout_is_quantized = False
        # The Teachers that score its completions, or None.
        self.teachers = None
        # The TeacherEngines of distillation, where they draw completions, or None.
        self.teacher_engines = None
        # Functions of (parts, results) that are called when the metrics of an optimizer step are read, with its
        # micro-batches on the host, and what the step has computed of each, by name.
        self.after_step = []

    @property
    def folds_layers(self):
        """Whether gradients are folded over the ranks layer by layer, and never are there at once."""
        return self.fold is not None and self.fold.is_by_layer

    def _share_master(self, adapter):
        """Start the optimizer's float32 master weights from the adapter's, and save them with the adapter."""
        master = self.optimizer.state.get("master")
        if master is not None and adapter.master is not None:
            device.synchronize()  # copies to host memory that the optimizer began
            start = self.optimizer.first_element
            own = adapter.master[start : start + len(master)]
            master[...] = own if self.train.offload_optimizer else device.asarray(own)
        adapter.master = master if self.communicator is None else None

    def gather_adapter(self):
        """Give rank 0 the float32 values of a 16-bit adapter, which are saved. Called by all ranks before they save."""
        if self.communicator is not None and self.model.adapter is not None and "master" in self.optimizer.state:
            self.model.adapter.master = self.optimizer.gathered("master")

    def each_micro_batch(self, batches, others=(), models_before=lambda of_round: ()):
        """Iterate over those of a step's micro-batches that this rank computes: every R-th, with R ranks.

        batches: a sequence of all of them, the same on every rank, in the order in which their gradients are added.
        The block of the loop adds the gradient of one micro-batch. others: further Policies, to whose gradients it
        adds, too: it runs this one forward and then the others, and then backward in the same order. models_before:
        called with the list of the `round_of` a micro-batch, the models whose layers the block gathers first, in order.
        """
        self.num_micro_batches = len(batches)
        if self.communicator is None:
            for batch in batches:
                for function in self.before_micro_batch:
                    function()
                yield batch
            return
        policies = (self, *others)
        for round_ in rounds(len(batches), self.communicator):
            # As often as one rank does it.
            for _ in range(round_.count):
                for function in self.before_micro_batch:
                    function()
            for policy in policies:
                policy.fold.begin(round_)
            if round_.own is None:
                of_round = batches[round_.first : round_.first + round_.count]
                join([policy.fold for policy in policies], models_before(of_round))
            else:
                for policy in policies:
                    policy.micro_batch = round_.own
                    if policy.folds_layers and not round_.is_first:
                        policy.gradients.zero()
                yield batches[round_.own]
            # One fold is under way at a time, and that of this policy until the next backward.
            self.begin_gradients()
            for policy in (*others, self):
                policy.fold.add()
                if policy is not self:
                    policy.begin_gradients()
        self.fold.finish()

    def say_who_waits(self):
        """Log, once, that the last optimizer step left a quarter of the ranks' time or more unused.

        Micro-batches follow from the run's keys alone, so that runs on any number of ranks have the same sums.
        """
        if self.communicator is None or self._has_said_who_waits:
            return
        world_size, count = self.communicator.world_size, self.num_micro_batches
        waiting = -count % world_size
        if 4 * waiting >= count + waiting:
            self._has_said_who_waits = True
            log(
                f"{count} micro-batch{'es' if count > 1 else ''} of a step for {world_size} ranks: {waiting} of them "
                f"wait{'s' if waiting == 1 else ''} for the last; a smaller train.max_tokens_per_micro_batch or "
                "train.per_device_train_batch_size gives each as many"
            )

    def round_of(self, batches, index):
        """Those of a step's micro-batches that the ranks compute at the same time as number `index`, in order."""
        world_size = 1 if self.communicator is None else self.communicator.world_size
        first = index // world_size * world_size
        return batches[first : first + world_size]

    def begin_gradients(self):
        """To be called before a micro-batch writes gradients: those of the one before are added up, then zero."""
        if self.fold is not None and self.fold.finish():
            self.gradients.zero()

    def own(self, parts):
        """This rank's share of a list of parts of a computation: every R-th, with R ranks.

        Ranks that gather layers together all have as many parts: some do the last one once more.
        """
        if self.communicator is None:
            return parts
        own = parts[self.communicator.rank :: self.communicator.world_size]
        is_short = self.shards_layers and len(own) * self.communicator.world_size < len(parts)
        return [*own, parts[-1]] if is_short else own

    def of_all_micro_batches(self, values, count=None):
        """The values of each_micro_batch, or of `own`, of all ranks in the order of the whole: a list.

        values: what can be pickled. count: the number of all parts, after `own`.
        """
        if self.communicator is None:
            return values
        if count is not None:
            values = values[: len(range(self.communicator.rank, count, self.communicator.world_size))]
        of_ranks = self.communicator.objects(values)
        count = sum(map(len, of_ranks))
        return [of_ranks[k % len(of_ranks)][k // len(of_ranks)] for k in range(count)]

    def run(self, function, micro_batch, outputs, *constants):
        """Call function(policy, batch, results, *constants) for a MicroBatch, as a graph where that pays.

        See graphs.MicroBatchGraphs.run. To be called outside of `scope`: the function runs inside it.
        """
        return self.graphs.run(self, function, micro_batch, outputs, constants)

    def run_training(self, function, micro_batch, outputs, *constants, pads=True):
        """Do what `run` does for a function with a forward and a backward, whose results have the routers', too.

        pads: False for a function that reads from the device, which never runs as a graph.
        """
        sent = self.router.inputs(micro_batch.num_tokens, self.num_micro_batches)
        micro_batch, outputs = micro_batch.with_arrays(others=sent), outputs | self.router.outputs
        read = self.graphs.run(self, function, micro_batch, outputs, constants, pads)
        self.router.add(read)
        return read

    def scope(self):
        """Activations of the micro-batch inside come from the arena and are freed at the end of the block."""
        return self.arena.scope()

    def logprobs(self, batch, logprobs, entropy=None, top1=None, model=None):
        """Write log-probs (T,) f32, entropy (T,) f32 and top1 (T,) i32 of a TargetBatch, without a tape.

        model: the policy's, or another such as the reference.
        """
        if model is not None and model is not self.model:
            # Thresholds and experts are of this model: another one has all of its own.
            batch = replace(batch, thresholds=None, routed_experts=None)
        self._evaluate(model or self.model, self.logprob_head, batch, logprobs, entropy, top1)

    def hidden_rows(self, model, batch):
        """The hidden states (T, D) of another model for the rows of a TargetBatch, in the arena."""
        gathered = self.arena.empty((batch.rows.shape[0], model.config.hidden_size), model.dtype)
        with self.scope():
            gather_rows(self._hidden(model, replace(batch, routed_experts=None)), batch.rows, gathered)
        return gathered

    def values(self, batch, values):
        """Write values (T,) f32, the score head's output for the rows of a TargetBatch, without a tape."""
        self._evaluate(self.model, ValueHead(), batch, values)

    def _evaluate(self, model, head, batch, *outputs):
        with self.scope():
            head.forward(model, self._hidden(model, batch), batch, self.arena, *outputs)

    @property
    def has_dropout(self):
        """Whether the training forward drops out inputs, so that its log-probs differ from those of `logprobs`."""
        return self._is_training and self.model.adapter is not None and self.model.adapter.lora.lora_dropout > 0

    @contextmanager
    def evaluating(self):
        """Inside, `forward` drops nothing out, as where a model is evaluated."""
        self._is_training = False
        try:
            yield
        finally:
            self._is_training = True

    def prefix_sharing(self, *models):
        """The PrefixRule of micro-batches for models, the policy's or others, None where their sequences have all of
        their own rows. Models that are None are left out."""
        models = [model for model in models if model is not None]
        found = [model.prefix_sharing for model in models]
        # The masks of dropout follow from the rows.
        has_dropout = any(model.adapter is not None and model.adapter.lora.lora_dropout > 0 for model in models)
        # The routers' loss is a mean over the tokens of a micro-batch.
        never = self.train.share_prefixes == "never" or self._computes_apart or self.router.coefficient
        if never or has_dropout or None in found:
            return None
        return PrefixRule(max(each.multiple for each in found), min(each.levels for each in found))

    @contextmanager
    def computing_apart(self):
        """Inside, no micro-batch shares prefixes: of all forms of one it then has the most tokens."""
        self._computes_apart = True
        try:
            yield
        finally:
            self._computes_apart = False

    def new_tape(self, batch):
        """A Tape for a TargetBatch, the next micro-batch of the optimizer step."""
        dropout = None
        if self.has_dropout:
            step = self.optimizer.steps + self.optimizer.skipped_steps
            dropout = Dropout(self.model.adapter.lora.lora_dropout, self.seed, step, self.micro_batch)
        self.micro_batch += 1
        router = None
        if self._is_training:
            router = self.router.new_term(batch.router, len(batch.input_ids), self.num_micro_batches)
        tape, kept = Tape(dropout=dropout, router=router), self.train.kept_activations
        tape.recompute = kept == "minimal"
        if kept == "selective":
            tape.modules, tape.num_layers = frozenset(self.train.recompute_modules), self.train.recompute_num_layers
        return tape

    def forward(self, batch, *outputs, head=None):
        """Write the outputs of a head of model/heads.py for a TargetBatch, with a tape: the Forward for `backward`.

        head: by default the LogprobHead, whose outputs are those of `logprobs`. `backward` is called in the same scope.
        """
        tape, head = self.new_tape(batch), self.logprob_head if head is None else head
        hidden = self._hidden(self.model, batch, tape)
        return Forward(tape, head, head.forward(self.model, hidden, batch, self.arena, *outputs))

    def backward(self, forward, *derivatives):
        """Add to the gradients what follows from the derivatives of the loss, (T,) f32, by the outputs of a head."""
        gradients = self._begin_backward(forward.head)
        dhidden = forward.head.backward(self.model, forward.saved, gradients, self.arena, *derivatives)
        self._backward(dhidden, forward.tape, gradients.lm_head)

    def forward_backward(self, batch, derivative, *outputs, head=None):
        """forward and backward at once, for a derivative by the first output known beforehand: fewer GEMMs."""
        tape, head = self.new_tape(batch), self.logprob_head if head is None else head
        hidden, gradients = self._hidden(self.model, batch, tape), self._begin_backward(head)
        of_head = self.model, hidden, batch, gradients, self.arena
        dhidden = head.forward_backward(*of_head, derivative, outputs)
        self._backward(dhidden, tape, gradients.lm_head)

    def _begin_backward(self, head):
        """The HeadGradients of a backward, once the gradients of the micro-batch before are added up."""
        self.begin_gradients()
        return HeadGradients(self.gradients.head_target() if head.writes_lm_head else None, self.grads.score)

    def _backward(self, dhidden, tape, head=None):
        """The backward of the layers and the embedding; head: what the LM head's has written, None without one."""
        if not (self.folds_layers or self.train.optimizer_in_backward):
            self.gradients.backward(self.model, dhidden, tape, head)
            return
        self.gradients.are_zero = False
        if self.folds_layers:
            backward_and_update(self.model, dhidden, tape, self.grads, self.fold.add_part)
            self.fold.finish()
            return
        if self._learning_rate is None:
            raise ValueError("optimizer_in_backward: a second backward in a step, or no learning rate in zero_grad")
        # From here on the weights change.
        self._begin_update()
        self.optimizer.begin(self._learning_rate)
        self._learning_rate = None
        backward_and_update(self.model, dhidden, tape, self.grads, self.optimizer.update)

    def _begin_update(self):
        """The weights are about to be written."""
        signals.hold()
        self.is_updating = True
        for function in self.before_update:
            function()

    def _hidden(self, model, batch, tape=None):
        attention = packed_attention(model, batch, self.arena)
        tokens, replayed = (batch.input_ids, batch.position_ids), batch.routed_experts
        return model.forward(*tokens, attention, tape, self.arena, replayed=replayed)

    def zero_grad(self, learning_rate=None):
        """Begin an optimizer step: set the gradients to zero.

        learning_rate: that of `step`, which optimizer_in_backward needs.
        """
        self.gradients.zero()
        self._learning_rate = learning_rate
        self.micro_batch = 0

    def step(self, learning_rate):
        """One optimizer step: LateMetrics of grad_norm, learning_rate and, if there are any, skipped_steps.

        With optimizer_in_backward the backward has taken it, and it ends here. It returns before the weights are
        written: a reader on another stream, as the engine, waits for this one. From here on a signal waits until the
        trainer's loop calls signals.release, when the step is complete.
        """
        self._begin_update()
        in_backward = self.train.optimizer_in_backward
        norm = self.optimizer.finish() if in_backward else self.optimizer.step(learning_rate)
        readings, has_router = self.router.take(), self.router.num_experts > 0

        def read():
            metrics = {"grad_norm": float(norm), "learning_rate": learning_rate}
            if has_router:
                metrics |= self.router.metrics(self.of_all_micro_batches([each() for each in readings]))
            if self.communicator is not None:
                self.communicator.check()
            return metrics | ({"skipped_steps": norm.skipped_steps} if norm.skipped_steps else {})

        return LateMetrics(read)

    def skip_step(self):
        """End an optimizer step that has nothing to train on: the weights stay as they are, for engines that read them
        meanwhile, too."""
        self._begin_update()

    def state_dict(self):
        """The state for a checkpoint besides the weights; a reference that does not move is the run's `model`.

        On several ranks, all of which call this, arrays are ArrayParts.
        """
        self.gather_adapter()
        moved = None
        if self.reference is not None and self.train.reference_move is not None:
            weights = self.reference.weights
            moved = self.host_part(weights.flat, weights.first, weights.size)
        return {
            "optimizer": self.optimizer.state_dict(),
            "reference": moved,
            "loss": dict(self.loss_state),
        }

    def load_state_dict(self, state):
        """Restore what state_dict returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss_state = dict(state.get("loss", {}))
        if self.reference is not None and state["reference"] is not None:
            spans = self.reference.weights.spans()
            copy_to_device([(array, state["reference"][first : first + len(array)]) for first, array in spans])

    def host_part(self, flat, first=0, size=None):
        """A copy on the host of this rank's part of an array that all ranks have, an ArrayPart; of one rank all.

        flat: its elements from `first` on that this rank has, its part among them; size: all of them, by default those
        of flat.
        """
        if self.communicator is None:
            return device.host_copy(flat)
        size = len(flat) if size is None else size
        part = Part.of(size, self.communicator.rank, self.communicator.world_size)
        return ArrayPart(device.host_copy(flat[part.start - first : part.stop - first]), part.start, size)

    def move_reference_if_due(self, step):
        """With sync_ref_model, move the reference every ref_model_sync_steps steps; step: optimizer steps done."""
        move = self.train.reference_move
        if self.reference is not None and move is not None and step % move.steps == 0:
            self.move_reference(move.share)

    def move_reference(self, alpha):
        """reference = alpha policy + (1 - alpha) reference (arXiv 2404.09656), of all elements that this rank has."""
        spans = zip(self.model.weights.spans(), self.reference.weights.spans(), strict=True)
        for (_, own), (_, flat) in spans:
            with self.scope():
                part = self.arena.empty(flat.shape, flat.dtype)
                scale(own, alpha, part)
                scale(flat, 1.0 - alpha, flat)
                add(part, flat, flat)


class LateMetrics(Mapping):
    """Metrics by name that are still on their way from the device: the first look at them waits for it.

    So the host goes on to what comes after a step while the device is still at it. read(): dict.
    """

    def __init__(self, read):
        self._read, self._metrics = read, None

    def _found(self):
        if self._metrics is None:
            # The arrays that it reads are not needed any more.
            self._metrics, self._read = self._read(), None
        return self._metrics

    def __getitem__(self, name):
        return self._found()[name]

    def __iter__(self):
        return iter(self._found())

    def __len__(self):
        return len(self._found())

    def __or__(self, other):
        return self._found() | dict(other)

    def __ror__(self, other):
        return other | self._found()


@lru_cache(maxsize=4)
def epoch_order(count, shuffle, seed, epoch):
    """(count,) int64, read-only: the rows of an epoch in the order in which they are visited."""
    order = np.random.default_rng((seed, epoch)).permutation(count) if shuffle else np.arange(count)
    # Each step asks for that of its epoch.
    order.flags.writeable = False
    return order


class Schedule:
    """The optimizer steps of a run, as transformers counts them: the last one of an epoch may be shorter.

    micro_steps_per_epoch: forward and backward passes, of which an optimizer step has train.micro_batches_per_step.
    """

    def __init__(self, train, micro_steps_per_epoch):
        self.accumulation = train.micro_batches_per_step
        self.micro_steps_per_epoch = micro_steps_per_epoch
        self.steps_per_epoch = -(-micro_steps_per_epoch // self.accumulation)
        epochs = math.ceil(train.num_train_epochs * self.steps_per_epoch)
        self.total_steps = train.max_steps if train.max_steps > 0 else epochs

    def epochs_done(self, step):
        """The epochs that `step` optimizer steps make: float."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs + rest * self.accumulation / self.micro_steps_per_epoch
