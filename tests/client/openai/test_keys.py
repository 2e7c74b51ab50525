"""API keys of the gateway."""

import pytest

from paged_client.openai import keys
from paged_client.openai.pooling_routes import POOLING_ROUTES
from tests.support.gateway import BODIES, error_of, gateway


@pytest.fixture(scope="module")
def locked(fake):
    with gateway(fake.url, "--api-key", "one", "--api-key", "two") as made:
        yield made


@pytest.mark.parametrize("key", ["one", "two", "  one"])
def test_valid_key_is_accepted(locked, key):
    assert locked.ask("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer on"}, {"Authorization": "Basic one"}])
@pytest.mark.parametrize("path", ["/v1/models", "/load", "/tokenize", "/detokenize", *POOLING_ROUTES, *BODIES])
def test_invalid_key_is_rejected(locked, path, headers):
    sent = None if path in ("/v1/models", "/load") else BODIES.get(path, {})
    status, body = locked.ask(path, sent, headers)
    assert (status, error_of(status, body)["code"]) == (401, "invalid_api_key")


def test_keys_from_file_and_environment(tmp_path, fake, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("of-a-file\n\n  spaced  \n")
    monkeypatch.setenv(keys.VARIABLE, "first, second")
    with gateway(fake.url, "--api-key", "one", "--api-key-file", str(file)) as front:
        for key in ("one", "of-a-file", "spaced", "first", "second"):
            assert front.ask("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
        for key in ("", "first, second", "of-a-fil"):
            assert front.ask("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 401


@pytest.mark.parametrize(
    ("flags", "variable", "text", "reason"),
    [
        ((), "", None, "No such file"),
        ((), "", " \n\n", "has no key"),
        ((), " , ", "a", f"{keys.VARIABLE}: has no key"),
        (("",), "", "a", "--api-key: is empty"),
    ],
)
def test_key_source_without_keys_is_rejected(tmp_path, flags, variable, text, reason):
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match=reason):
        keys.collect(flags, tmp_path / "keys", {keys.VARIABLE: variable})


def test_no_keys():
    assert keys.collect((), None, {keys.VARIABLE: ""}) == ()


def test_metrics_and_health_need_no_key(locked, fake):
    fake.maps = ["UNAVAILABLE: not yet"]
    assert locked.metrics()["paged_openai_open_streams"] == 0
    assert [locked.ask(path)[0] for path in ("/health", "/health/ready", "/ping")] == [503] * 3
    assert [locked.ask(path)[0] for path in ("/live", "/version")] == [200] * 2
