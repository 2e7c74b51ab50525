"""The page of the support matrix: it is generated, lists every family, and disagrees with other results."""

import json

import pytest

from tests.support.families import REJECTED_FAMILIES
from tests.support.support_matrix import (
    OPTIONS,
    PAGE,
    REQUESTS,
    Records,
    Result,
    SupportMatrix,
    main,
    read_page,
    render,
)
from tests.support.tiny_family import MATRIX_FAMILIES


@pytest.fixture
def expected():
    return read_page(PAGE.read_text())


def test_page_is_as_it_was_generated(expected):
    assert render(expected) == PAGE.read_text(), "run make matrix"


def test_page_lists_every_family(expected):
    assert expected.models.keys() == MATRIX_FAMILIES.keys(), "run make matrix"
    rejected = {family for (family, feature), result in expected.results.items() if feature == "load"}
    assert rejected == REJECTED_FAMILIES.keys(), "run make matrix"


def test_results_that_differ_from_the_page_fail(expected):
    matrix = SupportMatrix(expected)
    matrix.record("llama", "swap", "tested")
    with pytest.raises(AssertionError, match=r"llama, swap: .*tested.*, now .*rejected.*: run make matrix"):
        matrix.record("llama", "swap", "rejected", "swap_space=1: not supported")
    with pytest.raises(AssertionError, match=r"gpt2, tensor parallelism: .*, now .*other.*: run make matrix"):
        matrix.record("gpt2", "tensor parallelism", "rejected", "other")
    with pytest.raises(AssertionError, match=r"llama: .*, now LlamaForCausalLM, sliding window: run make matrix"):
        matrix.describe("llama", "LlamaForCausalLM", "sliding window")
    with pytest.raises(AssertionError, match=r"other, swap: .*untested.*, now .*tested.*"):
        matrix.record("other", "swap", "tested")


def test_records_become_the_page(tmp_path):
    """Records of several processes are added, and a feature without a result is untested."""
    first, second = SupportMatrix(None), SupportMatrix(None)
    first.describe("llama", "LlamaForCausalLM", "full attention")
    first.record("llama", "swap", "tested")
    second.record("llama", "LoRA", "rejected", "enable_lora=true: a | b")
    second.record("llama", "int8", "untested", "there is no test")
    records = Records()
    for matrix in (first, second):
        records.add(Records.parse(json.loads(json.dumps(matrix.records.dump()))))
    (tmp_path / "records.json").write_text(json.dumps(records.dump()))
    main([str(tmp_path / "records.json"), "--write", str(tmp_path / "page.md")])
    read = read_page((tmp_path / "page.md").read_text())
    assert read.models == {"llama": ("LlamaForCausalLM", "full attention")}
    results = {feature: read.results["llama", feature] for feature in (*REQUESTS, *OPTIONS)}
    expected = dict.fromkeys(results, Result("untested")) | {
        "swap": Result("tested"),
        "LoRA": Result("rejected", "enable_lora=true: a | b"),
        "int8": Result("untested", "there is no test"),
    }
    assert results == expected


def test_unknown_features_cannot_be_recorded(expected):
    with pytest.raises(AssertionError):
        SupportMatrix(expected).record("llama", "images", "tested")
