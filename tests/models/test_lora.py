"""LoRA adapters: each row of a batch gets what PEFT computes for its adapter alone."""

import json
import os
import random
import shutil
import threading
from collections import defaultdict
from copy import deepcopy

import numpy as np
import pytest
import torch
import transformers as hf
from peft import PeftModel
from safetensors.torch import load_file, save_file

from paged_backend.api.errors import ConfigError, ErrorCode
from paged_backend.engine import warm_up
from paged_backend.execution.runner import Runner
from paged_backend.loading.adapters import AdapterRegistry
from paged_backend.models import linear, peft_files
from paged_backend.models.adapter_rows import adapter_rows
from paged_backend.models.lora import Lora, StackedFactors
from paged_backend.models.peft_files import Factors
from tests.support.adapters import LORA, generate_with, listing, make_adapter
from tests.support.families import COMMON
from tests.support.in_process import WAIT, byte_tokenizer, generate_with_transformers, running, save_tiny, tiny_assembly

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(3)
    return [[rnd.randrange(3, 320) for _ in range(length)] for length in (1, 6, 17, 40)]


@pytest.fixture(scope="module")
def files(tiny, tmp_path_factory):
    """Adapters of different ranks, layers and scalings, by name."""
    place = tmp_path_factory.mktemp("adapters")
    options = {
        "all": {},
        "wide": {"r": 8, "target_modules": "all-linear", "use_rslora": True},
        "attention": {"r": 1, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 3},
        "patterns": {
            "rank_pattern": {"layers.1.self_attn.k_proj": 2, "down_proj": 5},
            "alpha_pattern": {"up_proj": 2, "o_proj": 16},
            "layers_to_transform": [1, 2],
        },
    }
    return {
        name: make_adapter(tiny[1], place / name, seed=seed, **one) for seed, (name, one) in enumerate(options.items())
    }


@pytest.fixture(scope="module")
def alone(tiny, files, prompts):
    """What each adapter, or none, gives for each prompt."""
    expected = {
        name: [generate_with(tiny[1], path, one, MAX_TOKENS) for one in prompts] for name, path in files.items()
    }
    expected[None] = [generate_with_transformers(tiny[1], one, MAX_TOKENS) for one in prompts]
    for index in range(len(prompts)):
        assert len({tuple(each[index]) for each in expected.values()}) == len(expected), "adapters that change nothing"
    return expected


@pytest.fixture
def listed(tmp_path, files):
    return listing(tmp_path, files)


def submit_all(engine, prompts, names, **sampling):
    """Every prompt with every adapter, in a mixed order."""
    pairs = [(name, index) for index in range(len(prompts)) for name in names]
    random.Random(1).shuffle(pairs)
    keys = [engine.submit(prompts[index], max_tokens=MAX_TOKENS, lora_name=name, **sampling) for name, index in pairs]
    return pairs, keys


def check_all(engine, prompts, alone, **sampling):
    pairs, keys = submit_all(engine, prompts, alone, **sampling)
    for (name, index), output in zip(pairs, engine.wait(*keys), strict=True):
        assert output.tokens == alone[name][index], (name, index)


@pytest.mark.usefixtures("planning")
def test_batch_of_all_adapters_and_base_model(tiny, listed, prompts, alone):
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA)) as engine:
        check_all(engine, prompts, alone)


def test_more_adapters_than_slots_run_in_turn(tiny, listed, prompts, alone):
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA | {"max_loras": 1})) as engine:
        check_all(engine, prompts, alone)
        used = {frozenset(one.adapters) for one in plans(engine)}
        assert max(map(len, used)) == 1 and len(used) == len(alone)  # one at a time, and none


def plans(engine):
    return engine.assembly.runner.moved


@pytest.fixture(autouse=True)
def moved(monkeypatch):
    """Keep the plans that a runner was given."""
    inner = Runner.move

    def move(self, plan):
        vars(self).setdefault("moved", []).append(plan)
        inner(self, plan)

    monkeypatch.setattr(Runner, "move", move)


