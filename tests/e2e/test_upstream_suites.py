"""Test files of vLLM with the gateway and a real server, and a list of those that fail, with the reason.

They are fetched once; without a network they are skipped. PAGED_SUITES=DIR uses the sources in DIR/vllm.
"""

import json
from pathlib import Path

import pytest

from tests.support.triton import MODEL
from tests.support.upstream_suites import NotFetched, Suite

pytestmark = pytest.mark.nightly  # several minutes, and a download
EXPECTED = json.loads((Path(__file__).parent / "upstream_failures.json").read_text())
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
    )
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
    assert [name for name in expected if name not in failed] == [], "these pass now, or are gone"
    assert len(outcomes) > len(failed)
