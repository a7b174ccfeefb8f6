"""What a test of the package has left replaced is found, which the fixture nothing_is_left_replaced fails for."""

import sys

from rlnumba.engine.core import Engine
from rlnumba.sampling import inference
from tests import left_replaced


def test_what_is_replaced_is_named_until_it_is_put_back(monkeypatch):
    before = left_replaced.attributes()
    with monkeypatch.context() as patch:
        patch.setattr(inference, "spawn", lambda *arguments: None)
        patch.setattr(Engine, "step", Engine.abort)
        patch.setattr(Engine, "of_a_test", len, raising=False)
        patch.delitem(sys.modules, "rlnumba.runtime.dispatch")
        names = left_replaced.names(before)
    others = [name for name in names if not name.startswith("rlnumba.runtime.dispatch.")]
    assert len(names) > 2 and sorted(others) == ["rlnumba.engine.core.Engine.step", "rlnumba.sampling.inference.spawn"]
    assert left_replaced.names(before) == []