def test_least_recently_used_idle_adapter_is_evicted(tiny, listed, prompts):
    """While two run, a third waits, and who has none does not wait behind it."""
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA | {"max_loras": 2})) as engine:
        keys = [engine.submit(prompts[1], max_tokens=60, lora_name=name) for name in ("all", "wide")]
        while engine.step().stats.running < 2:
            pass
        waiting = engine.submit(prompts[1], max_tokens=4, lora_name="attention")
        late = engine.submit(prompts[1], max_tokens=4, lora_name="all")
        while engine.step().stats.waiting < 2:
            pass
        engine.wait(engine.submit(prompts[1], max_tokens=4))
        assert engine.outputs[waiting].tokens == engine.outputs[late].tokens == []
        engine.wait(*keys, waiting, late)
        (loads) = [load.adapter.name for plan in plans(engine) for load in plan.loads]
        assert loads == ["all", "wide", "attention", "all"]
        engine.wait(engine.submit(prompts[1], max_tokens=4, lora_name="attention"))
        assert sorted(one.name for one in engine.assembly.scheduler.slots.resident) == ["all", "attention"]


def test_embeddings(tiny, listed, files, prompts):
    """The second of a prompt finds the blocks of its own adapter, and the last ones those of nobody's."""
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA)) as engine:
        for name in ("all", "wide", "all", None):
            (output,) = engine.wait(engine.embed(prompts[3], lora_name=name))
            adapted = PeftModel.from_pretrained(deepcopy(tiny[1]), files[name]).eval() if name else tiny[1]
            with torch.inference_mode():
                states = adapted(torch.tensor([prompts[3]]), output_hidden_states=True).hidden_states
            torch.testing.assert_close(torch.tensor(output.hidden), states[-1][0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption(tiny, listed, files, mode):
    rnd = random.Random(1)
    prompts = [[rnd.randrange(3, 320) for _ in range(length)] for length in (17, 23, 19, 21, 12)]
    small = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 64, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA | {"max_loras": 3} | small)) as engine:
        pairs = list(zip(prompts, [*files, None], strict=True))
        keys = [engine.submit(prompt, max_tokens=24, lora_name=name) for prompt, name in pairs]
        for (prompt, name), output in zip(pairs, engine.wait(*keys), strict=True):
            expected = (
                generate_with(tiny[1], files[name], prompt, 24)
                if name
                else generate_with_transformers(tiny[1], prompt, 24)
            )
            assert output.tokens == expected
        assert engine.history[-1].stats.preemptions > 0


@pytest.mark.usefixtures("planning")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_higher_priority_preempts_adapter_slots(tiny, listed, files, prompts, mode):
    """Whoever had it goes on later as if nothing had been."""
    options = LORA | {"max_loras": 2, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0], adapters=listed, **options)) as engine:
        low = engine.submit(prompts[1], max_tokens=40, lora_name="all", priority=2)
        kept = engine.submit(prompts[2], max_tokens=40, lora_name="wide", priority=1)
        while not (engine.outputs[low].tokens and engine.outputs[kept].tokens):
            engine.step()
        high = engine.submit(prompts[1], max_tokens=MAX_TOKENS, lora_name="attention")
        engine.wait(high)
        assert engine.outputs[low].finish is engine.outputs[kept].finish is None
        engine.wait(low, kept)
        for key, prompt, name in ((low, 1, "all"), (kept, 2, "wide"), (high, 1, "attention")):
            output = engine.outputs[key].tokens
            assert output == generate_with(tiny[1], files[name], prompts[prompt], len(output))
        assert [len(engine.outputs[key].tokens) for key in (low, kept, high)] == [40, 40, MAX_TOKENS]
        stats = engine.history[-1].stats
        assert (stats.swapped, stats.recomputed) == ((1, 0) if mode == "swap" else (0, 1))


# --- forms of the model -----------------------------------------------------------------------------------------------

