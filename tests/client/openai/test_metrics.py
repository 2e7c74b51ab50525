"""Metrics of the gateway."""

from paged_client.openai.metrics import SECONDS, Histogram
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
        'paged_openai_requests_total{route="/v1/completions",status="200"}': 2,
        'paged_openai_requests_total{route="/v1/completions",status="400"}': 1,
        'paged_openai_requests_total{route="/v1/models/{name}",status="200"}': 1,
        'paged_openai_requests_total{route="other",status="404"}': 1,
    }


def test_histogram_buckets_are_cumulative():
    histogram = Histogram()
    for value in (0.0, SECONDS[0], SECONDS[0] + 0.001, 1e9):
        histogram.add(value)
    values = dict(line.rsplit(" ", 1) for line in histogram.lines("x", "a=1"))
    assert values[f'x_bucket{{a=1,le="{SECONDS[0]}"}}'] == "2"
    assert values[f'x_bucket{{a=1,le="{SECONDS[-1]}"}}'] == "3"
    assert values['x_bucket{a=1,le="+Inf"}'] == values["x_count{a=1}"] == "4"
