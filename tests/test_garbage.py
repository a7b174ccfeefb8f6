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
    assert gc.get_freeze_count() == before > 0


def test_what_is_there_is_left_out_until_the_end_of_a_loop():
    class Node:
        pass

    gc.unfreeze()
    before = Node()
    before.itself, found = before, weakref.ref(before)
    with garbage.left_out():
        del before
        node = Node()
        node.itself, made_inside = node, weakref.ref(node)
        del node
        gc.collect()
        assert found() is not None and made_inside() is None
    gc.collect()
    assert found() is None and gc.get_freeze_count() == 0


def test_a_loop_leaves_what_others_have_frozen():
    gc.freeze()
    before = gc.get_freeze_count()
    with garbage.left_out():
        assert gc.get_freeze_count() == before
    assert gc.get_freeze_count() == before > 0
    gc.unfreeze()
