"""A bounded buffer of groups between generation and training.

    reserve(group)     a place for a group that is to be generated; the number of places is the bound
    put(group)         it is complete
    drop(group)        it will not be: its place is kept for what takes its place, at once
    next(count)        the groups to train on next, once they are complete
    take(groups)       frees their places

Places are taken when groups are given out, so that what is complete always finds room. The order of `next` is
that of the groups' numbers, or that in which they were completed. All methods may be called by any thread.
"""

import threading
import time
from dataclasses import dataclass, field

ORDERS = ("start", "completion")


@dataclass
class Group:
    """A group on its way. number: its place in the order of starts; content: what belongs to it, of any kind.

    state: "in_flight", "dropped" or "complete". complete_at: time.monotonic() of that.
    """

    number: int
    content: object
    state: str = field(default="in_flight", init=False)
    complete_at: float = field(default=0.0, init=False)


class GroupBuffer:
    """capacity: most groups that are in flight or complete. order: one of ORDERS."""

    def __init__(self, capacity, order="start"):
        if order not in ORDERS:
            raise ValueError(f"buffer: order must be one of {', '.join(ORDERS)}, got {order!r}")
        self.capacity, self.order = capacity, order
        self._changed = threading.Condition()
        # By number, in the order of these.
        self._groups = {}

    def __len__(self):
        return len(self._groups)

    @property
    def num_complete(self):
        """Groups that wait to be taken: int."""
        with self._changed:
            return sum(group.state == "complete" for group in self._groups.values())

    @property
    def num_in_flight(self):
        """Groups that are being generated: int."""
        with self._changed:
            return sum(group.state != "complete" for group in self._groups.values())

    def snapshot(self):
        """[(Group, whether it is complete)] of all, in the order of their numbers."""
        with self._changed:
            return [(group, group.state == "complete") for group in self._groups.values()]

    def reserve(self, group):
        """Take a place for a Group, of a higher number than all before. ValueError where there is none."""
        with self._changed:
            if len(self._groups) == self.capacity:
                raise ValueError(f"buffer: all {self.capacity} places are taken")
            if self._groups and group.number <= max(self._groups):
                raise ValueError(f"buffer: group {group.number} comes after group {max(self._groups)}")
            self._groups[group.number] = group

    def put(self, group):
        """A Group in flight is complete."""
        self._change(group, "complete")

    def drop(self, group):
        """A Group in flight will not be completed, until `begin_again`."""
        self._change(group, "dropped")

    def _change(self, group, state):
        with self._changed:
            if self._groups.get(group.number) is not group or group.state != "in_flight":
                raise ValueError(f"buffer: group {group.number} is not in flight")
            group.state, group.complete_at = state, time.monotonic()
            self._changed.notify_all()

    def begin_again(self, group):
        """A Group that was dropped, or is complete and too old, is in flight again."""
        with self._changed:
            group.state = "in_flight"

    def dropped(self):
        """The Groups that `drop` has dropped: list."""
        with self._changed:
            return [group for group in self._groups.values() if group.state == "dropped"]

    def next(self, count, timeout_s=0.0, until=lambda: False):
        """The next `count` groups in the order of their numbers, or None where they are not all complete.

        Waits for them until timeout_s have passed, a group is dropped, or one was completed and until() is true.
        ValueError if there are not so many groups, in flight or complete.
        """
        with self._changed:
            if len(self._groups) < count:
                raise ValueError(f"buffer: {count} groups asked for, {len(self._groups)} are there")
            self._changed.wait_for(lambda: self._next(count) or self.dropped() or until(), timeout_s)
            return self._next(count)

    def _next(self, count):
        groups = list(self._groups.values())
        if self.order == "completion":
            groups = sorted((g for g in groups if g.state == "complete"), key=lambda g: (g.complete_at, g.number))
        groups = groups[:count]
        if len(groups) < count or any(group.state != "complete" for group in groups):
            return None
        return sorted(groups, key=lambda group: group.number)

    def take(self, groups):
        """Free the places of Groups that `next` has returned."""
        with self._changed:
            for group in groups:
                del self._groups[group.number]
