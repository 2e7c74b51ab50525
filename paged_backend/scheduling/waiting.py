"""The queue of those that wait to be let in."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from paged_backend.scheduling.sequence import Group


class WaitingQueue:
    """By priority. Within one those first that were let in before, and preempted; then the tenant that has had the
    fewest tokens (accounts.py), and of its requests the one that came first. Where all are of one tenant, that is first
    come, first served. To find, to choose or to take out one of many costs about what it does of few."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._plain = _Lines()
        self._adapted = _Lines()  # those that need a slot for an adapter

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """In no order."""
        return iter(self._groups.values())

    def get(self, key: int) -> Group | None:
        return self._groups.get(key)

    def add(self, group: Group) -> None:
        self._groups[group.key] = group
        self._lines_of(group).add(group)

    def remove(self, group: Group) -> None:
        del self._groups[group.key]
        self._lines_of(group).remove(group)

    def first(self) -> Group | None:
        heads = [head for lines in (self._plain, self._adapted) if (head := lines.first())]
        return min(heads, key=_order, default=None)

    def first_without_adapter(self) -> Group | None:
        return self._plain.first()

    def check(self) -> None:
        """Assert every invariant; for tests and idle moments."""
        lined = [group for lines in (self._plain, self._adapted) for group in lines.check()]
        assert len(lined) == len(self._groups) and set(map(id, lined)) == set(map(id, self))

    def _lines_of(self, group: Group) -> _Lines:
        return self._adapted if group.request.adapter else self._plain


class _Lines:
    """A line for each tenant and priority, and one for those of the priority that were let in before."""

    def __init__(self) -> None:
        self._lines: dict[_Name, list[Group]] = {}
        # For each line what its head's order was, or earlier: as its tenant gets tokens, or loses its head, it only
        # moves back. So the first is right once it is up to date.
        self._heads: list[tuple[_Order, _Name]] = []

    def add(self, group: Group) -> None:
        name = _name(group)
        line = self._lines.setdefault(name, [])
        insort(line, group, key=_order)
        if line[0] is group:
            heappush(self._heads, (_order(group), name))
        if len(self._heads) > 2 * len(self._lines):  # most are of lines that moved, or are gone
            self._heads = [(_order(line[0]), name) for name, line in self._lines.items()]
            heapify(self._heads)

    def remove(self, group: Group) -> None:
        line = self._lines[_name(group)]
        place = bisect_left(line, _order(group), key=_order)
        assert line[place] is group
        del line[place]
        if not line:
            del self._lines[_name(group)]

    def first(self) -> Group | None:
        while self._heads:
            order, name = self._heads[0]
            line = self._lines.get(name)
            if line is None:
                heappop(self._heads)
            elif order == (now := _order(line[0])):
                return line[0]
            else:
                heapreplace(self._heads, (now, name))
        return None

    def check(self) -> list[Group]:
        """All, having asserted every invariant."""
        for name, line in self._lines.items():
            assert line and {_name(group) for group in line} == {name}
            assert line == sorted(line, key=_order)
            assert any(there == name and order <= _order(line[0]) for order, there in self._heads)
        return [group for line in self._lines.values() for group in line]


_Name = tuple[int, str | None]  # a line's: the priority, and the tenant of those that were not let in before
_Order = tuple[int, int, int]


def _name(group: Group) -> _Name:
    return group.priority, group.account.tenant if group.turn is None else None


def _order(group: Group) -> _Order:
    if group.turn is None:
        return group.priority, group.account.served, group.key
    return group.priority, -1, group.turn