FORMS = {
    "qwen2, fused": lambda: hf.Qwen2Config(**COMMON),  # biases
    "qwen3, fused": lambda: hf.Qwen3Config(**COMMON, head_dim=32),
    "tied, fused": lambda: hf.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "gemma2, unmodified": lambda: hf.Gemma2Config(**COMMON, tie_word_embeddings=False, sliding_window=7),
    "phi3, unmodified": lambda: hf.Phi3Config(**COMMON),  # one layer for queries, keys and values
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", FORMS)
def test_every_model_form_matches_peft(name, packed, tmp_path, prompts, monkeypatch, caplog):
    if packed:
        monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
        monkeypatch.setattr(linear, "measure", lambda *arguments: [{"plain": 1.0, "groups": 0.5}] * len(linear.ROWS))
    model = save_tiny(FORMS[name](), tmp_path / "model")
    files = {
        "one": make_adapter(model, tmp_path / "one", target_modules="all-linear"),
        "other": make_adapter(model, tmp_path / "other", seed=1, target_modules="all-linear", r=7),
    }
    check_model(tmp_path, model, files, prompts, caplog, name.partition(", ")[2] + ", with packed weights" * packed)


def check_model(place, model, files, prompts, caplog, form, **options):
    with (
        caplog.at_level("INFO"),
        running(tiny_assembly(place / "model", adapters=listing(place, files), **LORA | options)) as engine,
    ):
        assert f"runs {form}" in caplog.text
        for prompt in prompts:
            keys = [engine.submit(prompt, max_tokens=MAX_TOKENS, lora_name=name) for name in (*files, None)]
            expected = [generate_with(model, path, prompt, MAX_TOKENS) for path in files.values()]
            expected.append(generate_with_transformers(model, prompt, MAX_TOKENS))
            assert [output.tokens for output in engine.wait(*keys)] == expected
            assert len(set(map(tuple, expected))) == len(expected)


def test_conv1d_layers_match_peft(tmp_path, prompts, caplog):
    sizes = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    model = save_tiny(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2), tmp_path / "model")
    named = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    files = {"one": make_adapter(model, tmp_path / "one", **named)}
    check_model(tmp_path, model, files, prompts, caplog, "unmodified")


def test_adapters_over_int8_weights(tiny, listed, prompts, monkeypatch):
    """Nobody else computes this, so an adapter alone is compared with it in a batch, and with its absence."""
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    with running(tiny_assembly(tiny[0], adapters=listed, quantization="int8", **LORA)) as engine:
        for prompt in prompts:
            names = ["all", "wide", None]
            alone = [engine.generate([prompt], max_tokens=MAX_TOKENS, lora_name=name)[0] for name in names]
            assert len(set(map(tuple, alone))) == len(names)
            keys = [engine.submit(prompt, max_tokens=MAX_TOKENS, lora_name=name, cache_salt="again") for name in names]
            assert [output.tokens for output in engine.wait(*keys)] == alone
    with running(tiny_assembly(tiny[0], quantization="int8")) as engine:
        assert engine.generate([prompts[-1]], max_tokens=MAX_TOKENS) == [alone[-1]]


def test_step_without_adapters_skips_lora(tiny, listed, prompts, monkeypatch):
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA)) as engine:
        engine.generate(prompts, max_tokens=4, lora_name="all")
        monkeypatch.setattr(Lora, "applied", None)
        assert all(engine.generate(prompts, max_tokens=4))
        (output,) = engine.wait(engine.submit(prompts[0], max_tokens=4, lora_name="all"))
    assert output.error is not None  # whoever asks needs it


