"""Names that moved, for imports that have not followed."""

from rlnumba.kernels.ptx.semaphore import *  # noqa: F403
from rlnumba.kernels.ptx.sm90 import *  # noqa: F403
from rlnumba.kernels.ptx.wgmma import *  # noqa: F403
