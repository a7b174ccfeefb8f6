"""The hosts of a run that Ray manages: a connection to the cluster, places on its nodes, and calls of actors.

    with connected(...):                    the cluster of RAY_ADDRESS, or the one of this host, or a new one here
        places = EnginePlaces(deploy, on_gpus)    num_engines places on num_infer_nodes nodes
        places.options(index)               for the actor that takes a place
        call(actor, "method", ..., timeout_s=60.0)

Ray is used for what it has: it starts processes on other nodes, notices that they end, starts them anew, also on
another node, chooses GPUs and moves arrays. It calls a frozen node alive for more than a minute, which is why every
call has its own time limit.
"""

import os
import signal
import socket
from contextlib import contextmanager

from rlnumba.errors import ConfigError, UserError
from rlnumba.parallel.placement import most_ranks_per_gpu

KEY = 'deploy.launcher = "ray"'
# Seconds in which places must be free that the nodes have: other runs may hold them.
FREE_S = 300.0
# Seconds in which a cluster must answer.
ANSWER_S = 20.0
# Without it Ray lets an actor see its own GPUs alone, and operations between them begin seconds later.
VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


# Whether the cluster that this process is connected to was started by it.
_is_of_this_process = False


class ActorEnded(Exception):
    """An actor has ended, or cannot be reached. is_final: whether Ray does not start it anew."""

    def __init__(self, message, is_final):
        super().__init__(message)
        self.is_final = is_final


class NoAnswer(Exception):
    """An actor has not answered in time."""


def package():
    """The module ray. Raises ConfigError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"{KEY} needs the package ray; pip install 'rlnumba[ray]'") from error
    return ray


def call(actor, method, *arguments, timeout_s):
    """The result of an actor's method. Raises what it raises, ActorEnded, and NoAnswer after timeout_s seconds."""
    ray = package()
    try:
        return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise NoAnswer(f"{method} was not answered within {timeout_s:g} s") from error
    except ray.exceptions.RayActorError as error:
        is_final = not isinstance(error, ray.exceptions.ActorUnavailableError)
        raise ActorEnded(_line_of(error), is_final) from error


@contextmanager
def connected(key, num_nodes, processes, on_gpus, is_one_here=False):
    """In the block this process is connected to a Ray cluster with num_nodes nodes, as `key` asks for.

    processes: the number on each node. on_gpus: whether these need GPUs, or are processes of the CPU. is_one_here:
    whether this node is one of them; Ray needs no processes on it. A cluster of this host alone is started where
    RAY_ADDRESS names none, and none runs here. A connection that there was before stays. Raises UserError where there
    is no cluster at RAY_ADDRESS, or it has fewer nodes.
    """
    global _is_of_this_process
    ray = package()
    was_connected = ray.is_initialized()
    # Ray ends the process at SIGTERM, in which a trainer saves a checkpoint.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if not was_connected:
        _is_of_this_process = _connect(ray, num_nodes * processes)
    try:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        here = ray.get_runtime_context().get_node_id() if is_one_here else None
        _check_nodes(nodes, key, num_nodes, processes, "GPU" if on_gpus else "CPU", here)
        yield
    finally:
        if not was_connected:
            ray.shutdown()
            _is_of_this_process = False


def is_of_this_process():
    """Whether the cluster is one that `connected` has started: bool."""
    return _is_of_this_process


def _connect(ray, count):
    """Connect this process: whether to a cluster that it has started for that, with room for `count` processes."""
    options = {"log_to_driver": False, "logging_level": "error"}
    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address:
            _check_answer(address)
        else:
            try:
                ray.init(num_cpus=count, num_gpus=count, include_dashboard=False, **options)
                return True
            except ValueError:
                pass  # one runs on this host, which has its own numbers
        ray.init(**options)
        return False
    except (OSError, RuntimeError, ValueError) as error:  # none there, of other versions, no address
        raise UserError(f"Ray cluster{f' at RAY_ADDRESS {address}' if address else ''}: {_line_of(error)}") from error


def _check_answer(address):
    """Raise OSError if nothing listens at host:port, where Ray itself would wait for many minutes."""
    host, found, port = address.rpartition(":")
    if found and "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()


