"""Mistakes that show before weights are read, and the messages that name them.

The model's files have a header and no weights, so a check that read them would fail in another way.
"""

import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files import start_checks
from paged_backend.files.start_checks import check_start, remote_cache_problem

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIELDS = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "hidden_size": 576,
    "max_position_embeddings": 256,
}
BLOCK = 16 * 2 * 2 * 3 * 64 * 2  # bytes: tokens, keys and values, layers, heads, elements, bytes of an element


def write_weights(file, name="w", shape=(1 << 20,), *, keep=None):
    """Write a header for one tensor of bytes, and a hole of `keep` bytes, by default the tensor's."""
    nbytes = math.prod(shape)
    keep = nbytes if keep is None else keep
    header = json.dumps({name: {"dtype": "F8_E5M2", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + keep)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(FIELDS))
    (directory / "tokenizer.json").write_text('{"model": {}}')
    write_weights(directory / WEIGHTS)
    return directory


def check(model, **options):
    check_start(EngineConfig.from_options({"model": str(model), "device": "cpu"} | options))


def test_a_model_without_mistakes_passes(model, tmp_path):
    options = {"swap_space": "1MB", "disk_cache_dir": str(tmp_path / "cache"), "disk_cache_gib": "1MB"}
    check(model, max_model_len=256, tensor_parallel_size=1, kv_cache_memory_bytes="1MiB", **options)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_pools_for_blocks_in_four_bits(model):
    """With `auto` a block has 32 tokens. A long sequence needs fewer pages for each than a first block."""
    check(model, kv_cache_dtype="int4", block_size="auto")
    check(model, kv_cache_dtype="int4", block_size="auto", num_gpu_blocks_override=3, max_model_len=110)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_cache_memory_bytes": "1000TiB"}, "kv_cache_memory_bytes=1099511627776000: a pool of 1024000.0 GiB; must"),
        ({"swap_space": 500000}, "swap_space=500000: must fit into the .* GiB that are free"),
        ({"max_model_len": 257}, "max_model_len=257: must be at most 256, the model's own limit"),
        ({"tensor_parallel_size": 7}, "tensor_parallel_size=7: must divide 9, the model's num_attention_heads"),
        ({"tensor_parallel_size": 9}, "tensor_parallel_size=9: must divide 3, the model's num_key_value_heads"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3: must be at most 2, the model's num_hidden_layers"),
        (
            {"kv_cache_memory_bytes": BLOCK - 1},
            f"kv_cache_memory_bytes={BLOCK - 1}: one block of 16 tokens takes",
        ),
        ({"kv_cache_memory_bytes": "10KB", "kv_cache_dtype": "int8"}, "kv_cache_memory_bytes=10000: one block of 16"),
        (
            {"kv_cache_memory_bytes": BLOCK, "max_model_len": 17},
            "max_model_len=17: the KV cache holds at most 16 ",
        ),
        (
            {"num_gpu_blocks_override": 3, "max_model_len": 49},
            r"max_model_len=49: .* at most 48 tokens \(3 blocks",
        ),
        ({"disk_cache_dir": "/nowhere/x"}, 'disk_cache_dir="/nowhere/x": needs a host pool; set swap_space as well'),
        ({"remote_cache_url": "redis://h"}, "remote_cache_url=.*: needs a host pool; set swap_space as well"),
        ({"disk_cache_dir": "/proc/x", "swap_space": "1MB"}, 'disk_cache_dir="/proc/x": cannot be written to: '),
        ({"disk_cache_dir": sys.executable, "swap_space": "1MB"}, "disk_cache_dir=.*: is not a directory"),
        ({"chat_template": "x.jinja"}, 'chat_template="x.jinja": neither a template, which contains {, nor a file in'),
        ({"chat_template": sys.executable}, "chat_template=.*: cannot be read: "),
        ({"chat_template": "{% for %}"}, "chat_template: is not valid Jinja: line 1: "),
        ({"tokenizer": "/dev"}, "/dev: no tokenizer: neither "),
        ({"generation_config": "/dev"}, 'generation_config="/dev": no generation_config.json in /dev; give "auto"'),
    ],
)
def test_option_is_named(model, options, reason):
    with pytest.raises(ConfigError, match=f"^{reason}"):
        check(model, **options)