def test_adapters_in_16_bits(tiny, listed, prompts):
    """Rounding decides some tokens there, so only that adapters change them, and nothing fails."""
    with running(tiny_assembly(tiny[0], adapters=listed, dtype="bfloat16", **LORA)) as engine:
        keys = [engine.submit(prompts[3], max_tokens=MAX_TOKENS, lora_name=name) for name in ("all", "wide", None)]
        assert len({tuple(output.tokens) for output in engine.wait(*keys)}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_factors_add_each_rows_adapter(dtype):
    """Also where the slots that are used do not follow one another, and what is not asked for overflows."""
    generator = torch.Generator().manual_seed(0)
    stack = StackedFactors(torch.zeros(4, 3, 5), torch.zeros(4, 3, 6))
    factors = {
        slot: Factors(torch.randn(rank, 5, generator=generator), torch.randn(6, rank, generator=generator))
        for slot, rank in ((0, 3), (2, 1), (3, 2))
    }
    for slot, one in factors.items():
        stack.load_slot(slot, one)
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


# --- the cache --------------------------------------------------------------------------------------------------------


def hits(engine, prompt, name, **sampling):
    """Tokens of a request's prompt that the cache had."""
    before = engine.history[-1].stats.cached_tokens if engine.history else 0
    tokens = engine.generate([prompt], max_tokens=MAX_TOKENS, lora_name=name, **sampling)[0]
    return engine.history[-1].stats.cached_tokens - before, tokens


def test_prefix_cache_is_separate_per_adapter(tiny, listed, files, prompts, alone):
    """Whether they lie on the device or were moved to the host."""
    small = {"num_gpu_blocks_override": 24, "swap_space": 0.01}
    for options in ({"num_gpu_blocks_override": 128}, small):
        with running(tiny_assembly(tiny[0], adapters=listed, **LORA | options)) as engine:
            names = [None, *files]
            for name in names:
                assert hits(engine, prompts[3], name) == (0, alone[name][3])
            for name in names:
                found, tokens = hits(engine, prompts[3], name)
                assert found >= 36 and tokens == alone[name][3]
            assert hits(engine, prompts[3], "all", cache_salt="other tenant") == (0, alone["all"][3])
            assert (engine.history[-1].stats.host_tokens > 0) == (options is small)


def test_changed_adapter_does_not_share_cached_blocks(tiny, tmp_path, files, prompts, alone):
    place = tmp_path / "adapter"
    shutil.copytree(files["all"], place)
    with running(tiny_assembly(tiny[0], adapters=listing(tmp_path, {"a": place}), **LORA)) as engine:
        assert hits(engine, prompts[3], "a") == (0, alone["all"][3])
        shutil.rmtree(place)
        shutil.copytree(files["wide"], place)
        assert hits(engine, prompts[3], "a") == (0, alone["wide"][3])
        shutil.rmtree(place)
        shutil.copytree(files["all"], place)
        assert hits(engine, prompts[3], "a") == (39, alone["all"][3])


def test_equal_adapters_share_cached_blocks(tiny, tmp_path, files, prompts, alone):
    names = {"a": files["all"], "b": files["all"]}
    with running(tiny_assembly(tiny[0], adapters=listing(tmp_path, names), **LORA | {"max_loras": 1})) as engine:
        assert hits(engine, prompts[3], "a") == (0, alone["all"][3])
        assert hits(engine, prompts[3], "b") == (39, alone["all"][3])
        assert sum(len(plan.loads) for plan in plans(engine)) == 1


def test_disk_cache_is_separate_per_adapter_after_restart(tiny, listed, tmp_path, prompts, alone):
    options = LORA | {"num_gpu_blocks_override": 128, "swap_space": 0.01, "disk_cache_dir": str(tmp_path / "cache")}
    for read in (0, 9):
        with running(tiny_assembly(tiny[0], adapters=listed, **options)) as engine:
            assert hits(engine, prompts[3], "all") == (4 * read, alone["all"][3])
            if not read:
                continue
            assert engine.history[-1].stats.disk_read == read
            for name in ("wide", None):
                assert hits(engine, prompts[3], name) == (0, alone[name][3])
            assert engine.history[-1].stats.disk_read == read


# --- beside everything else -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guesser", ["lookup", "itself", "draft"])
def test_draft_tokens_do_not_change_outputs(tiny, draft, listed, prompts, alone, guesser):
    model = {"lookup": None, "itself": str(tiny[0]), "draft": str(draft)}[guesser]
    options = {"num_speculative_tokens": 3, "speculative_model": model, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA | options)) as engine:
        check_all(engine, prompts, alone)
        stats = engine.history[-1].stats
    assert stats.draft_tokens > 0
    if guesser == "itself":
        assert 0 < stats.accepted_tokens < stats.draft_tokens  # the base model guesses, each adapter decides


