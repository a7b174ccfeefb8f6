"""Objects that are left out of Python's collections, until the end."""

import gc
import weakref

from rlnumba.runtime import garbage


def test_what_is_frozen_is_collected_at_the_end():
    class Node:
        pass

    with garbage.unfrozen_at_end():
        node = Node()
        node.itself, found = node, weakref.ref(node)
        garbage.freeze()
        del node
        gc.collect()
        assert found() is not None and gc.get_freeze_count() > 0
    gc.collect()
    assert found() is None and gc.get_freeze_count() == 0


def test_what_others_have_frozen_stays_so():
    gc.freeze()
    before = gc.get_freeze_count()
    with garbage.unfrozen_at_end():
        pass
    # Threads of other tests may free some of them meanwhile; unfrozen, none would be left.
    assert gc.get_freeze_count() > before // 2 > 0
