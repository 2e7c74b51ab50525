"""How many tokens each tenant has had, so that the one with the fewest is next (waiting.py).

These are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), one for
each tenant and priority. Of a prompt counts what has to be computed, once it is let in; of outputs each token drawn.

A tenant that comes begins level with the one that was let in last: it has no credit for the time that it was away, and
waits behind nobody's queue. Beginning where that one was before its prompt counted, tenants that are new each time
could pass another for ever; so they begin after it, but at the most MOST_BEHIND tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paged_backend.api.request import GenerateRequest

MOST_BEHIND = 256


@dataclass(eq=False, slots=True)
class Account:
    """A tenant's, within one priority."""

    priority: int
    tenant: str
    served: int = 0  # tokens
    open: int = 0  # requests
    waiting: int = 0  # of those, to be let in for the first time


@dataclass(slots=True)
class _Level:
    """A priority at which requests are open."""

    start: int = 0  # tokens that a tenant which comes has had
    accounts: dict[str, Account] = field(default_factory=dict)


class Accounts:
    """Of all tenants that have a request open. Owned by the scheduler."""

    def __init__(self, *, by_tenant: bool):
        """by_tenant: a tenant is a `cache_salt`; otherwise all are one."""
        self.by_tenant = by_tenant
        self._levels: dict[int, _Level] = {}

    def join(self, request: GenerateRequest) -> Account:
        """For a request that comes: the account that pays for it."""
        priority, tenant = request.sampling.priority, request.sampling.cache_salt if self.by_tenant else ""
        level = self._levels.setdefault(priority, _Level())
        account = level.accounts.setdefault(tenant, Account(priority, tenant))
        if not account.waiting:
            account.served = max(account.served, level.start)
        account.open += 1
        account.waiting += 1
        return account

    def enter(self, account: Account, tokens: int) -> None:
        """For a request that is let in for the first time, with so many tokens of its prompt to be computed."""
        level = self._levels[account.priority]
        level.start = max(level.start, account.served + min(tokens, MOST_BEHIND))
        account.served += tokens
        account.waiting -= 1

    def leave(self, account: Account, *, waits: bool) -> None:
        """For a request that ends. waits: it was never let in."""
        account.open -= 1
        account.waiting -= waits
        level = self._levels[account.priority]
        if not account.open:
            del level.accounts[account.tenant]
        if not level.accounts:
            del self._levels[account.priority]

    def check(self, waiting: Iterable[Account], entered: Iterable[Account]) -> None:
        """Assert every invariant, given the accounts of all requests; for tests and idle moments."""
        waits, runs = list(waiting), list(entered)
        held = [account for level in self._levels.values() for account in level.accounts.values()]
        assert {id(account) for account in held} == {id(account) for account in waits + runs}
        for account in held:
            assert account is self._levels[account.priority].accounts[account.tenant]
            assert account.waiting == waits.count(account), "waiting miscounted"
            assert account.open == account.waiting + runs.count(account), "open miscounted"
