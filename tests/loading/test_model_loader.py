"""What is loaded, what is refused, and by what name."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from paged_backend.api.config import ConfigError, EngineConfig
from paged_backend.loading import model_loader, model_options, model_source, proof
from paged_backend.memory import kv_cache
from paged_backend.memory.kv_cache import LayerShape
from paged_backend.models.attention import UnsupportedModel
from tests.support.families import COMMON, DYNAMIC, LONGROPE
from tests.support.in_process import byte_tokenizer, running, tiny_assembly


def save(config, directory):
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4), "0 of 2 layers call"),
        (
            hf.GPTNeoConfig(
                vocab_size=320,
                hidden_size=64,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                window_size=4,
                max_position_embeddings=256,
            ),
            "layers",
        ),
        (hf.StableLmConfig(**COMMON), "paged"),
        (hf.JambaConfig(**COMMON, use_mamba_kernels=False, mamba_d_state=4, num_experts=1), "layers call"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_that_cannot_be_paged_is_refused_by_name(tmp_path, config, reason):
    save(config, tmp_path)
    with pytest.raises(UnsupportedModel, match=f"ForCausalLM cannot be served through pages: .*{reason}"):
        tiny_assembly(tmp_path, max_model_len=64)


def test_a_wrong_answer_through_the_pages_is_refused(tiny, monkeypatch):
    """The proof itself: an attention function that is off by its scale must not pass."""
    from paged_backend.models import attention

    right = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *a, scale, **k: right(*a, scale=scale * 1.5, **k))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* logits at position"):
        tiny_assembly(tiny[0])


def test_a_window_that_only_the_mask_knows_is_refused(tmp_path, monkeypatch):
    """No short prompt can show a window of 4,096 tokens: the masks and the layers must agree on it."""
    save(hf.MistralConfig(**COMMON, sliding_window=64), tmp_path)
    tiny_assembly(tmp_path)
    recorded = proof._Probe.attend

    def forgetful(self, *args, sliding_window=None, **rest):
        return recorded(self, *args, **rest)

    monkeypatch.setattr(proof._Probe, "attend", forgetful)
    with pytest.raises(UnsupportedModel, match="windows 64, but its layers pass none"):
        tiny_assembly(tmp_path)


def test_dummy_weights_need_no_weight_file_and_follow_the_seed(tmp_path):
    LlamaConfig(**COMMON).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no weights: neither model\.safetensors"):
        tiny_assembly(tmp_path)

    def tokens(seed):
        with running(tiny_assembly(tmp_path, load_format="dummy", seed=seed)) as engine:
            return engine.generate([[1, 2, 3]], max_tokens=12)

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_a_missing_tokenizer_is_named(tmp_path):
    LlamaConfig(**COMMON).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"tokenizer: no loadable tokenizer in {tmp_path}"):
        tiny_assembly(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_model_len": 257}, "max_model_len=257: must be at most 256"),
        ({"max_model_len": 200, "num_gpu_blocks_override": 8}, "max_model_len=200: the key/value pool holds only 32"),
        ({"num_gpu_blocks_override": 2 * 10**12}, r"num_gpu_blocks_override=2000000000000: a pool of .* GiB"),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 10**15},
            "kv_cache_memory_bytes=1000000000000000: a",
        ),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes=100: one block"),
    ],
)
def test_an_option_that_the_model_or_the_memory_cannot_meet(tiny, options, reason):
    with pytest.raises(ConfigError, match=reason):
        tiny_assembly(tiny[0], **options)


@pytest.mark.parametrize("own", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_type_is_the_models_own_on_a_gpu_and_what_the_machine_multiplies_on_a_cpu(own, monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda answer=supported: answer)
        assert model_options.pick_dtype("auto", own, cpu) == expected
        assert model_options.pick_dtype("auto", own, cuda) == (own or torch.float32)
        assert model_options.pick_dtype("half", own, cpu) == torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tiny):
    with pytest.raises(ConfigError, match='device="cuda"'):
        tiny_assembly(tiny[0], device="cuda")


def test_the_pool_takes_the_byte_budget_and_not_a_byte_more(tiny):
    assembly = tiny_assembly(tiny[0], num_gpu_blocks_override=None, kv_cache_memory_bytes=100_000)
    layers = (LayerShape(num_kv_heads=2, head_dim=16),) * 3
    per_block = kv_cache.bytes_per_block(layers, 4, torch.float32)
    assert per_block == 3 * 2 * 2 * 16 * 4 * 4
    assert assembly.scheduler.blocks.num_blocks == 100_000 // per_block
    held = sum(tensor.nbytes for tensor in assembly.runner.kv.tensors)
    assert held == assembly.scheduler.blocks.num_blocks * per_block


def test_without_a_budget_the_pool_follows_the_memory_that_is_free(tiny, monkeypatch):
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 2_000_000)
    small = tiny_assembly(tiny[0], num_gpu_blocks_override=None).scheduler.blocks.num_blocks
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 4_000_000)
    large = tiny_assembly(tiny[0], num_gpu_blocks_override=None).scheduler.blocks.num_blocks
    assert (small, large) == (1_000_000 // 3072, 2_000_000 // 3072)


@pytest.mark.parametrize(
    ("rope_type", "config"),
    [
        ("longrope", hf.Phi3Config(**COMMON, original_max_position_embeddings=64, rope_parameters=dict(LONGROPE))),
        ("dynamic", hf.LlamaConfig(**COMMON | {"max_position_embeddings": 64}, rope_parameters=dict(DYNAMIC))),
    ],
)
def test_rotary_embeddings_that_change_with_length_are_kept_to_the_original_length(rope_type, config):
    """Of a longer sequence `generate` computes every position anew, or gives what depends on the rest of the batch."""
    assert model_options.pick_max_model_len(None, config) == 64
    with pytest.raises(ConfigError, match=f'max_model_len=65: must be at most 64, .* rope type "{rope_type}"'):
        model_options.pick_max_model_len(65, config)


def test_every_end_of_sequence_that_the_files_name_and_the_model_can_draw(tiny, tmp_path, caplog):
    _, model = tiny
    model.save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 320, -1]}))
    assert tiny_assembly(tmp_path).loaded.spec.eos_ids == {7, 9, tokenizer.eos_token_id}
    assert "eos_token_id: ignored [-1, 320]: must be within 0..319" in caplog.text


def test_a_relative_model_starts_at_the_repository_and_a_missing_one_is_named(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/config.json").write_text("{}")
    config = EngineConfig.from_options({"model": "here"})
    assert model_source.find_files(config.model, tmp_path, config) == tmp_path / "here"
    with pytest.raises(ConfigError, match=r'model="gone": no config\.json in'):
        model_source.find_files("gone", tmp_path, config)


def test_or_else_a_relative_model_starts_where_the_server_was_started(tmp_path, monkeypatch):
    """As in vLLM, whose users write `./weights/model`."""
    for place in ("root", "start"):
        (tmp_path / place / "both").mkdir(parents=True)
        (tmp_path / place / "both/config.json").write_text("{}")
    (tmp_path / "start/own").mkdir()
    (tmp_path / "start/own/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "start")
    config = EngineConfig.from_options({"model": "./own"})
    assert model_source.find_files("./own", tmp_path / "root", config) == tmp_path / "start/own"
    assert model_source.find_files("both", tmp_path / "root", config) == tmp_path / "root/both"


def test_a_name_on_the_hub_is_found_in_its_cache_and_a_missing_one_is_named(tmp_path, monkeypatch):
    """Tests have no network; what was fetched once is found without it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--model"
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    config = EngineConfig.from_options({"model": "owner/model"})
    assert model_source.find_files(config.model, tmp_path, config) == repository / "snapshots/abc"
    with pytest.raises(ConfigError, match='model="owner/other": neither a directory nor on the hub: '):
        model_source.find_files("owner/other", tmp_path, config)