def _line_of(error):
    return " ".join(str(error).split())


def _check_nodes(nodes, key, num_nodes, processes, resource, here):
    """Raise ConfigError if fewer of the nodes than num_nodes have room; here: id of one that needs none, or None."""
    needed = processes / (most_ranks_per_gpu() if resource == "GPU" else 1)
    fitting = [node for node in nodes if node["NodeID"] == here or node["Resources"].get(resource, 0) >= needed]
    if len(fitting) < num_nodes:
        with_this = ", this one among them," if here else ""
        raise ConfigError(
            f"{key} is {num_nodes}, and the Ray cluster has {len(fitting)}{with_this} with {needed:g} {resource}s or "
            f"more, of {len(nodes)} in all (`ray status` lists them)"
        )


class Bundles:
    """Room on num_nodes nodes for `count` actors on each, of `size` processes each: a placement group, and more.

    key: what asks for the nodes. on_gpus: whether processes need GPUs. strategy: that of the placement group; without:
    ids of nodes that are not taken. A context manager. Raises UserError where no room becomes free.
    """

    def __init__(self, key, num_nodes, count, size, on_gpus, strategy, without=()):
        self._ray, self._on_gpus, self._without = package(), on_gpus, set(without)
        self._size, self._gpus = size, size / most_ranks_per_gpu() if on_gpus else 0
        self._groups = []
        self.first = self.add(num_nodes, count, strategy)
        if not self.first.wait(FREE_S):
            self.close()
            raise UserError(
                f"{key}: {num_nodes} nodes of the Ray cluster did not have {count * size} free "
                f"{'GPUs' if on_gpus else 'CPUs'} each within {FREE_S:g} s (`ray status` lists them)"
            )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def add(self, num_nodes, count, strategy="SPREAD", without=()):
        """A further placement group; without: ids of nodes that are not taken from now on."""
        self._without |= set(without)
        selector = {"ray.io/node-id": f"!in({','.join(sorted(self._without))})"} if self._without else {}
        bundles = [{"CPU": count * self._size} | ({"GPU": count * self._gpus} if self._on_gpus else {})] * num_nodes
        group = self._ray.util.placement_group(
            bundles, strategy=strategy, bundle_label_selector=[selector] * num_nodes if selector else None
        )
        self._groups.append(group)
        return group

    def options(self, bundle, count=1, group=None):
        """The options of an actor that say where it is, in place of `count` of them: dict."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        found = {"num_cpus": count * self._size, "num_gpus": count * self._gpus}
        if self._on_gpus:
            found["runtime_env"] = {"env_vars": VISIBLE}
        strategy = PlacementGroupSchedulingStrategy(group or self.first, placement_group_bundle_index=bundle)
        return found | {"scheduling_strategy": strategy}

    def close(self):
        """Give all places back."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)


class EnginePlaces:
    """Places for a run's inference engines: a placement group with a bundle for the engines of each node.

    Bundles are on nodes of their own where there are enough (SPREAD), and one whose node ends moves to another node
    that has room. on_gpus: whether engines need GPUs. Raises UserError where no room becomes free.
    """

    def __init__(self, deploy, on_gpus):
        key, each = "deploy.num_infer_nodes", deploy.engines_per_node
        self._bundles = Bundles(key, deploy.num_infer_nodes, each, deploy.tensor_parallel_size, on_gpus, "SPREAD")
        # The bundle and the placement group of each engine.
        self._places = [(index // each, self._bundles.first) for index in range(deploy.num_engines)]

    def options(self, index):
        """The options of engine number `index`'s actor that say where it is: dict."""
        bundle, group = self._places[index]
        return self._bundles.options(bundle, group=group)

    def leave(self, index, node_id):
        """Give an engine another place: its node has not answered, and gets no engines any more.

        The engine's resources there stay taken, since Ray does not know that the node is frozen.
        """
        self._places[index] = 0, self._bundles.add(1, 1, without=[node_id])

    def close(self):
        """Give all places back."""
        self._bundles.close()


def visible_index(gpu):
    """The number that CUDA gives to a GPU of Ray's, where CUDA_VISIBLE_DEVICES may name some: int."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(str(gpu)) if visible else int(gpu)
