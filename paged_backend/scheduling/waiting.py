"""The queue of those that wait to be let in."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from paged_backend.scheduling.sequence import Group


class Waiting:
    """By priority, and within one first come, first served. To find or to take out one of many costs no more than one
    of few."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._plain = _Line()
        self._adapted = _Line()  # those that need a slot for an adapter

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """In no order."""
        return iter(self._groups.values())

    def get(self, key: int) -> Group | None:
        return self._groups.get(key)

    def add(self, group: Group) -> None:
        self._groups[group.key] = group
        self._line_of(group).add(group)

    def remove(self, group: Group) -> None:
        del self._groups[group.key]
        self._line_of(group).remove(group)

    @property
    def first(self) -> Group | None:
        heads = [head for line in (self._plain, self._adapted) if (head := line.first)]
        return min(heads, key=_rank, default=None)

    @property
    def first_without_adapter(self) -> Group | None:
        return self._plain.first

    def check(self) -> None:
        """Assert every invariant; for tests and idle moments."""
        lined = [group for line in (self._plain, self._adapted) for group in line.check()]
        assert len(lined) == len(self._groups) and set(map(id, lined)) == set(map(id, self))

    def _line_of(self, group: Group) -> _Line:
        return self._adapted if group.request.adapter else self._plain


class _Line:
    """Groups by rank."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    @property
    def first(self) -> Group | None:
        return self._groups[0] if self._groups else None

    def add(self, group: Group) -> None:
        insort(self._groups, group, key=_rank)

    def remove(self, group: Group) -> None:
        place = bisect_left(self._groups, group.rank, key=_rank)
        assert self._groups[place] is group
        del self._groups[place]

    def check(self) -> list[Group]:
        assert self._groups == sorted(self._groups, key=_rank)
        return self._groups


def _rank(group: Group) -> tuple[int, int]:
    return group.rank