def test_a_model_on_the_hub_comes_in_its_revision_and_from_its_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, revision in (("model", "v1"), ("tokenizer", "v2")):
        repository = tmp_path / f"models--owner--{name}"
        (repository / "snapshots/abc").mkdir(parents=True)
        (repository / "snapshots/abc/config.json").write_text(json.dumps({"model_type": "llama"}))
        (repository / "refs").mkdir()
        (repository / "refs" / revision).write_text("abc")
    options = {"model": "owner/model", "tokenizer": "owner/tokenizer", "download_dir": str(tmp_path), "revision": "v1"}
    config = EngineConfig.from_options(options)
    with pytest.raises(ConfigError, match='model="owner/tokenizer": neither'):  # which has no main branch
        model_loader.load(config, tmp_path, torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"tokenizer: no loadable tokenizer in {tmp_path}/models--owner--tokenizer"):
        model_loader.load(replace(config, tokenizer_revision="v2"), tmp_path, torch.device("cpu"))
    with pytest.raises(ConfigError, match='model="owner/model": neither'):
        model_loader.load(replace(config, revision="v3"), tmp_path, torch.device("cpu"))


def resave(tiny, directory, change):
    """The tiny model's files with other weights."""
    shutil.copytree(tiny[0], directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_are_missing_are_named_and_not_invented(tiny, tmp_path):
    resave(tiny, tmp_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight missing"):
        tiny_assembly(tmp_path)


def test_weights_of_another_shape_are_refused(tiny, tmp_path):
    resave(tiny, tmp_path, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight missing or not in the shape"):
        tiny_assembly(tmp_path)
