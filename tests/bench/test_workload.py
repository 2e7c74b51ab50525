"""Workloads, and models without weights."""

from argparse import ArgumentTypeError

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from paged_bench._workload import (
    MODELS,
    TABLE,
    WORKLOADS,
    blocks_for,
    model_names,
    model_options,
    workload,
    workload_name,
)


def test_even_workload_token_counts():
    jobs = workload("even", 32, vocab_size=100, limit=4096)
    assert (sum(len(job.prompt) for job in jobs), sum(job.output for job in jobs)) == (4609, 3260)


def test_nano_vllm_workload_has_its_token_counts():
    jobs = workload("nano", 256, vocab_size=100, limit=4096)
    assert (sum(len(job.prompt) for job in jobs), sum(job.output for job in jobs)) == (142_827, 133_966)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_workloads_fit_the_model_and_are_deterministic(name):
    jobs = workload(name, 32, vocab_size=50, limit=300, rate=10.0)
    assert jobs == workload(name, 32, vocab_size=50, limit=300, rate=10.0)
    assert all(len(job.prompt) >= 1 and len(job.prompt) + job.output <= 300 and job.output >= 1 for job in jobs)
    assert all(0 <= token < 50 for job in jobs for token in job.prompt)
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)


@pytest.mark.parametrize("name", TABLE)
def test_requests_of_equal_lengths_are_not_shortened(name):
    count, prompt, output = map(int, name.replace("x", "/").split("/"))
    jobs = workload(workload_name(name), 3, vocab_size=50, limit=40960)
    assert [(len(job.prompt), job.output) for job in jobs] == [(prompt, output)] * count
    assert blocks_for([name], 3) * 16 >= count * (prompt + output)


@pytest.mark.parametrize("name", ["16x512", "0x5/5", "16x512/256 ", "fast"])
def test_unknown_workloads_are_rejected(name):
    with pytest.raises(ArgumentTypeError, match="or REQUESTSxPROMPT/OUTPUT, such as 16x512/256"):
        workload_name(name)


def test_random_weights_need_no_download(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path))
    options = model_options("Qwen3-0.6B")
    assert options["load_format"] == "dummy"
    assert len(AutoTokenizer.from_pretrained(options["tokenizer"])) == 151936


@pytest.mark.parametrize("name", model_names())
def test_models_without_weights_have_valid_configurations(name):
    config = AutoConfig.from_pretrained(MODELS / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == pytest.approx(
        {"Qwen3-0.6B": 596e6, "Llama-3.1-8B": 8.03e9, "Llama-3.3-70B": 70.6e9, "tiny": 459e3}[name], rel=0.01
    )
