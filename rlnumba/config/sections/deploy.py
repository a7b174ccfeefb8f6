"""The section [deploy]: GPUs, processes and nodes."""

from dataclasses import dataclass

from rlnumba.config.keys import Section, key
from rlnumba.errors import ConfigError


@dataclass(frozen=True)
class DeployConfig(Section):
    """GPUs, processes and nodes that a run is spread over."""

    section = "deploy"
    num_train_gpus: int = key(1, "GPUs that train; on the cpu device, processes.", minimum=1)
    num_infer_gpus: int = key(
        0,
        "GPUs that generate while others train, with `[async]`, on all nodes; 0: the training GPUs generate, and with "
        "num_infer_nodes: gpus_per_node on each.",
        minimum=0,
        of="generates_ahead",
    )
    tensor_parallel_size: int = key(
        1,
        "So many of the GPUs that generate compute one model together, each with a part of its weights and of the KV "
        "cache; the text is that of one (vLLM). `auto` (0), for num_infer_gpus: as few as it fits in.",
        minimum=0,
        words={"auto": 0},
        of="generates_ahead",
    )
    zero_stage: int = key(
        2,
        "What the training GPUs share (OpenRLHF): 2: gradients and the optimizer's state; 3: the layers' weights, too, "
        "for models that are too large otherwise, with [lora] those of the frozen base; GPUs that also generate gather "
        "them for each rollout. The result is the same.",
        choices=(2, 3),
    )
    launcher: str = key(
        "spawn",
        "What starts processes: `spawn`, on this host; `ray`, also on the nodes of a Ray cluster (RAY_ADDRESS).",
        choices=("spawn", "ray"),
    )
    num_train_nodes: int = key(
        1, "Nodes that train, each with as many of num_train_gpus; the first is the one of the command.", minimum=1
    )
    num_infer_nodes: int = key(
        0,
        "Nodes of the Ray cluster that generate, each with as many of num_infer_gpus.",
        minimum=0,
        of="generates_ahead",
    )
    gpus_per_node: int = key(
        8,
        "Most GPUs of a node of the Ray cluster that train, or generate.",
        minimum=1,
        needs=("deploy.launcher", ("ray",)),
    )
    update_weights_bucket_megabytes: int = key(
        1024, "Weights are sent to the inference GPUs in parts of this size (verl).", minimum=1, of="generates_ahead",
        needs="deploy.num_infer_gpus",
    )  # fmt: skip
    update_weights_transport: str = key(
        "auto",
        "The way of new weights to inference processes: `peer`, from GPU to GPU, into memory for one more copy of them "
        "there; `shm`, through the host's memory; `auto`: `peer` between GPUs of one host, if a copy takes at most a "
        "quarter of a GPU's memory, and no inference process needs older versions.",
        choices=("auto", "peer", "shm"),
        of="generates_ahead",
        needs="deploy.num_infer_gpus",
    )
    weight_sync_timeout: float = key(
        600.0, "Seconds in which these must have taken new weights (TRL).", above=0, of="generates_ahead",
        needs="deploy.num_infer_gpus",
    )  # fmt: skip
    max_restarts: int = key(
        3, "How often an inference process that has ended is started anew.", minimum=0, of="generates_ahead",
        needs="deploy.num_infer_gpus",
    )  # fmt: skip
    dist_timeout_seconds: float = key(600.0, "How long a rank waits for the others before the run ends.", above=0)

    def __post_init__(self):
        if self.tensor_parallel_size == "auto":
            object.__setattr__(self, "tensor_parallel_size", 0)
        super().__post_init__()
        self._check_nodes()
        if self.cuts_rollout:
            self._check_cut_rollout()
        elif self.tensor_parallel_size and self.num_infer_gpus % self.tensor_parallel_size:
            raise ConfigError(
                f"deploy.num_infer_gpus ({self.num_infer_gpus}) must be a multiple of "
                f"deploy.tensor_parallel_size ({self.tensor_parallel_size})"
            )

    def _check_cut_rollout(self):
        """Raise ConfigError where the ranks that train cannot be engines of tensor_parallel_size."""
        size = self.tensor_parallel_size
        if not size or self.num_train_gpus % size:
            raise ConfigError(
                f"deploy.tensor_parallel_size ({size or 'auto'}) without deploy.num_infer_gpus cuts the model of the "
                f"GPUs that train: it must divide their number, deploy.num_train_gpus ({self.num_train_gpus})"
            )
        if self.num_train_nodes > 1:
            raise ConfigError(
                f"deploy.tensor_parallel_size ({size}) without deploy.num_infer_gpus is for GPUs of one host, and "
                f"deploy.num_train_nodes is {self.num_train_nodes}"
            )

    @property
    def cuts_rollout(self):
        """Whether ranks that train and generate in turn have a part of the model each while they generate: bool."""
        return self.tensor_parallel_size != 1 and not self.num_infer_gpus

    @property
    def ranks_of_engine(self):
        """Ranks that train and generate in turn and have one engine together: int."""
        return self.tensor_parallel_size if self.cuts_rollout else 1

    def _check_nodes(self):
        """The numbers of nodes go with the other keys; num_infer_gpus is set where gpus_per_node gives it."""
        nodes, size = self.num_infer_nodes, self.tensor_parallel_size or 1
        if self.launcher != "ray":
            for name, fewest in (("num_infer_nodes", 0), ("num_train_nodes", 1)):
                if (value := getattr(self, name)) > fewest:
                    raise ConfigError(f'deploy.{name} ({value}) needs deploy.launcher "ray", got "{self.launcher}"')
            return
        if nodes == 0 and self.num_train_nodes == 1:
            raise ConfigError(
                'deploy.launcher "ray" is for other nodes: deploy.num_infer_nodes must be above 0, or num_train_nodes '
                "above 1"
            )
        self._check_multiple("num_train_gpus", "num_train_nodes")
        if nodes == 0 and self.num_infer_gpus:
            raise ConfigError(
                f'deploy.num_infer_gpus ({self.num_infer_gpus}) with deploy.launcher "ray" are on nodes of their own: '
                "deploy.num_infer_nodes must be above 0"
            )
        if nodes == 0:
            return
        if self.update_weights_transport == "peer":
            raise ConfigError('deploy.update_weights_transport "peer" is for one host: not with deploy.launcher "ray"')
        if self.num_infer_gpus == 0:
            object.__setattr__(self, "num_infer_gpus", nodes * self.gpus_per_node)
        of_engines = f" with engines of deploy.tensor_parallel_size ({size}) GPUs" if size > 1 else ""
        self._check_multiple("num_infer_gpus", "num_infer_nodes", size, of_engines)

    def _check_multiple(self, gpus_key, nodes_key, size=1, note=""):
        """Raise ConfigError unless all nodes have as many GPUs, a multiple of `size`, and no more than there are."""
        gpus, nodes = getattr(self, gpus_key), getattr(self, nodes_key)
        if gpus % (nodes * size):
            raise ConfigError(
                f"deploy.{gpus_key} ({gpus}) must be a multiple of deploy.{nodes_key} ({nodes}){note}: all nodes have "
                "as many"
            )
        if gpus // nodes > self.gpus_per_node:
            raise ConfigError(
                f"deploy.{gpus_key} ({gpus}) on deploy.{nodes_key} ({nodes}) nodes are {gpus // nodes} each, and "
                f"deploy.gpus_per_node is {self.gpus_per_node}"
            )

    @property
    def num_engines(self):
        """Inference engines, each of tensor_parallel_size GPUs: int."""
        return self.num_infer_gpus // self.tensor_parallel_size

    @property
    def engines_per_node(self):
        """Inference engines of each of num_infer_nodes: int."""
        return self.num_engines // self.num_infer_nodes
