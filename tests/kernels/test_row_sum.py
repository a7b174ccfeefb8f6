import numpy as np
import pytest

from rlnumba.kernels.logprob.chunked import logp_of_logits
from rlnumba.kernels.nn import row_sum
from rlnumba.runtime import device
from tests.kernels.gpu_arithmetic import use_gpu_arithmetic


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.sim
def test_a_logit_that_is_no_number_shows(rng, monkeypatch):
    """In the log-prob of every token of its row, as where the token is drawn."""
    use_gpu_arithmetic(monkeypatch, row_sum)
    logits = rng.standard_normal((2, 600), np.float32)
    logits[1, 321] = np.nan
    out, lse = (device.xp().empty(2, np.float32) for _ in range(2))
    logp_of_logits(device.asarray(logits), device.asarray(np.array([5, 5], np.int32)), 1.0, out, lse)
    assert list(np.isnan(device.to_host(out))) == list(np.isnan(device.to_host(lse))) == [False, True]
