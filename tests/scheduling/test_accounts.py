"""Fair tenants: which tenant's request is admitted next, by counts of requests and tokens."""

import random
import sys
from collections import Counter
from itertools import count

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import Adapter, GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.plan import StepResult
from paged_backend.scheduling.scheduler import Scheduler


class Served:
    """A scheduler that records which tenant it served."""

    def __init__(self, *, num_blocks=4096, max_num_seqs=1, max_num_batched_tokens=64, fair_tenants=True, **options):
        self.sched = Scheduler(
            BlockManager(num_blocks, BlockLayout(4)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            fair_tenants=fair_tenants,
            **options,
        )
        self.keys = count()
        self.tenants: dict[int, str] = {}
        self.admitted: list[str] = []  # tenants of the admitted requests, in order
        self.tokens: Counter[str] = Counter()  # tokens of prompts and outputs, by tenant
        self.ended: list[int] = []

    def ask(self, tenant, prompt=2, max_tokens=1, adapter=None, **sampling):
        key = next(self.keys)
        self.tenants[key] = tenant
        params = SamplingParams(max_tokens=max_tokens, cache_salt=tenant, **sampling)
        self.sched.add(GenerateRequest(key, (1,) * prompt, params, 0, frozenset(), adapter=adapter))
        return key

    def step(self, times=1):
        for _ in range(times):
            plan = self.sched.schedule()
            self.admitted += [self.tenants[key] for key in plan.admitted]
            for chunk in plan.chunks:
                prompt = max(0, min(chunk.length, chunk.sequence.num_prompt - chunk.start))
                self.tokens[self.tenants[chunk.sequence.key]] += prompt
            tokens = [[1] * (1 + len(chunk.draft_tokens)) for chunk in plan.chunks for _ in chunk.sampled_sequences]
            deltas = self.sched.commit(plan, StepResult(tokens))
            for delta in deltas:
                self.tokens[self.tenants[delta.key]] += len(delta.token_ids)
            self.ended += [delta.key for delta in deltas if delta.finish]
        return plan

    def finish(self):
        while self.sched.has_work:
            self.step()
        self.sched.check()


@pytest.mark.parametrize(("fair_tenants", "before"), [(True, 1), (False, 1000)])
def test_single_request_does_not_queue_behind_other_tenant(fair_tenants, before):
    served = Served(fair_tenants=fair_tenants)
    for _ in range(1000):
        served.ask("many")
    served.step()
    served.ask("one")
    served.finish()
    assert served.admitted.index("one") == before
    assert len(served.ended) == 1001


def test_priority_comes_before_fairness():
    served = Served()
    for _ in range(5):
        served.ask("urgent", priority=-1)
    served.ask("other")
    served.finish()
    assert served.admitted == ["urgent"] * 5 + ["other"]


@pytest.mark.parametrize("seqs", [1, 4, 16])
def test_backlogged_tenants_get_equal_tokens(seqs):
    """With short and long prompts, and one or several samples, counts differ by at most two of the longest prompts."""
    rnd = random.Random(seqs)
    served = Served(max_num_seqs=seqs, max_num_batched_tokens=128)
    kinds = {"chat": (4, 30), "search": (90, 2), "essay": (10, 60), "samples": (12, 10)}
    for tenant, (prompt, output) in kinds.items():
        for _ in range(120):
            lengths = rnd.randint(1, 2 * prompt), rnd.randint(1, 2 * output)
            served.ask(tenant, *lengths, n=1 if tenant != "samples" else min(4, seqs))
    before = None
    while all(any(group.account.tenant == one for group in served.sched.waiting) for one in kinds):
        served.step(10)
        before = before or served.tokens.copy()
    got = [served.tokens[one] - before[one] for one in kinds]
    assert min(got) > 2000
    assert max(got) - min(got) <= 2 * 180


def test_accepted_draft_tokens_count_towards_tenant():
    def proposer(sequence, most):
        return [1] * most if sequence.request.sampling.cache_salt == "easy" else []

    served = Served(proposer=proposer, max_draft_tokens=4)
    for _ in range(100):
        served.ask("easy", max_tokens=25)
        served.ask("hard", max_tokens=25)
    served.step(1000)
    assert min(served.tokens.values()) > 800
    assert max(served.tokens.values()) - min(served.tokens.values()) <= 2 * 27


def test_idle_tenant_gains_no_credit():
    served = Served()
    for _ in range(100):
        served.ask("always")
    served.step(50)
    for _ in range(50):
        served.ask("back")
    served.step(20)
    assert Counter(served.admitted[-20:]) == {"always": 10, "back": 10}


def test_tenant_with_one_long_request_gains_no_credit():
    served = Served(max_num_seqs=2)
    served.ask("slow", max_tokens=500)
    for _ in range(500):
        served.ask("always", prompt=9)
    served.step(200)
    for _ in range(50):
        served.ask("slow", prompt=9)
    served.step(20)
    assert served.admitted[-20:].count("always") >= 8


def test_tenant_count_is_kept_while_a_request_is_open():
    """A tenant that never has more than one request waiting, but many running, keeps its count."""
    served = Served(max_num_seqs=8)
    for _ in range(6):
        served.ask("many", max_tokens=200)
    served.step(50)
    for _ in range(2):
        served.ask("full", max_tokens=60)
    served.step()
    served.ask("many")
    served.ask("few")
    served.step(70)
    assert served.admitted[-2:] == ["few", "many"]


def test_new_tenant_does_not_pay_for_long_prompt_of_another():
    """The count of the tenant that was admitted last does not put a new tenant behind a queue."""
    served = Served(num_blocks=10_000)
    for _ in range(1000):
        served.ask("many", prompt=20)
    served.ask("long", prompt=20_000)
    served.step()
    while "long" not in served.admitted:
        served.step()
    assert len(served.admitted) <= 3
    served.ask("one", prompt=20)
    while "one" not in served.admitted:
        served.step()
    assert served.admitted.count("many") < 20


def test_stream_of_new_tenants_does_not_starve_a_tenant():
    """A tenant that has just had a long prompt waits again, always beside two tenants that are new."""
    served = Served()
    served.ask("long", prompt=1000, max_tokens=1)
    served.step()
    waits = served.ask("long")
    names = map(str, count())
    for _ in range(3):
        served.ask(next(names), prompt=20)
    passed = 0
    while waits not in served.ended:
        before = len(served.admitted)
        served.step()
        for _ in served.admitted[before:]:
            served.ask(next(names), prompt=20)
            passed += 1
        assert passed < 200


def test_admitted_request_is_not_preempted_by_later_admitted_ones():
    """The newest request, admitted before older ones of another tenant, keeps its blocks when the pool is exhausted.
    Preempted requests resume before others are admitted."""
    served = Served(num_blocks=12, max_num_seqs=3)
    for _ in range(50):
        served.ask("many", prompt=8, max_tokens=12)
    served.step()
    one = served.ask("one", prompt=8, max_tokens=40)
    (group,) = (group for group in served.sched.waiting if group.key == one)
    while one not in served.ended:
        plan = served.step()
        assert not (plan.admitted and served.sched.stats.paused)
    assert served.sched.stats.preemptions > 3
    assert group.preemptions == 0
    served.finish()
    assert len(served.ended) == 51


def test_adapter_and_base_requests_share_a_tenant_count():
    served = Served(max_num_seqs=1, max_loras=2)
    for name in "ab" * 10:
        served.ask("many", adapter=Adapter(name, name.encode(), 1, {}))
        served.ask("many")
    served.step()
    for _ in range(20):
        served.ask("other", adapter=Adapter("b", b"b", 1, {}))
    served.step(20)
    assert Counter(served.admitted[1:]) == {"many": 10, "other": 10}
    served.finish()
    assert len(served.ended) == 60


def calls(work):
    """Return how many function calls the work takes."""
    seen = 0

    def see(frame, event, argument):
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("tenant", ["one", "{}"])
@pytest.mark.parametrize("adapter", [None, Adapter("b", b"b", 1, {})])
def test_scheduling_cost_is_independent_of_queue_length(tenant, adapter):
    """Adding, admitting, finding and removing take as many calls in a long queue, up to a few steps of a binary search.
    Requests that wait for the slot of another adapter are skipped without looking at each."""

    def cost(waiting):
        served = Served(max_loras=1, max_num_seqs=2)
        served.ask("first", max_tokens=10**6, adapter=Adapter("a", b"a", 1, {}))
        keys = [served.ask(tenant.format(one), adapter=adapter) for one in range(waiting)]
        served.step(3)
        middle = keys[waiting // 2]

        def work():
            for _ in range(20):
                served.ask("new", adapter=adapter)
                served.step()
            assert served.sched.has_request(middle)
            assert served.sched.abort(middle)
            assert not served.sched.has_request(middle)

        return calls(work)

    assert cost(10_000) < 1.5 * cost(100)
