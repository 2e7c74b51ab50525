"""LoRA adapters: each request of a batch generates the tokens that PEFT generates with its adapter."""

import itertools
import random
import shutil
from collections import defaultdict
from copy import deepcopy

import numpy as np
import pytest
import torch
import transformers as hf
from peft import PeftModel

from paged_backend.api.errors import ConfigError
from paged_backend.execution.runner import Runner
from paged_backend.models import linear
from paged_backend.models.lora import Lora, StackedFactors, adapter_rows
from paged_backend.models.peft_files import Factors
from tests.support.adapters import (
    LORA,
    MAX_TOKENS,
    generate_all_with,
    generate_and_count_hits,
    generate_with,
    make_adapter,
    write_adapter_list,
)
from tests.support.families import COMMON
from tests.support.in_process import WAIT, byte_tokenizer, generate_with_transformers, running, save_tiny, tiny_assembly
from tests.support.pairwise import mostly_nightly
from tests.support.recorded_graphs import CpuCapture


def submit_all(engine, lora_prompts, names, **sampling):
    """Submit every prompt with every adapter, in random order."""
    pairs = [(name, index) for index in range(len(lora_prompts)) for name in names]
    random.Random(1).shuffle(pairs)
    keys = [
        engine.submit(lora_prompts[index], max_tokens=MAX_TOKENS, lora_name=name, **sampling) for name, index in pairs
    ]
    return pairs, keys


def check_all(engine, lora_prompts, lora_outputs, **sampling):
    pairs, keys = submit_all(engine, lora_prompts, lora_outputs, **sampling)
    for (name, index), output in zip(pairs, engine.wait(*keys), strict=True):
        assert output.tokens == lora_outputs[name][index], (name, index)


@pytest.mark.usefixtures("async_scheduling")
def test_batch_of_all_adapters_and_base_model(tiny, adapter_list, lora_prompts, lora_outputs):
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA)) as engine:
        check_all(engine, lora_prompts, lora_outputs)


def test_more_adapters_than_slots_run_in_turn(tiny, adapter_list, lora_prompts, lora_outputs):
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA | {"max_loras": 1})) as engine:
        check_all(engine, lora_prompts, lora_outputs)
        used = {frozenset(one.adapters) for one in plans(engine)}
        assert max(map(len, used)) == 1 and len(used) == len(lora_outputs)  # one adapter per step, or none


def plans(engine):
    return engine.assembly.runner.plans


@pytest.fixture(autouse=True)
def record_plans(monkeypatch):
    """Record the plans that a runner executes."""
    inner = Runner.move

    def move(self, plan):
        vars(self).setdefault("plans", []).append(plan)
        inner(self, plan)

    monkeypatch.setattr(Runner, "move", move)


@pytest.mark.parametrize(("max_cpu_loras", "times"), [(2, 2), (1, 3)])
def test_adapters_stay_in_memory_up_to_a_number(tiny, adapter_list, lora_prompts, caplog, max_cpu_loras, times):
    caplog.set_level("INFO", "paged_llm")
    options = LORA | {"max_loras": 1, "max_cpu_loras": max_cpu_loras}
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **options)) as engine:
        for name in ("all", "wide", "all"):
            engine.wait(engine.submit(lora_prompts[1], max_tokens=2, lora_name=name))
    assert sum(message.startswith("loaded adapter ") for message in caplog.messages) == times


def test_least_recently_used_idle_adapter_is_evicted(tiny, adapter_list, lora_prompts):
    """While two adapters run, a third waits for a slot. Requests without an adapter do not wait behind it."""
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA | {"max_loras": 2})) as engine:
        keys = [engine.submit(lora_prompts[1], max_tokens=60, lora_name=name) for name in ("all", "wide")]
        while engine.step().stats.running < 2:
            pass
        waiting = engine.submit(lora_prompts[1], max_tokens=4, lora_name="attention")
        late = engine.submit(lora_prompts[1], max_tokens=4, lora_name="all")
        while engine.step().stats.waiting < 2:
            pass
        engine.wait(engine.submit(lora_prompts[1], max_tokens=4))
        assert engine.outputs[waiting].tokens == engine.outputs[late].tokens == []
        engine.wait(*keys, waiting, late)
        loads = [load.adapter.name for plan in plans(engine) for load in plan.loads]
        assert loads == ["all", "wide", "attention", "all"]
        engine.wait(engine.submit(lora_prompts[1], max_tokens=4, lora_name="attention"))
        assert sorted(adapter.name for adapter in engine.assembly.scheduler.slots.resident) == ["all", "attention"]


