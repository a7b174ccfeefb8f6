"""The buffer of groups: bounded, nothing lost or twice, no wedge, whatever happens when."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnumba.sampling.group_buffer import ORDERS, Group, GroupBuffer

EVENTS = st.lists(st.tuples(st.sampled_from(["finish", "finish", "drop", "take", "stale"]), st.integers(0, 99)))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from(ORDERS), EVENTS)
def test_any_order_of_events(capacity, size, order, events):
    """Groups are admitted whenever there is room; each is trained on once, with the last content that it had."""
    size = min(size, capacity)
    buffer, flying, finished, dropped, taken, admitted = GroupBuffer(capacity, order), [], [], [], [], 0

    def admit():
        nonlocal admitted
        while len(buffer) < capacity:
            group = Group(admitted, [0])
            buffer.reserve(group)
            flying.append(group)
            admitted += 1
        with pytest.raises(ValueError, match="places are taken"):
            buffer.reserve(Group(admitted, None))

    def finish(group):
        flying.remove(group)
        buffer.put(group)
        finished.append(group)
        with pytest.raises(ValueError, match="is not in flight"):
            buffer.put(group)

    def again(group):
        group.content.append(len(group.content))
        buffer.begin_again(group)
        flying.append(group)

    def take():
        assert buffer.dropped() == sorted(dropped, key=lambda group: group.number)
        while dropped:
            again(dropped.pop())
        assert buffer.dropped() == []
        found = buffer.next(size)
        wanted = sorted([*flying, *finished], key=lambda group: group.number)
        if order == "completion":
            wanted = finished
        if len(wanted[:size]) < size or any(group in flying for group in wanted[:size]):
            assert found is None
        else:
            assert found == sorted(wanted[:size], key=lambda group: group.number)
            buffer.take(found)
            for group in found:
                finished.remove(group)
            taken.extend(found)
            admit()
        return found

    admit()
    for event, which in events:
        if event == "finish" and flying:
            finish(flying[which % len(flying)])
        elif event == "drop" and flying:
            dropped.append(flying.pop(which % len(flying)))
            buffer.drop(dropped[-1])
        elif event == "stale" and finished:
            again(finished.pop(which % len(finished)))
        elif event == "take":
            take()
        assert len(buffer) == len(flying) + len(finished) + len(dropped) == capacity
        assert (buffer.num_complete, buffer.num_in_flight) == (len(finished), len(flying) + len(dropped))
        assert [group.number for group, _ in buffer.snapshot()] == sorted(
            group.number for group in (*flying, *finished, *dropped)
        )
    # Whatever is in flight now: once it is complete, all goes on.
    while dropped:
        again(dropped.pop())
    for group in list(flying):
        finish(group)
    assert take() is not None
    numbers = [group.number for group in taken]
    assert len({*numbers}) == len(numbers) and {*numbers} | {*range(admitted)} == {*range(admitted)}
    left = {group.number for group in (*flying, *finished)}
    assert {*numbers} | left == {*range(admitted)} and not {*numbers} & left
    if order == "start":
        assert numbers == list(range(len(numbers)))


def test_next_waits_for_groups_and_for_those_that_are_dropped():
    buffer = GroupBuffer(2)
    groups = [Group(number, None) for number in range(2)]
    for group in groups:
        buffer.reserve(group)
    assert buffer.next(2, 0.01) is None
    threading.Timer(0.02, buffer.drop, groups[:1]).start()
    assert buffer.next(2, 30.0) is None and buffer.dropped() == groups[:1]
    buffer.begin_again(groups[0])
    for delay, group in zip((0.02, 0.04), groups, strict=True):
        threading.Timer(delay, buffer.put, [group]).start()
    assert buffer.next(2, 30.0) == groups
    buffer.take(groups)
    with pytest.raises(ValueError, match="2 groups asked for, 0 are there"):
        buffer.next(2)


def test_what_is_refused():
    buffer = GroupBuffer(3)
    buffer.reserve(Group(5, None))
    with pytest.raises(ValueError, match="group 5 comes after group 5"):
        buffer.reserve(Group(5, None))
    with pytest.raises(ValueError, match="group 7 is not in flight"):
        buffer.put(Group(7, None))
    with pytest.raises(ValueError, match="order must be one of start, completion, got 'fast'"):
        GroupBuffer(1, "fast")
