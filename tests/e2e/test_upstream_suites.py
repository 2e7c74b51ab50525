"""Test files of vLLM and of Triton's OpenAI frontend, with the gateway and a real server.

Some fail; upstream_failures.json has them, by reason. The files are fetched once, and skipped without a network.
PAGED_SUITES=DIR uses the sources in DIR/vllm and DIR/triton.
"""

import json
from pathlib import Path

import pytest

from tests.support.triton import MODEL
from tests.support.upstream_suites import NotFetched, RepositorySuite, Suite

pytestmark = pytest.mark.nightly  # several minutes, and a download
EXPECTED = json.loads((Path(__file__).parent / "upstream_failures.json").read_text())
MAY_FAIL = "may fail: "
SUITES = [
    Suite(
        "vllm",
        "0.13.0",
        "tests/entrypoints/openai",
        (
            "test_chat.py",
            "test_chat_echo.py",
            "test_chat_logit_bias_validation.py",
            "test_return_token_ids.py",
            "test_root_path.py",
            "test_tokenization.py",
        ),
    ),
    RepositorySuite(
        "triton",
        "2025-10",
        "python/openai/tests",
        {
            "test_chat_completions.py": "cc360503b83fc1392dc1cb9f412d771bce9db516",
            "test_completions.py": "16fd5390706f422da56e9c8fafbe2e6c74e0e145",
            "test_observability.py": "156535c627d09de42d69de568f34b79f56eb9afa",
            "test_openai_client.py": "16fd5390706f422da56e9c8fafbe2e6c74e0e145",
        },
        repository="triton-inference-server/server",
    ),
]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.project)
def test_only_the_expected_tests_fail(suite, demo_server, demo_model, tmp_path):
    try:
        suite.sources()
    except NotFetched as reason:
        pytest.skip(str(reason))
    outcomes = suite.run(demo_server.grpc_url, MODEL, demo_model, tmp_path)
    expected = {name: reason for reason, names in EXPECTED[suite.project].items() for name in names}
    failed = {name: error for name, error in outcomes.items() if error}
    surprises = {name: error for name, error in failed.items() if name not in expected}
    assert surprises == {}
    passed = [name for name, reason in expected.items() if name not in failed and not reason.startswith(MAY_FAIL)]
    assert passed == [], "these pass now, or are gone"
    assert len(outcomes) > len(failed)