def test_smallest_pools_pass(model):
    check(model, kv_cache_memory_bytes=BLOCK, max_model_len=16)
    check(model, num_gpu_blocks_override=3, max_model_len=48)
    set_fields(model, model_type="mistral")  # which may have sliding windows
    check(model, kv_cache_memory_bytes=1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3: must be at most 2, the number of visible GPUs"),
        ({"data_parallel_size": 3}, "data_parallel_size=3: needs 3 GPUs, 1 for each engine; 2 are visible"),
    ],
)
def test_too_few_gpus_are_named(model, options, reason, monkeypatch):
    """The number of machines may come from the environment, which the server may not share."""
    monkeypatch.setattr(start_checks, "has_gpu", lambda: True)
    monkeypatch.setattr(start_checks, "gpu_limit", lambda: 2)
    with pytest.raises(ConfigError, match=f"^{reason}"):
        check(model, device="auto", **options)
    monkeypatch.setenv("NNODES", "2")
    check(model, device="auto", **options)


def set_fields(model, **fields):
    (model / "config.json").write_text(json.dumps(FIELDS | fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quant_method": "gptq", "bits": 3}, r"quantization_config\.bits=3: must be 4, 8 on a CPU"),
        ({"quant_method": "awq", "bits": [4]}, r"quantization_config\.bits=\[4\]: must be 4 on a CPU"),
        ({"quant_method": ["awq"]}, "quantization_config is invalid"),
        ({"quant_method": "nonsense"}, r'quantization_config\.quant_method="nonsense": unknown'),
        ({}, r"quantization_config\.quant_method=null: unknown"),
        ("awq", 'quantization_config="awq": must be an object'),
        (
            {"quant_method": "aqlm"},
            r'quantization_config\.quant_method="aqlm": requires the package aqlm, which is',
        ),
    ],
)
def test_setting_of_quantized_weights_is_named(model, fields, reason):
    set_fields(model, quantization_config=fields)
    with pytest.raises(ConfigError, match=f"^{model}/config.json: {reason}"):
        check(model)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_encoder_decoder": True}, 'model_type="llama": an encoder-decoder model'),
        ({"architectures": ["XForTokenClassification"]}, r"architectures=\[.*\], .*: token classification is not supp"),
        ({"model_type": "lama"}, r'model_type="lama": transformers .* has no such type; did you mean "llama"'),
        ({"architectures": "LlamaForCausalLM"}, "architectures=.*: architectures must be a list of names"),
        ({"model_type": None}, 'model_type=null: must be the name of a type, such as "llama"'),
        (
            {"model_type": "vit", "architectures": ["ViTModel"]},
            r'architectures=\["ViTModel"\], model_type="vit": transformers has no decoder of text for this type',
        ),
        (
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
            'architectures=.*, model_type="bert": an encoder with a head; only sentence encoders',
        ),
        ({"model_type": "bart"}, 'model_type="bart": an encoder-decoder model'),  # as its configuration's class says
    ],
)
def test_kind_of_model_is_named(model, fields, reason):
    set_fields(model, **fields)
    with pytest.raises(ConfigError, match=f"^{model}/config.json: {reason}"):
        check(model)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be 1..1024"),
        ({"hidden_size": -1}, r"hidden_size=-1: must be 1\.\."),
        ({"text_config": FIELDS | {"head_dim": 0}}, "head_dim=0: must be 1"),
        ({"max_position_embeddings": 1}, "max_position_embeddings=1: must be 2"),
        ({"hidden_act": "silo"}, 'hidden_act="silo": must be one of .*, silu, '),
        ({"dtype": "floaty"}, 'dtype="floaty": must be the name of a data type of torch, such as "bfloat16"'),
        (
            {"model_type": "mine", "auto_map": {}},
            'model_type="mine": needs Python code of its own; set trust_remote_co',
        ),
    ],
)
def test_values_that_no_model_has_are_named(model, fields, reason):
    set_fields(model, **fields)
    with pytest.raises(ConfigError, match=f"^{model}/config.json: {reason}"):
        check(model)


def test_sentence_encoders_may_have_names_of_other_models(model):
    set_fields(model, model_type="mpnet", architectures=["MPNetForMaskedLM"])
    (model / "modules.json").write_text("[]")
    check(model)


def test_decoders_of_types_that_have_encoders_pass(model):
    set_fields(model, model_type="bert", is_decoder=True, architectures=["BertLMHeadModel"])
    check(model)


def test_draft_model_is_checked_and_named(model, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(model, draft)
    set_fields(draft, model_type="vit")
    options = {"speculative_model": str(draft), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=f'^speculative_model="{draft}": {draft}/config.json: model_type="vit": '):
        check(model, **options)
    set_fields(model, vocab_size=320)
    set_fields(draft, vocab_size=300)
    with pytest.raises(ConfigError, match=f'^speculative_model="{draft}": has 300 tokens; must have the model.s 320$'):
        check(model, **options)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma3_text"},
        {"model_type": "gpt-sw3"},
        {"model_type": "mine", "auto_map": {}, "quantization_config": {"quant_method": "mine"}},
    ],
)
def test_models_that_only_transformers_can_judge_pass(model, fields):
    """Types without a directory of their own in transformers, and one whose code is in the model's directory."""
    set_fields(model, **fields)
    check(model, trust_remote_code=True)