def test_only_steps_without_adapters_are_replayed(tiny, listed, prompts, alone, monkeypatch):
    replays = []

    def record(step):
        place = step()

        def replay():
            replays.append(len(place))
            return place.copy_(step())

        return replay

    monkeypatch.setattr(warm_up, "graph_capture", lambda device: record)
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA)) as engine:
        key = engine.submit(prompts[0], max_tokens=MAX_TOKENS, lora_name="all")
        assert engine.wait(key)[0].tokens == alone["all"][0]
        assert not replays
        check_all(engine, prompts, alone)
        engine.generate(prompts[:1], max_tokens=4)
        assert replays


def test_samples_and_beams(tiny, listed, files, prompts):
    """Of the merged model's weights: the same engine without adapters."""
    merged = PeftModel.from_pretrained(deepcopy(tiny[1]), files["all"]).merge_and_unload()
    directory = listed.parent / "merged"
    merged.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    asks = [{"n": 3, "temperature": 1.0, "seed": 5}, {"beam_width": 3, "n": 2}, {"temperature": 0.8, "seed": 1}]
    with running(tiny_assembly(directory)) as engine:
        expected = [every_sample(engine, prompts[2], **ask) for ask in asks]
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA)) as engine:
        beside = engine.submit(prompts[1], max_tokens=100, lora_name="wide")
        assert [every_sample(engine, prompts[2], lora_name="all", **ask) for ask in asks] == expected
        engine.wait(beside)


def every_sample(engine, prompt, **sampling):
    key = engine.submit(prompt, max_tokens=12, temperature=sampling.pop("temperature", 0), **sampling)
    tokens, left = defaultdict(list), sampling.get("n", 1)
    while left:
        for delta in engine.steps.get(timeout=WAIT).deltas:
            if delta.key == key:
                tokens[delta.sample] += delta.token_ids
                left -= delta.last
            else:
                engine.outputs[delta.key].tokens += delta.token_ids
                engine.outputs[delta.key].finish = delta.finish
    return dict(tokens)


# --- files ------------------------------------------------------------------------------------------------------------


def test_changed_adapter_list_is_read_again(tiny, tmp_path, files, prompts, alone):
    with running(tiny_assembly(tiny[0], adapters=tmp_path / "multi_lora.json", **LORA)) as engine:
        assert refusal(engine, prompts[1], "all") == ("LoRA all is not supported, we currently support []")
        listing(tmp_path, {"all": files["all"]})
        assert hits(engine, prompts[1], "all") == (0, alone["all"][1])
        (tmp_path / "relative").symlink_to(files["wide"])
        listing(tmp_path, {"all": files["all"], "wide": "relative"})
        assert hits(engine, prompts[1], "wide") == (0, alone["wide"][1])
        (tmp_path / "multi_lora.json").write_text('{"wide": ')
        assert hits(engine, prompts[1], "wide")[1] == alone["wide"][1]  # what it said before still holds
        listing(tmp_path, {"wide": "relative"})
        assert "we currently support ['wide']" in refusal(engine, prompts[1], "all")
        (tmp_path / "multi_lora.json").unlink()
        assert "we currently support []" in refusal(engine, prompts[1], "wide")


def refusal(engine, prompt, name):
    (output,) = engine.wait(engine.submit(prompt, max_tokens=2, lora_name=name))
    assert output.error.code is ErrorCode.INVALID_ARGUMENT
    return str(output.error)


def change_config(place, **values):
    file = place / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(place, change):
    file = place / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