def test_embeddings(tiny, adapter_list, adapter_files, lora_prompts):
    """A repeated prompt hits the prefix cache of its own adapter, and a prompt without one hits neither."""
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA)) as engine:
        for name in ("all", "wide", "all", None):
            (output,) = engine.wait(engine.embed(lora_prompts[3], lora_name=name))
            adapted = PeftModel.from_pretrained(deepcopy(tiny[1]), adapter_files[name]).eval() if name else tiny[1]
            with torch.inference_mode():
                states = adapted(torch.tensor([lora_prompts[3]]), output_hidden_states=True).hidden_states
            torch.testing.assert_close(torch.tensor(output.hidden), states[-1][0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption(tiny, adapter_list, adapter_files, mode):
    rng = random.Random(1)
    lora_prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in (17, 23, 19, 21, 12)]
    small = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 64, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA | {"max_loras": 3} | small)) as engine:
        pairs = list(zip(lora_prompts, [*adapter_files, None], strict=True))
        keys = [engine.submit(prompt, max_tokens=24, lora_name=name) for prompt, name in pairs]
        for (prompt, name), output in zip(pairs, engine.wait(*keys), strict=True):
            expected = (
                generate_with(tiny[1], adapter_files[name], prompt, 24)
                if name
                else generate_with_transformers(tiny[1], prompt, 24)
            )
            assert output.tokens == expected
        assert engine.history[-1].stats.preemptions > 0


@pytest.mark.usefixtures("async_scheduling")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_higher_priority_preempts_adapter_slots(tiny, adapter_list, adapter_files, lora_prompts, mode):
    """The preempted request resumes later and generates the same tokens."""
    options = LORA | {"max_loras": 2, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **options)) as engine:
        low = engine.submit(lora_prompts[1], max_tokens=40, lora_name="all", priority=2)
        kept = engine.submit(lora_prompts[2], max_tokens=40, lora_name="wide", priority=1)
        while not (engine.outputs[low].tokens and engine.outputs[kept].tokens):
            engine.step()
        high = engine.submit(lora_prompts[1], max_tokens=MAX_TOKENS, lora_name="attention")
        engine.wait(high)
        assert engine.outputs[low].finish is engine.outputs[kept].finish is None
        engine.wait(low, kept)
        for key, prompt, name in ((low, 1, "all"), (kept, 2, "wide"), (high, 1, "attention")):
            output = engine.outputs[key].tokens
            assert output == generate_with(tiny[1], adapter_files[name], lora_prompts[prompt], len(output))
        assert [len(engine.outputs[key].tokens) for key in (low, kept, high)] == [40, 40, MAX_TOKENS]
        stats = engine.history[-1].stats
        assert (stats.swapped, stats.recomputed) == ((1, 0) if mode == "swap" else (0, 1))


# --- model variants ---------------------------------------------------------------------------------------------------

FORMS = {
    "qwen2, fused": lambda: hf.Qwen2Config(**COMMON),  # biases
    "qwen3, fused": lambda: hf.Qwen3Config(**COMMON, head_dim=32),
    "tied, fused": lambda: hf.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "gemma2, unmodified": lambda: hf.Gemma2Config(**COMMON, tie_word_embeddings=False, sliding_window=7),
    "phi3, unmodified": lambda: hf.Phi3Config(**COMMON),  # a joined layer for queries, keys and values
}


BY_DEFAULT = [("qwen2, fused", False), ("qwen3, fused", True), ("gemma2, unmodified", False)]