def index(**places):
    return lambda model: (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def remove(*names):
    return lambda model: [(model / name).unlink() for name in names]


def write(name, text):
    return lambda model: (model / name).write_text(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([remove("config.json")], "no config.json in {model}; give a Hugging Face model directory"),
        ([write("config.json", "{nope")], "{model}/config.json: not valid JSON"),
        (
            [write("generation_config.json", '{"temperature": "hot"}')],
            '{model}/generation_config.json: temperature="hot": must be a number; correct it, or',
        ),
        ([remove("tokenizer.json")], "{model}: no tokenizer: neither tokenizer.json nor a vocabulary"),
        (
            [remove("tokenizer.json"), write("tokenizer_config.json", "{}")],
            "{model}: no tokenizer: neither tokenizer.json",
        ),
        (
            [write("tokenizer.json", "{}")],
            "{model}/tokenizer.json: has 2 bytes and is no JSON object",
        ),
        ([write("tokenizer.json", "")], "{model}/tokenizer.json: has 0 bytes"),
        (
            [write("tokenizer.json", '{"model": {"vocab": "' + 100 * "a")],
            "{model}/tokenizer.json: is truncated or ",
        ),
        (
            [write("chat_template.jinja", "\n{{ messages | }}")],
            "{model}: the chat template is not valid Jinja: line 2: ",
        ),
        (
            [write("tokenizer_config.json", '{"chat_template": [{"name": "a", "template": "{% fi %}"}]}')],
            "{model}: the chat template is not valid Jinja: line 1: ",
        ),
        (
            [lambda model: write_weights(model / WEIGHTS, "model.layers.0.self_attn.q_proj.weight", (512, 576))],
            r"{model}/{WEIGHTS}: model.layers.0.self_attn.q_proj.weight: has shape \[512, 576\]; the sizes in "
            r"{model}/config.json imply \[576, 576\]",
        ),
        (
            [lambda model: write_weights(model / WEIGHTS, "model.layers.2.mlp.up_proj.weight", (6, 576))],
            r"{model}/config.json: num_hidden_layers=2: the weights have 3 layers",
        ),
        (
            [lambda model: write_weights(model / WEIGHTS, keep=9)],
            "{model}/model.safetensors: is truncated or damaged; copy it again: .*file not fully covered",
        ),
        ([remove(WEIGHTS)], "{model}: no weights: neither model.safetensors nor model.safetensors.index.json exists"),
        ([remove(WEIGHTS), write("pytorch_model.bin", "x")], "{model}: no weights: .* pickle file"),
        ([remove(WEIGHTS), index(w="a.safetensors")], "{model}/a.safetensors: no such file"),
    ],
)
def test_file_is_named(model, changes, reason):
    for change in changes:
        change(model)
    with pytest.raises(ConfigError, match=reason.format(model=model, WEIGHTS=WEIGHTS)):
        check(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: set_tokenizer(model, {"tokenizer_class": "ByT5Tokenizer"}),
        lambda model: set_tokenizer(model, {}, "spiece.model"),
        lambda model: set_tokenizer(model, {}, "vocab.json"),
        write("chat_template.jinja", "{% generation %}{% for m in x %}{% break %}{% endfor %}{% endgeneration %}"),
        lambda model: write_weights(model / WEIGHTS, "model.layers.1.self_attn.k_proj.weight", (192, 576)),
    ],
)
def test_ordinary_files_pass(model, change):
    change(model)
    check(model)


def set_tokenizer(model, settings, *names):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in names:
        (model / name).write_text("")


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The cache of the hub, with the config.json of owner/model, on a machine without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--model"
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots/abc/config.json").write_text(json.dumps(FIELDS))
    return repository / "snapshots/abc"


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({}, {"model": "owner/other"}, 'model="owner/other": .* the hub cannot be reached: '),
        ({}, {"speculative_model": "owner/draft"}, 'speculative_model="owner/draft": .* the hub cannot be reached: '),
        ({}, {"tokenizer": "owner/other"}, 'tokenizer="owner/other": .* the hub cannot be reached: '),
        ({"model_type": "vit"}, {}, '{path}/config.json: model_type="vit": '),
        ({}, {"max_model_len": 257}, "max_model_len=257: must be at most 256"),
    ],
)
def test_repository_of_the_hub_is_named(cached, fields, options, reason, tmp_path):
    check("owner/model", download_dir=str(tmp_path))
    (cached / "config.json").write_text(json.dumps(FIELDS | fields))
    draft = {"num_speculative_tokens": 2} if "speculative_model" in options else {}
    with pytest.raises(ConfigError, match=f"^{reason.format(path=cached)}"):
        check(options.pop("model", "owner/model"), download_dir=str(tmp_path), **draft, **options)


