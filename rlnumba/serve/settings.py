"""The options of `rlnumba serve` that are not the engine's."""

import ipaddress
from dataclasses import dataclass, field

from rlnumba.config.lora import MAX_LORAS
from rlnumba.errors import ConfigError


def is_loopback(host):
    """Whether a host name or address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class ServerSettings:
    """names: ids of the model, the first of which answers have; root: its folder or hub id; folder: where that is here.

    max_num_queued_reqs: sequences that may wait beside those that the next step takes; max_num_queued_tokens: tokens of
    their prompts, None for no limit. overload_status: of an answer when more come. drain_timeout: seconds that requests
    get after a signal. allowed_origins: web pages that may read answers. heartbeat_s: a stream without a token sends a
    comment so often; unread_s: after so long a client that does not read is dropped. lora_root: the folder below which
    adapters may be loaded while the server runs, None for none; max_loras: adapters at a time. return_sampling_mask:
    whether answers on token ids have the tokens that filters kept. dev_endpoints:
    whether a trainer may pause the engine and give it weights. Raises ConfigError.
    """

    names: tuple[str, ...]
    root: str
    folder: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    max_logprobs: int = 20
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int | None = None
    max_body_bytes: int = 32 << 20
    overload_status: int = 429
    drain_timeout: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    log_requests: bool = False
    dev_endpoints: bool = False
    heartbeat_s: float = 15.0
    unread_s: float = 60.0
    lora_root: str | None = None
    max_loras: int = MAX_LORAS
    return_sampling_mask: bool = False

    def __post_init__(self):
        if not self.api_key and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: give --api-key or RLNUMBA_API_KEY"
            )

    @property
    def name(self):
        """The id of the model in answers."""
        return self.names[0]