ENDLESS = r"((.|..)*)*[!?]"  # of each layer it would be tried in more ways than there is time for
BAD = {
    "adapter_config.json: No such file": lambda place: (place / "adapter_config.json").unlink(),
    "adapter_config.json: not valid JSON": lambda place: (place / "adapter_config.json").write_text("{"),
    "adapter_config.json: must contain one JSON object": lambda place: (place / "adapter_config.json").write_text("[]"),
    'adapter_config.json: peft_type="PROMPT_TUNING": must be': lambda place: change_config(
        place, peft_type="PROMPT_TUNING"
    ),
    "adapter_config.json: r=9: must be 1..8 (max_lora_rank)": lambda place: change_config(place, r=9),
    "adapter_config.json: lora_alpha=null: must be a finite": lambda place: change_config(place, lora_alpha=None),
    f"adapter_config.json: lora_alpha=1{'0' * 76}...: must be a finite number": lambda place: change_config(
        place, lora_alpha=10**400
    ),
    'adapter_config.json: rank_pattern="a{1000000000}": must be at most 1000 characters, without {': lambda place: (
        change_config(place, rank_pattern={"a{1000000000}": 4})  # would take gigabytes to compile
    ),
    'adapter_config.json: rank_pattern="(?<=a)b": must be': lambda place: change_config(
        place, rank_pattern={"(?<=a)b": 4}
    ),
    "adapter_config.json or adapter_model.safetensors: RecursionError": lambda place: change_config(
        place, rank_pattern={"(" * 999: 4}
    ),
    'adapter_config.json: bias="all": not supported': lambda place: change_config(place, bias="all"),
    "adapter_config.json: use_dora=true: not supported": lambda place: change_config(place, use_dora=True),
    'adapter_config.json: modules_to_save=["lm_head"]: not supported': lambda place: change_config(
        place, modules_to_save=["lm_head"]
    ),
    'adapter_config.json: news={"a": 1}: not supported': lambda place: change_config(place, news={"a": 1}),
    'adapter_config.json: init_lora_weights="pissa": changes the model': lambda place: change_config(
        place, init_lora_weights="pissa"
    ),
    'adapter_config.json: rank_pattern="(": not a valid regular expression': lambda place: change_config(
        place, rank_pattern={"(": 1}
    ),
    'adapter_config.json: rank_pattern["q"]=99: must be 1..8': lambda place: change_config(
        place, rank_pattern={"q": 99}
    ),
    f"adapter_config.json: {json.dumps(ENDLESS)}: takes more than": lambda place: change_config(
        place, rank_pattern={ENDLESS: 4}
    ),
    "adapter_model.safetensors: No such file": lambda place: (place / "adapter_model.safetensors").unlink(),
    "adapter_model.bin: pickle files can execute code": lambda place: (place / "adapter_model.safetensors").rename(
        place / "adapter_model.bin"
    ),
    "adapter_model.safetensors: not a regular file": lambda place: (
        (place / "adapter_model.safetensors").unlink(),
        os.mkfifo(place / "adapter_model.safetensors"),
    ),
    "adapter_model.safetensors: Error while deserializing": lambda place: (
        place / "adapter_model.safetensors"
    ).write_bytes((place / "adapter_model.safetensors").read_bytes()[:-1]),
    "adapter_model.safetensors: contains no tensor": lambda place: change_tensors(place, dict.clear),
    f"adapter_model.safetensors: {A} is missing": lambda place: change_tensors(place, lambda tensors: tensors.pop(A)),
    f"adapter_model.safetensors: {A}: has shape [4, 63]; must be [4, 64]": lambda place: change_tensors(
        place, lambda tensors: tensors.update({A: torch.zeros(4, 63)})
    ),
    f"adapter_model.safetensors: {A}: has dtype torch.int8; must be": lambda place: change_tensors(
        place, lambda tensors: tensors.update({A: torch.zeros(4, 64, dtype=torch.int8)})
    ),
    "self_attn.q_proj: contains values that are not finite": lambda place: change_tensors(
        place, lambda tensors: tensors[A].fill_(torch.inf)
    ),
    f"adapter_model.safetensors: {EMBEDDING}: not supported; must be lora_A": lambda place: change_tensors(
        place, lambda tensors: tensors.update({EMBEDDING: torch.zeros(4, 320)})
    ),
    "lm_head.lora_A.weight: the model has no linear layer lm_head that can be adapted": lambda place: change_tensors(
        place, lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)})
    ),
}