@pytest.mark.parametrize(
    ("name", "packed"),
    mostly_nightly(itertools.product(FORMS, (False, True)), default=BY_DEFAULT),
)
def test_every_model_form_matches_peft(name, packed, tmp_path, lora_prompts, monkeypatch, caplog):
    if packed:
        monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model = save_tiny(FORMS[name](), tmp_path / "model")
    adapters = {
        "one": make_adapter(model, tmp_path / "one", target_modules="all-linear"),
        "other": make_adapter(model, tmp_path / "other", seed=1, target_modules="all-linear", r=7),
    }
    check_model(
        tmp_path, model, adapters, lora_prompts, caplog, name.partition(", ")[2] + ", with packed weights" * packed
    )


def check_model(directory, model, adapters, lora_prompts, caplog, form, **options):
    with (
        caplog.at_level("INFO"),
        running(
            tiny_assembly(directory / "model", adapters=write_adapter_list(directory, adapters), **LORA | options)
        ) as engine,
    ):
        assert f"runs {form}" in caplog.text
        prompts = lora_prompts[::2]  # of one token, and longer than a step
        of_adapters = [generate_all_with(model, path, prompts, MAX_TOKENS) for path in adapters.values()]
        for prompt, *expected in zip(prompts, *of_adapters, strict=True):
            keys = [engine.submit(prompt, max_tokens=MAX_TOKENS, lora_name=name) for name in (*adapters, None)]
            expected.append(generate_with_transformers(model, prompt, MAX_TOKENS))
            assert [output.tokens for output in engine.wait(*keys)] == expected
            assert len(set(map(tuple, expected))) == len(expected)


def test_conv1d_layers_match_peft(tmp_path, lora_prompts, caplog):
    sizes = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    model = save_tiny(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2), tmp_path / "model")
    options = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    adapters = {"one": make_adapter(model, tmp_path / "one", **options)}
    check_model(tmp_path, model, adapters, lora_prompts, caplog, "unmodified")


def test_adapters_over_int8_weights(tiny, adapter_list, lora_prompts, monkeypatch):
    """There is no reference for int8, so batched requests are compared with single ones and with the base model."""
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    with running(tiny_assembly(tiny[0], adapters=adapter_list, quantization="int8", **LORA)) as engine:
        for prompt in lora_prompts:
            names = ["all", "wide", None]
            single = [engine.generate([prompt], max_tokens=MAX_TOKENS, lora_name=name)[0] for name in names]
            assert len(set(map(tuple, single))) == len(names)
            keys = [engine.submit(prompt, max_tokens=MAX_TOKENS, lora_name=name, cache_salt="again") for name in names]
            assert [output.tokens for output in engine.wait(*keys)] == single
    with running(tiny_assembly(tiny[0], quantization="int8")) as engine:
        assert engine.generate([lora_prompts[-1]], max_tokens=MAX_TOKENS) == [single[-1]]


def test_step_without_adapters_skips_lora(tiny, adapter_list, lora_prompts, monkeypatch):
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA)) as engine:
        engine.generate(lora_prompts, max_tokens=4, lora_name="all")
        monkeypatch.setattr(Lora, "applied", None)
        assert all(engine.generate(lora_prompts, max_tokens=4))
        (output,) = engine.wait(engine.submit(lora_prompts[0], max_tokens=4, lora_name="all"))
    assert output.error is not None  # a request with an adapter does need it


