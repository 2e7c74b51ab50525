"""The queue of requests that wait to be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from paged_backend.scheduling.group import Group


class WaitingQueue:
    """Requests in order of admission: by priority; within a priority, preempted requests first, then the tenant that
    was served the fewest tokens (accounts.py), then by arrival. A single tenant is served first come, first served.

    Finding, choosing and removing a request does not scan the queue.
    """

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._without_adapter = _Lines()
        self._with_adapter = _Lines()  # requests that need an adapter slot

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """Iterate in no particular order."""
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
        """Return the request to be admitted next."""
        heads = [head for lines in (self._without_adapter, self._with_adapter) if (head := lines.first())]
        return min(heads, key=_order, default=None)

    def first_without_adapter(self) -> Group | None:
        """Return the first request that needs no adapter slot."""
        return self._without_adapter.first()

    def check(self) -> None:
        """Assert every invariant. For tests and idle moments."""
        queued = [group for lines in (self._without_adapter, self._with_adapter) for group in lines.check()]
        assert len(queued) == len(self._groups) and set(map(id, queued)) == set(map(id, self))

    def _lines_of(self, group: Group) -> _Lines:
        return self._with_adapter if group.request.adapter else self._without_adapter


class _Lines:
    """One sorted line per priority and tenant, and one per priority for preempted requests."""

    def __init__(self) -> None:
        self._lines: dict[_LineName, list[Group]] = {}
        # A heap of (order, line) with lazy updates: an entry's order may be outdated, but is never greater than the
        # line's current order, which only increases. Outdated first entries are replaced before use.
        self._heads: list[tuple[_Order, _LineName]] = []

    def add(self, group: Group) -> None:
        name = _line_name(group)
        line = self._lines.setdefault(name, [])
        insort(line, group, key=_order)
        if line[0] is group:
            heappush(self._heads, (_order(group), name))
        if len(self._heads) > 2 * len(self._lines):  # most entries are outdated or of removed lines
            self._heads = [(_order(line[0]), name) for name, line in self._lines.items()]
            heapify(self._heads)

    def remove(self, group: Group) -> None:
        line = self._lines[_line_name(group)]
        place = bisect_left(line, _order(group), key=_order)
        assert line[place] is group
        del line[place]
        if not line:
            del self._lines[_line_name(group)]

    def first(self) -> Group | None:
        while self._heads:
            order, name = self._heads[0]
            line = self._lines.get(name)
            if line is None:
                heappop(self._heads)
            elif order == (current := _order(line[0])):
                return line[0]
            else:
                heapreplace(self._heads, (current, name))
        return None

    def check(self) -> list[Group]:
        """Assert every invariant, and return all requests."""
        for name, line in self._lines.items():
            assert line and {_line_name(group) for group in line} == {name}
            assert line == sorted(line, key=_order)
            assert any(other == name and order <= _order(line[0]) for order, other in self._heads)
        return [group for line in self._lines.values() for group in line]


_LineName = tuple[int, str | None]  # (priority, tenant); the tenant is None for preempted requests
_Order = tuple[int, int, int]


def _line_name(group: Group) -> _LineName:
    return group.priority, group.account.tenant if group.admission_index is None else None


def _order(group: Group) -> _Order:
    if group.admission_index is None:
        return group.priority, group.account.served_tokens, group.key
    return group.priority, -1, group.admission_index
