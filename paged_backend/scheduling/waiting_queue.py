"""The queue of requests that wait to be admitted, and the tokens that each tenant was served.

The tenant that was served the fewest tokens is next. These are the virtual token counters of Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024), one per tenant and priority. The prompt tokens to be computed count on
admission, and each output token as it is sampled.

A tenant without waiting requests starts level with the tenant that was admitted last, so it gains no credit for the
time that it was idle, and does not wait behind another tenant's queue. Its initial count is that tenant's count after
the admission, but at most MAX_HEAD_START above the count before. Starting at the count before would let a series of new
tenants starve an old one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from paged_backend.api.request import GenerateRequest
from paged_backend.scheduling.group import Account, Group

MAX_HEAD_START = 256


class WaitingQueue:
    """Requests in order of admission: by priority; within a priority, preempted requests first, then the tenant that
    was served the fewest tokens, then by arrival. A single tenant is served first come, first served.

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
    """A sorted line for each priority and tenant, and for each priority a line of preempted requests."""

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


@dataclass(slots=True)
class _Level:
    """The accounts of one priority."""

    start: int = 0  # initial count of a tenant without waiting requests
    accounts: dict[str, Account] = field(default_factory=dict)


class Accounts:
    """The accounts of all tenants with open requests. Owned by the scheduler."""

    def __init__(self, *, by_tenant: bool):
        """by_tenant: whether each `cache_salt` is a tenant; otherwise all requests belong to the same tenant."""
        self.by_tenant = by_tenant
        self._levels: dict[int, _Level] = {}

    def open_request(self, request: GenerateRequest) -> Account:
        """Count a new request, and return its account."""
        priority, tenant = request.sampling.priority, request.sampling.cache_salt if self.by_tenant else ""
        level = self._levels.setdefault(priority, _Level())
        account = level.accounts.setdefault(tenant, Account(priority, tenant))
        if not account.num_waiting:
            account.served_tokens = max(account.served_tokens, level.start)
        account.num_open += 1
        account.num_waiting += 1
        return account

    def admit_request(self, account: Account, tokens: int) -> None:
        """Count the first admission of a request, with `tokens` prompt tokens to compute."""
        level = self._levels[account.priority]
        level.start = max(level.start, account.served_tokens + min(tokens, MAX_HEAD_START))
        account.served_tokens += tokens
        account.num_waiting -= 1

    def close_request(self, account: Account, *, was_admitted: bool) -> None:
        """Count the end of a request. An account without requests is dropped."""
        account.num_open -= 1
        account.num_waiting -= not was_admitted
        level = self._levels[account.priority]
        if not account.num_open:
            del level.accounts[account.tenant]
        if not level.accounts:
            del self._levels[account.priority]

    def check(self, waiting: Iterable[Account], admitted: Iterable[Account]) -> None:
        """Assert every invariant, given the account of each request. For tests and idle moments.

        waiting: accounts of requests that were never admitted. admitted: accounts of all other requests.
        """
        never, once = list(waiting), list(admitted)
        held = [account for level in self._levels.values() for account in level.accounts.values()]
        assert {id(account) for account in held} == {id(account) for account in never + once}
        for account in held:
            assert account is self._levels[account.priority].accounts[account.tenant]
            assert account.num_waiting == never.count(account), "waiting requests miscounted"
            assert account.num_open == account.num_waiting + once.count(account), "open requests miscounted"