def test_adapters_in_16_bits(tiny, adapter_list, lora_prompts):
    """Rounding decides some tokens in bfloat16, so this only checks that the adapters change them."""
    with running(tiny_assembly(tiny[0], adapters=adapter_list, dtype="bfloat16", **LORA)) as engine:
        keys = [engine.submit(lora_prompts[3], max_tokens=MAX_TOKENS, lora_name=name) for name in ("all", "wide", None)]
        assert len({tuple(output.tokens) for output in engine.wait(*keys)}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_factors_add_each_rows_adapter(dtype):
    """Includes non-contiguous slots, and an overflow in a slot that the row does not use."""
    generator = torch.Generator().manual_seed(0)
    stack = StackedFactors(torch.zeros(4, 3, 5), torch.zeros(4, 3, 6))
    factors = {
        slot: Factors(torch.randn(rank, 5, generator=generator), torch.randn(6, rank, generator=generator))
        for slot, rank in ((0, 3), (2, 1), (3, 2))
    }
    for slot, values in factors.items():
        stack.load_slot(slot, values)
    x = torch.randn(7, 5, generator=generator)
    for slots in ([-1, 0, 3, 3, 0, -1, 3], [-1, 2, 3, 2, 3, 2, 3], [2] * 7, [1, -1] * 3 + [1], [0, 1, 2, 3, 0, 1, 2]):
        y = torch.randn(7, 8, generator=generator).to(dtype)
        expected = y.float()
        for row, slot in enumerate(slots):
            if slot in factors:
                expected[row, 1:7] += factors[slot].b @ (factors[slot].a @ x[row])
        stack.add(y[:, 1:7], x, adapter_rows(np.array(slots)))
        torch.testing.assert_close(y, expected.to(dtype))
    stack.load_slot(0, Factors(torch.full((3, 5), 3e38), torch.ones(6, 3)))
    y = torch.zeros(2, 6)
    stack.add(y, 10 * x[:2].abs(), adapter_rows(np.array([0, 2])))
    assert not y[0].isfinite().any() and y[1].isfinite().all()


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_prefix_cache_is_separate_per_adapter(tiny, adapter_list, adapter_files, lora_prompts, lora_outputs):
    """Holds for blocks on the device and for blocks that were swapped to the host."""
    small = {"num_gpu_blocks_override": 24, "swap_space": 0.01}
    for options in ({"num_gpu_blocks_override": 128}, small):
        with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA | options)) as engine:
            names = [None, *adapter_files]
            for name in names:
                assert generate_and_count_hits(engine, lora_prompts[3], name) == (0, lora_outputs[name][3])
            for name in names:
                hits, tokens = generate_and_count_hits(engine, lora_prompts[3], name)
                assert hits >= 36 and tokens == lora_outputs[name][3]
            assert generate_and_count_hits(engine, lora_prompts[3], "all", cache_salt="other tenant") == (
                0,
                lora_outputs["all"][3],
            )
            assert (engine.history[-1].stats.host_tokens > 0) == (options is small)


def test_changed_adapter_does_not_share_cached_blocks(tiny, tmp_path, adapter_files, lora_prompts, lora_outputs):
    directory = tmp_path / "adapter"
    shutil.copytree(adapter_files["all"], directory)
    with running(tiny_assembly(tiny[0], adapters=write_adapter_list(tmp_path, {"a": directory}), **LORA)) as engine:
        assert generate_and_count_hits(engine, lora_prompts[3], "a") == (0, lora_outputs["all"][3])
        shutil.rmtree(directory)
        shutil.copytree(adapter_files["wide"], directory)
        assert generate_and_count_hits(engine, lora_prompts[3], "a") == (0, lora_outputs["wide"][3])
        shutil.rmtree(directory)
        shutil.copytree(adapter_files["all"], directory)
        assert generate_and_count_hits(engine, lora_prompts[3], "a") == (39, lora_outputs["all"][3])


def test_equal_adapters_share_cached_blocks(tiny, tmp_path, adapter_files, lora_prompts, lora_outputs):
    names = {"a": adapter_files["all"], "b": adapter_files["all"]}
    with running(
        tiny_assembly(tiny[0], adapters=write_adapter_list(tmp_path, names), **LORA | {"max_loras": 1})
    ) as engine:
        assert generate_and_count_hits(engine, lora_prompts[3], "a") == (0, lora_outputs["all"][3])
        assert generate_and_count_hits(engine, lora_prompts[3], "b") == (39, lora_outputs["all"][3])
        assert sum(len(plan.loads) for plan in plans(engine)) == 1


def test_disk_cache_is_separate_per_adapter_after_restart(tiny, adapter_list, tmp_path, lora_prompts, lora_outputs):
    options = LORA | {"num_gpu_blocks_override": 128, "swap_space": 0.01, "disk_cache_dir": str(tmp_path / "cache")}
    for read in (0, 9):
        with running(tiny_assembly(tiny[0], adapters=adapter_list, **options)) as engine:
            assert generate_and_count_hits(engine, lora_prompts[3], "all") == (4 * read, lora_outputs["all"][3])
            if not read:
                continue
            assert engine.history[-1].stats.disk_read == read
            for name in ("wide", None):
                assert generate_and_count_hits(engine, lora_prompts[3], name) == (0, lora_outputs[name][3])
            assert engine.history[-1].stats.disk_read == read