def test_invalid_adapter_fails_only_its_own_requests(tiny, tmp_path, files, prompts, alone, caplog, monkeypatch):
    monkeypatch.setattr(peft_files, "PATTERN_SECONDS", 0.05)
    places = {}
    for index, (reason, spoil) in enumerate(BAD.items()):
        places[reason] = tmp_path / str(index)
        shutil.copytree(files["all"], places[reason])
        spoil(places[reason])
    names = {str(index): place for index, place in enumerate(places.values())}
    names |= {"missing": tmp_path / "missing", "all": files["all"]}
    with running(tiny_assembly(tiny[0], adapters=listing(tmp_path, names), **LORA)) as engine:
        assert f"adapter missing in {tmp_path}/missing cannot be used: adapter_config.json: No such" in caplog.text
        good = [engine.submit(prompts[1], max_tokens=MAX_TOKENS, lora_name=name) for name in ("all", None)]
        for index, reason in enumerate(BAD):
            said = refusal(engine, prompts[1], str(index))
            assert said.startswith(f'INVALID_ARGUMENT: lora_name="{index}": cannot be used: adapter_')
            assert reason in said
        assert [output.tokens for output in engine.wait(*good)] == [alone["all"][1], alone[None][1]]
        for place in places.values():  # mended, it serves
            shutil.rmtree(place)
            shutil.copytree(files["all"], place)
        assert engine.generate([prompts[1]], max_tokens=MAX_TOKENS, lora_name="3") == [alone["all"][1]]


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "Expecting"), ("[]", "must contain a JSON"), ('{"a": 1}', "must contain a JSON")]
)
def test_invalid_adapter_list_fails_the_load(tiny, tmp_path, text, reason):
    (tmp_path / "multi_lora.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"multi_lora\.json: {reason}"):
        tiny_assembly(tiny[0], adapters=tmp_path / "multi_lora.json", **LORA)


def test_adapter_list_reports_rank_and_residency(tiny, tmp_path, files, prompts):
    names = {"all": files["all"], "wide": files["wide"], "bad": tmp_path}
    with running(tiny_assembly(tiny[0], adapters=listing(tmp_path, names), **LORA | {"max_loras": 1})) as engine:
        adapters, slots = engine.assembly.adapters, engine.assembly.scheduler.slots

        def told():
            return {one["name"]: (one["rank"], one["resident"]) for one in adapters.describe(slots.resident)}

        assert told() == {"all": (4, False), "wide": (8, False), "bad": (None, False)}
        engine.generate([prompts[0]], max_tokens=2, lora_name="all")
        assert told()["all"] == (4, True)
        engine.generate([prompts[0]], max_tokens=2, lora_name="wide")
        assert told() == {"all": (4, False), "wide": (8, True), "bad": (None, False)}


def test_aborted_request_does_not_run_after_adapter_load(tiny, listed, prompts, monkeypatch):
    reading, go_on = threading.Event(), threading.Event()
    inner = AdapterRegistry.get

    def get(self, name):
        reading.set()
        go_on.wait(WAIT)
        return inner(self, name)

    monkeypatch.setattr(AdapterRegistry, "get", get)
    with running(tiny_assembly(tiny[0], adapters=listed, **LORA)) as engine:
        key = engine.submit(prompts[1], max_tokens=4, lora_name="all")
        reading.wait(WAIT)
        engine.engine.abort(key)
        assert all(engine.generate([prompts[1]], max_tokens=4))  # others do not wait for it
        go_on.set()
        engine.generate([prompts[1]], max_tokens=4, lora_name="wide")
        assert engine.outputs[key].tokens == []


def test_model_without_adaptable_layers_is_rejected(tiny, monkeypatch):
    monkeypatch.setattr("paged_backend.models.lora._sizes", lambda module: None)
    with pytest.raises(ConfigError, match="enable_lora=true: LlamaForCausalLM has no linear layer that can be adapted"):
        tiny_assembly(tiny[0], **LORA)


def test_experts_are_not_adaptable_but_other_layers_are(tmp_path, prompts, caplog):
    model = save_tiny(hf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2), tmp_path / "model")
    files = {"one": make_adapter(model, tmp_path / "one", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])}
    check_model(tmp_path, model, files, prompts, caplog, "unmodified")


def test_incompatible_options_are_rejected(tiny):
    for options, reason in (
        ({"max_loras": 0}, "max_loras=0: must be"),
        ({"max_lora_rank": 513}, "max_lora_rank=513: must be"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras=3: must be at least max_loras=4"),
        ({"tensor_parallel_size": 2}, "enable_lora=true: not supported with tensor_parallel_size=2"),
    ):
        with pytest.raises(ConfigError, match=reason):
            tiny_assembly(tiny[0], **LORA | options)