def test_quantization_of_quantized_weights_is_named(tmp_path):
    name, file = b"output.weight", tmp_path / "model.gguf"
    info = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 32, 8, 0)  # one block of Q8_0: 34 bytes
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
    file.write_bytes(head + bytes(-len(head) % 32 + 34))
    check(file)
    with pytest.raises(ConfigError, match=r'^quantization="int8": the model.s weights are quantized already; leave it'):
        check(file, quantization="int8")


def test_truncated_gguf_is_named(tmp_path):
    """The header has a tensor of 4,096 bytes, the file 100 of them."""
    name, file = b"output.weight", tmp_path / "model.gguf"
    info = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 1024, 0, 0)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info + bytes(100))
    with pytest.raises(
        ConfigError, match=rf"^{file}: is truncated, .*: output\.weight ends at byte .*, the file at 169"
    ):
        check(file)


def test_disk_cache_larger_than_the_free_space_is_named(model, tmp_path, monkeypatch):
    """The cache's own files count as free: they are within the limit."""
    cache = tmp_path / "cache" / "fingerprint" / "ab"
    cache.mkdir(parents=True)
    (cache / "block").write_bytes(bytes(2 << 20))
    monkeypatch.setattr(start_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    options = {"disk_cache_dir": str(tmp_path / "cache"), "swap_space": "1MB"}
    check(model, disk_cache_gib="5MiB", **options)
    with pytest.raises(ConfigError, match=r"^disk_cache_gib=.*: .* has room for 5\.0 MiB; lower it"):
        check(model, disk_cache_gib="6MiB", **options)


def test_remote_cache_that_cannot_be_reached_is_named():
    """It does not end a start: the server tries again."""
    options = {"model": "m", "remote_cache_url": "redis://user:secret@127.0.0.1:1/0", "swap_space": 1}
    problem = remote_cache_problem(EngineConfig.from_options(options))
    assert problem.startswith("remote_cache_url: redis://127.0.0.1:1/0: ")
    assert "secret" not in problem


def test_cache_that_cannot_be_written_names_its_variable(monkeypatch):
    from paged_client.serving import server_files

    monkeypatch.setattr(server_files, "cache_directory", lambda: Path("/proc/x"))
    with pytest.raises(OSError, match=r"^/proc/x: cannot be written to: .*; PAGED_CACHE_DIR names another directory$"):
        server_files.create_atomically(Path("/proc/x/server"), lambda made: None)


def test_checks_import_no_torch():
    """Its import takes longer than all checks."""
    code = "import sys, paged_backend.files.start_checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_paged_serve_checks_before_it_starts_a_server(model, monkeypatch, capsys, tmp_path):
    from paged_client.cli import main
    from paged_client.serving import launch

    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "serve", None)
    assert main(["serve", str(model), "--device=cpu", "--max-model-len", "257"]) == 2
    assert "--max-model-len=257: must be at most 256" in capsys.readouterr().err
    shutil.rmtree(model)
    assert main(["serve", str(model)]) == 2
    assert f"paged serve: MODEL='{model}': must be 'demo', a directory" in capsys.readouterr().err
    model.mkdir()
    assert main(["plan", str(model)]) == 2
    assert f'paged plan: model="{model}": no config.json in {model}' in capsys.readouterr().err
    assert main(["serve", str(model)]) == 2
    assert f'paged serve: MODEL="{model}": no config.json in {model}' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (remove("config.json"), 'model="{model}": no config.json in {model}; give'),
        (write("config.json", "{nope"), "{model}/config.json: not valid JSON: "),
        (lambda model: write_weights(model / WEIGHTS, keep=9), "{model}/model.safetensors: "),
        (lambda model: set_fields(model, quantization_config={}), "{model}/config.json: quantization_config.quant_met"),
        (lambda model: set_fields(model, model_type="vit"), '{model}/config.json: model_type="vit": '),
    ],
)
def test_paged_plan_checks_before_it_imports_torch(model, change, reason, monkeypatch, capsys):
    """What only excludes this machine, such as a missing tokenizer, does not matter."""
    from paged_client.cli import main
    from paged_client.commands import plan

    planned = []
    monkeypatch.setattr(plan.os, "execve", lambda *arguments: planned.append(arguments))
    (model / "tokenizer.json").unlink()
    main(["plan", str(model), "--swap-space", "500000"])
    assert len(planned) == 1
    change(model)
    assert main(["plan", str(model)]) == 2
    assert f"paged plan: {reason.format(model=model)}" in capsys.readouterr().err
    assert len(planned) == 1