# --- combinations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["lookup", "itself", "draft"])
def test_draft_tokens_do_not_change_outputs(tiny, draft, adapter_list, lora_prompts, lora_outputs, drafter):
    model = {"lookup": None, "itself": str(tiny[0]), "draft": str(draft)}[drafter]
    options = {"num_speculative_tokens": 3, "speculative_model": model, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA | options)) as engine:
        check_all(engine, lora_prompts, lora_outputs)
        stats = engine.history[-1].stats
    assert stats.draft_tokens > 0
    if drafter == "itself":
        assert 0 < stats.accepted_tokens < stats.draft_tokens  # the base model drafts, the adapters verify


def test_only_steps_without_adapters_are_replayed(tiny, adapter_list, lora_prompts, lora_outputs, monkeypatch):
    capture = CpuCapture(monkeypatch)
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA)) as engine:
        key = engine.submit(lora_prompts[0], max_tokens=MAX_TOKENS, lora_name="all")
        assert engine.wait(key)[0].tokens == lora_outputs["all"][0]
        assert not capture.replays
        check_all(engine, lora_prompts, lora_outputs)
        engine.generate(lora_prompts[:1], max_tokens=4)
        assert capture.replays


def test_samples_and_beams(tiny, adapter_list, adapter_files, lora_prompts):
    """Outputs match those of the engine with the merged model and without adapters."""
    merged = PeftModel.from_pretrained(deepcopy(tiny[1]), adapter_files["all"]).merge_and_unload()
    directory = adapter_list.parent / "merged"
    merged.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    requests = [{"n": 3, "temperature": 1.0, "seed": 5}, {"beam_width": 3, "n": 2}, {"temperature": 0.8, "seed": 1}]
    with running(tiny_assembly(directory)) as engine:
        expected = [every_sample(engine, lora_prompts[2], **request) for request in requests]
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA)) as engine:
        beside = engine.submit(lora_prompts[1], max_tokens=100, lora_name="wide")
        assert [every_sample(engine, lora_prompts[2], lora_name="all", **request) for request in requests] == expected
        engine.wait(beside)


def every_sample(engine, prompt, **sampling):
    key = engine.submit(prompt, max_tokens=12, temperature=sampling.pop("temperature", 0), **sampling)
    tokens, remaining = defaultdict(list), sampling.get("n", 1)
    while remaining:
        for delta in engine.steps.get(timeout=WAIT).deltas:
            if delta.key == key:
                tokens[delta.sample] += delta.token_ids
                remaining -= delta.last
            else:
                engine.outputs[delta.key].tokens += delta.token_ids
                engine.outputs[delta.key].finish = delta.finish
    return dict(tokens)


def test_model_without_adaptable_layers_is_rejected(tiny, monkeypatch):
    monkeypatch.setattr("paged_backend.models.lora._sizes", lambda module: None)
    with pytest.raises(ConfigError, match="enable_lora=true: LlamaForCausalLM has no linear layer that can be adapted"):
        tiny_assembly(tiny[0], **LORA)


def test_experts_are_not_adaptable_but_other_layers_are(tmp_path, lora_prompts, caplog):
    model = save_tiny(hf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2), tmp_path / "model")
    adapters = {"one": make_adapter(model, tmp_path / "one", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])}
    check_model(tmp_path, model, adapters, lora_prompts, caplog, "fused")


def test_each_row_uses_its_own_slot_only():
    rows = adapter_rows(np.array([5, -1, 2, 5]))
    assert rows.used == (2, 5)
    assert rows.slots.tolist() == [2, 5]
    assert rows.masked[..., 0].tolist() == [[True, False], [True, True], [False, True], [True, False]]


def test_rows_without_adapters_use_no_slot():
    rows = adapter_rows(np.array([-1, -1]))
    assert rows.used == ()
    assert rows.masked.shape == (2, 0, 1)
