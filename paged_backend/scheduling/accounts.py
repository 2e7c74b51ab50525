"""Counts the tokens that each tenant was served, so that the tenant with the fewest is next (waiting_queue.py).

These are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), one per
tenant and priority. The prompt tokens to be computed count on admission, and each output token as it is sampled.

A tenant without waiting requests starts level with the tenant that was admitted last, so it gains no credit for the
time that it was idle, and does not wait behind another tenant's queue. Its initial count is that tenant's count after
the admission, but at most MAX_HEAD_START above the count before. Starting at the count before would let a series of new
tenants starve an old one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paged_backend.api.request import GenerateRequest

MAX_HEAD_START = 256


@dataclass(eq=False, slots=True)
class Account:
    """The counter of one tenant within one priority."""

    priority: int
    tenant: str
    served_tokens: int = 0
    num_open: int = 0  # open requests, waiting or admitted
    num_waiting: int = 0  # open requests that were never admitted


@dataclass(slots=True)
class _Level:
    """The accounts of one priority."""

    start: int = 0  # initial count of a tenant without waiting requests
    accounts: dict[str, Account] = field(default_factory=dict)


class Accounts:
    """The accounts of all tenants with open requests. Owned by the scheduler."""

    def __init__(self, *, by_tenant: bool):
        """by_tenant: each `cache_salt` is a tenant; otherwise all requests belong to one."""
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
