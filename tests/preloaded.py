"""What processes that tests fork have imported: command line, trainers, and what Numba and tests need."""

from numba.core.registry import cpu_target

import rlnumba.cli  # noqa: F401
import rlnumba.rewards.workers  # noqa: F401
import rlnumba.runs.planning.fit  # noqa: F401
import rlnumba.trainers.reward  # noqa: F401
import rlnumba.trainers.rloo  # noqa: F401
import tests.parallel.test_saving  # noqa: F401
import tests.parallel.test_trainers  # noqa: F401

# Numba does it before it compiles or reads the first function: half a second.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
