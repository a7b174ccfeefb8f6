"""The hosts of a run that Ray manages: a connection to the cluster, places on its nodes, and calls of actors.

    with connected(deploy, on_gpus):        the cluster of RAY_ADDRESS, or the one of this host, or a new one here
        places = Places(deploy, on_gpus)    num_engines places on num_infer_nodes nodes
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

from rlnumba.distributed.placement import most_ranks_per_gpu
from rlnumba.errors import ConfigError, UserError

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
    """What a method of an actor returns. Raises what it raises, ActorEnded, and NoAnswer after timeout_s seconds."""
    ray = package()
    try:
        return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise NoAnswer(f"{method} was not answered within {timeout_s:g} s") from error
    except ray.exceptions.RayActorError as error:
        is_final = not isinstance(error, ray.exceptions.ActorUnavailableError)
        raise ActorEnded(_line_of(error), is_final) from error


@contextmanager
def connected(deploy, on_gpus):
    """In the block this process is connected to a Ray cluster that has the nodes of a DeployConfig.

    on_gpus: whether engines need GPUs, or are processes of the CPU. A cluster of this host alone is started where
    RAY_ADDRESS names none, and none runs here. A connection that there was before stays. Raises UserError where there
    is no cluster at RAY_ADDRESS, or it has fewer nodes.
    """
    global _is_of_this_process
    ray = package()
    was_connected = ray.is_initialized()
    # Ray ends the process at SIGTERM, in which a trainer saves a checkpoint.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if not was_connected:
        _is_of_this_process = _connect(ray, deploy)
    try:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        _check_nodes(ray.nodes(), deploy, "GPU" if on_gpus else "CPU")
        yield
    finally:
        if not was_connected:
            ray.shutdown()
            _is_of_this_process = False


def is_of_this_process():
    """Whether the cluster is one that `connected` has started: bool."""
    return _is_of_this_process


def _connect(ray, deploy):
    """Connect this process: whether to a cluster that it has started for that."""
    options = {"log_to_driver": False, "logging_level": "error"}
    count, address = deploy.num_infer_gpus, os.environ.get("RAY_ADDRESS")
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


def _check_nodes(nodes, deploy, resource):
    """Raise ConfigError if there are fewer nodes than are asked for that have as many GPUs, or CPUs."""
    needed = deploy.num_infer_gpus / deploy.num_infer_nodes / (most_ranks_per_gpu() if resource == "GPU" else 1)
    found = [node for node in nodes if node["Alive"]]
    fitting = [node for node in found if node["Resources"].get(resource, 0) >= needed]
    if len(fitting) < deploy.num_infer_nodes:
        raise ConfigError(
            f"deploy.num_infer_nodes is {deploy.num_infer_nodes}, and the Ray cluster has {len(fitting)} with "
            f"{needed:g} {resource}s or more, of {len(found)} in all (`ray status` lists them)"
        )


class Places:
    """Places for a run's inference engines: a placement group with a bundle for the engines of each node.

    Bundles are on nodes of their own where there are enough (SPREAD), and one whose node ends moves to another node
    that has room. on_gpus: as of `connected`. Raises UserError where no room becomes free.
    """

    def __init__(self, deploy, on_gpus):
        self._ray, self._on_gpus = package(), on_gpus
        # Of an engine: processes, and GPUs.
        self._size = deploy.tensor_parallel_size
        self._gpus = self._size / most_ranks_per_gpu() if on_gpus else 0
        each = deploy.engines_per_node
        self._groups = [self._group([self._resources(each)] * deploy.num_infer_nodes)]
        # Of each engine: its placement group and bundle.
        self._places = [(self._groups[0], index // each) for index in range(deploy.num_engines)]
        # Ids of nodes that have not answered.
        self._frozen = set()
        if not self._groups[0].wait(FREE_S):
            self.close()
            raise UserError(
                f"deploy.num_infer_nodes is {deploy.num_infer_nodes}: not so many nodes of the Ray cluster had "
                f"{each * self._size} free {'GPUs' if on_gpus else 'CPUs'} in {FREE_S:g} s (`ray status` lists them)"
            )

    def options(self, index):
        """The options of engine number `index`'s actor that say where it is: dict."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, bundle = self._places[index]
        found = {"num_cpus": self._size, "num_gpus": self._gpus}
        if self._on_gpus:
            found["runtime_env"] = {"env_vars": VISIBLE}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        return found | {"scheduling_strategy": strategy}

    def leave(self, index, node_id):
        """Give an engine another place: its node has not answered, and gets no engines any more.

        What the engine had there stays taken, since Ray does not know that the node is frozen.
        """
        self._frozen.add(node_id)
        selector = {"ray.io/node-id": f"!in({','.join(sorted(self._frozen))})"}
        self._groups.append(self._group([self._resources(1)], bundle_label_selector=[selector]))
        self._places[index] = self._groups[-1], 0

    def close(self):
        """Give all places back."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)

    def _resources(self, count):
        """Those of so many engines."""
        return {"CPU": count * self._size} | ({"GPU": count * self._gpus} if self._on_gpus else {})

    def _group(self, bundles, **options):
        return self._ray.util.placement_group(bundles, strategy="SPREAD", **options)
