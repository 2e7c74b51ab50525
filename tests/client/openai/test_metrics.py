"""Metrics of the gateway."""

from paged_client.openai.metrics import SECONDS
from tests.support.gateway import PROMPT, gateway


def test_requests_are_counted_by_route_and_status(fake):
    with gateway(fake.url) as front:
        front.ask("/v1/completions", PROMPT)
        front.ask("/v1/completions", PROMPT)
        front.ask("/v1/completions", {})
        front.ask("/v1/models/paged_llm")
        front.ask("/made/up")
        counted = {name: value for name, value in front.metrics().items() if "requests_total" in name}
    assert counted == {
        'paged_openai_requests_total{model="paged_llm",route="/v1/completions",status="200"}': 2,
        'paged_openai_requests_total{model="",route="/v1/completions",status="400"}': 1,
        'paged_openai_requests_total{model="",route="/v1/models/{name}",status="200"}': 1,
        'paged_openai_requests_total{model="",route="other",status="404"}': 1,
    }


def test_all_metrics(fake):
    """Their names, labels and buckets, which dashboards and alerts use."""
    with gateway(fake.url) as front:
        front.ask("/v1/completions", PROMPT)
        front.ask("/v1/completions", PROMPT | {"n": 2})
        found = front.metrics()
    labels = 'model="paged_llm",route="/v1/completions"'
    assert found[f'paged_openai_tokens_total{{kind="prompt",{labels}}}'] == 14
    assert found[f'paged_openai_tokens_total{{kind="output",{labels}}}'] == 8
    assert found[f'paged_openai_tokens_total{{kind="cached",{labels}}}'] == 0
    assert found["paged_openai_open_streams"] == 0
    for name in ("first_byte_seconds", "request_seconds"):
        buckets = [found[f'paged_openai_{name}_bucket{{le="{limit}",{labels}}}'] for limit in (*SECONDS, "+Inf")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == found[f"paged_openai_{name}_count{{{labels}}}"] == 2
        assert found[f"paged_openai_{name}_sum{{{labels}}}"] > 0
    parts = (f"{name}_seconds_{part}" for name in ("first_byte", "request") for part in ("bucket", "sum", "count"))
    expected = {f"paged_openai_{name}" for name in ("requests_total", "tokens_total", "open_streams", *parts)}
    assert {name.split("{")[0] for name in found} == expected
