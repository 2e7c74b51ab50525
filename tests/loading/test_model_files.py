"""Broken, foreign and malicious model files fail the load with an error that names the file.

No code in them is executed, nothing is unpickled, and no memory is allocated for sizes that they only claim.
"""

import json
import math
import os
import pickle
import random
import shutil
import struct
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files import model_files
from paged_backend.loading import model_loader
from tests.support.families import COMMON
from tests.support.gguf import CONFIG, write_gguf
from tests.support.in_process import TINY, byte_tokenizer, save_tiny

CONFIG_JSON, GENERATION, TOKENIZER_JSON = "config.json", "generation_config.json", "tokenizer.json"
WEIGHTS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
SHARD = "model-00001-of-00001.safetensors"
TENSOR = "model.layers.0.self_attn.q_proj.weight"


def load(directory, **options):
    config = EngineConfig.from_options({"model": str(directory)} | TINY | options)
    return model_loader.load(config, Path(directory), torch.device("cpu")).model


def set_json(name, **values):
    """Return a change that sets fields of a JSON file; the value ... removes a field."""

    def change(directory):
        file = directory / name
        fields = (json.loads(file.read_text()) if file.exists() else {}) | values
        file.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))

    return change


def write(name, content):
    return lambda directory: (directory / name).write_bytes(content)


def truncate(name, keep):
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:keep])


def header(change):
    """Return a change of the header of the weights file. The tensors stay the same."""

    def rewrite(directory):
        data = (directory / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        fields = json.loads(data[8 : 8 + size])
        change(fields)
        new = json.dumps(fields).encode()
        (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])

    return rewrite


def tensor(**values):
    return header(lambda fields: fields[TENSOR].update(values))


def weights(change):
    def rewrite(directory):
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def index(change=lambda weight_map: None, **values):
    """Return a change that moves the weights into a shard with an index. `change` edits the index's weight map."""

    def rewrite(directory):
        weight_map = dict.fromkeys(load_file(directory / WEIGHTS), SHARD)
        (directory / WEIGHTS).rename(directory / SHARD)
        change(weight_map)
        written = {"metadata": {}, "weight_map": weight_map} | values
        (directory / INDEX).write_text(json.dumps(written))

    return rewrite


def replace(name, make):
    def change(directory):
        (directory / name).unlink()
        make(directory / name)

    return change


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, directory):
        self.path = directory / "ran"

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def malicious_pickle(name):
    return lambda directory: (directory / name).write_bytes(pickle.dumps(Payload(directory)))


def custom_code(directory):
    (directory / "own.py").write_text(f"import os\nos.mkdir({str(directory / 'ran')!r})\n")


def sequence(*changes):
    def change(directory):
        for step in changes:
            step(directory)

    return change


def drop(*names):
    return lambda directory: [(directory / name).unlink() for name in names]


def remap(name):
    return lambda weight_map: weight_map.update({TENSOR: name})


BROKEN = {
    # weights: the file itself
    "empty": (write(WEIGHTS, b""), WEIGHTS, "header too small"),
    "truncated in the header's length": (truncate(WEIGHTS, 7), WEIGHTS, "header too small"),
    "truncated in the header": (truncate(WEIGHTS, 500), WEIGHTS, "header"),
    "truncated in the tensors": (truncate(WEIGHTS, -1), WEIGHTS, "not fully covered"),
    "an extra byte": (lambda d: (d / WEIGHTS).open("ab").write(b"x"), WEIGHTS, "not fully covered"),
    "no header": (write(WEIGHTS, bytes(100)), WEIGHTS, "invalid JSON in header"),
    "a huge header": (write(WEIGHTS, b"\xff" * 100), WEIGHTS, "header too large"),
    "a NumPy file": (write(WEIGHTS, b"\x93NUMPY" * 20), WEIGHTS, "header"),
    "a directory": (replace(WEIGHTS, Path.mkdir), WEIGHTS, "not a regular file"),
    "a pipe": (replace(WEIGHTS, os.mkfifo), WEIGHTS, "not a regular file"),
    "a device": (replace(WEIGHTS, lambda p: p.symlink_to("/dev/zero")), WEIGHTS, "not a regular file"),
    "a dangling link": (replace(WEIGHTS, lambda p: p.symlink_to(p.with_name("nowhere"))), "", r"no weights: neither"),
    # weights: the header
    "offsets beyond the end": (tensor(data_offsets=[10**9, 10**9 + 16384]), WEIGHTS, "invalid offset"),
    "offsets of another tensor": (tensor(data_offsets=[0, 16384]), WEIGHTS, "invalid offset"),
    "negative offsets": (tensor(data_offsets=[-4, 16380]), WEIGHTS, "invalid value"),
    "a shape that overflows": (tensor(shape=[2**40, 2**40]), WEIGHTS, "overflow"),
    "a dtype of another size": (tensor(dtype="F16"), WEIGHTS, "invalid shape, data type"),
    "an unknown dtype": (tensor(dtype="Q9"), WEIGHTS, "unknown variant"),
    "an integer dtype": (tensor(dtype="I32"), WEIGHTS, f"{TENSOR}: has dtype I32"),
    "a TensorFlow file": (header(lambda h: h.update(__metadata__={"format": "tf"})), WEIGHTS, 'format="tf"'),
    # weights: the tensors
    "a tensor is missing": (weights(lambda w: w.pop(TENSOR)), WEIGHTS, f"{TENSOR} missing or not in the shape"),
    "a tensor of another shape": (
        weights(lambda w: w.update({TENSOR: torch.ones(3)})),
        WEIGHTS,
        f"{TENSOR} missing or not in the shape",
    ),
    "an extra tensor": (weights(lambda w: w.update(more=torch.ones(3))), WEIGHTS, "contains more, which the model"),
    "a boolean tensor": (weights(lambda w: w.update({TENSOR: w[TENSOR] > 0})), WEIGHTS, f"{TENSOR}: has dtype BOOL"),
    "NaN": (weights(lambda w: w[TENSOR].fill_(float("nan"))), "", f"{TENSOR} contains NaN"),
    "infinity": (weights(lambda w: w[TENSOR].fill_(float("inf"))), "", f"{TENSOR} contains NaN or infinity"),
    # weights: the index
    "the index is truncated": (sequence(index(), truncate(INDEX, 100)), INDEX, "not valid JSON"),
    "the index is a list": (sequence(index(), write(INDEX, b"[]")), INDEX, "must contain one JSON object"),
    "the index has no map": (index(weight_map={}), INDEX, "weight_map: must map"),
    "the index maps to numbers": (index(weight_map={TENSOR: 1}), INDEX, "weight_map: must map"),
    "the index has no metadata": (index(metadata=None), INDEX, "metadata: must be an object"),
    "a shard is missing": (index(remap("model-00002-of-00002.safetensors")), "model-00002", "no such file"),
    "a shard in the parent directory": (
        index(remap("../model.safetensors")),
        INDEX,
        "must be a file name without a directory",
    ),
    "a shard above the parent directory": (
        index(remap("../../x.safetensors")),
        INDEX,
        "must be a file name without a directory",
    ),
    "a shard at an absolute path": (index(remap("/x.safetensors")), INDEX, "must be a file name without a directory"),
    "a shard lacks a tensor": (index(lambda m: m.update(more=SHARD)), SHARD, f"more is in {INDEX} but not in"),
    "a shard has an extra tensor": (index(lambda m: m.pop(TENSOR)), SHARD, f"{TENSOR} is not in {INDEX}"),
    "a shard missing from the index": (
        sequence(index(), lambda d: shutil.copy(d / SHARD, d / "model-00002-of-00002.safetensors")),
        "model-00002-of-00002.safetensors",
        f"not in {INDEX}",
    ),
    # pickles
    "only a pickle": (sequence(drop(WEIGHTS), malicious_pickle(PICKLE)), "", f"{PICKLE} is a pickle file"),
    "a pickle beside other tensors": (
        sequence(lambda d: (d / WEIGHTS).rename(d / "x.safetensors"), malicious_pickle(PICKLE)),
        "",
        f"{PICKLE} is a pickle file",
    ),
    "a pickle as a shard": (
        sequence(index(remap(PICKLE)), malicious_pickle(PICKLE)),
        INDEX,
        f"{PICKLE}.*only read from \\.safetensors files",
    ),
    "a pickle named in config.json": (
        sequence(
            set_json(CONFIG_JSON, transformers_weights="adapter_model.bin"), malicious_pickle("adapter_model.bin")
        ),
        CONFIG_JSON,
        'transformers_weights="adapter_model.bin"',
    ),
    "a pickle named like a safetensors file": (malicious_pickle(WEIGHTS), WEIGHTS, "header"),
    "an adapter in place of a model": (
        sequence(set_json("adapter_config.json", peft_type="LORA"), malicious_pickle("adapter_model.bin")),
        "adapter_config.json",
        "multi_lora.json",
    ),
    # code
    "custom model code": (
        sequence(custom_code, set_json(CONFIG_JSON, model_type="own", auto_map={"AutoConfig": "own.C"})),
        CONFIG_JSON,
        "trust_remote_code",
    ),
    "custom model code on the hub": (
        set_json(CONFIG_JSON, model_type="own", auto_map={"AutoConfig": "own/er--own.C"}),
        CONFIG_JSON,
        "trust_remote_code",
    ),
    "custom tokenizer code": (
        sequence(
            custom_code,
            set_json("tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.T", "own.T"]}),
        ),
        "tokenizer_config.json",
        "trust_remote_code",
    ),
    # config.json
    "no config.json": (drop(CONFIG_JSON), CONFIG_JSON, "model_type"),
    "config.json is truncated": (truncate(CONFIG_JSON, 40), CONFIG_JSON, "not valid JSON"),
    "config.json is a list": (write(CONFIG_JSON, b"[]"), CONFIG_JSON, "must contain one JSON object"),
    "config.json is binary": (write(CONFIG_JSON, b"\xff\xfe\0"), CONFIG_JSON, "not valid JSON"),
    "config.json is deeply nested": (write(CONFIG_JSON, b"[" * 100_000), CONFIG_JSON, "recursion"),
    "no model type": (set_json(CONFIG_JSON, model_type=...), CONFIG_JSON, "model_type"),
    "an unknown model type": (set_json(CONFIG_JSON, model_type="nonsense"), CONFIG_JSON, "nonsense"),
    "an encoder": (set_json(CONFIG_JSON, model_type="bert"), CONFIG_JSON, 'model_type="bert": an encoder with a head'),
    "a number as a string": (set_json(CONFIG_JSON, num_hidden_layers="3"), CONFIG_JSON, "num_hidden_layers"),
    "an unknown activation": (set_json(CONFIG_JSON, hidden_act="nonsense"), CONFIG_JSON, "nonsense"),
    "an unknown model dtype": (set_json(CONFIG_JSON, dtype="nonsense"), CONFIG_JSON, "nonsense"),
    "an unknown quantization": (
        set_json(CONFIG_JSON, quantization_config={"quant_method": "nonsense"}),
        CONFIG_JSON,
        'quant_method="nonsense": unknown',
    ),
    "fewer layers than in the files": (
        set_json(CONFIG_JSON, num_hidden_layers=1),
        WEIGHTS,
        r"contains model\.layers\.1",
    ),
    "more layers than in the files": (
        set_json(CONFIG_JSON, num_hidden_layers=4),
        WEIGHTS,
        r"model\.layers\.3.* missing or not in the shape",
    ),
    "rope_theta of zero": (
        set_json(CONFIG_JSON, rope_parameters={"rope_type": "default", "rope_theta": 0}),
        CONFIG_JSON,
        "rope_theta=0: must be a positive number",
    ),
    "rope_theta of NaN": (
        set_json(CONFIG_JSON, rope_parameters={"rope_type": "default", "rope_theta": math.nan}),
        CONFIG_JSON,
        "rope_theta=NaN: must be a positive number",
    ),
    # generation_config.json
    "generation_config.json is truncated": (write(GENERATION, b"{"), GENERATION, "not valid JSON"),
    "an invalid EOS id": (set_json(GENERATION, eos_token_id="x"), GENERATION, 'eos_token_id="x"'),
    "an invalid EOS id in a list": (set_json(GENERATION, eos_token_id=[1, {}]), GENERATION, "eos_token_id={}"),
    # the tokenizer
    "no tokenizer": (drop(TOKENIZER_JSON, "tokenizer_config.json"), "", "tokenizer: no loadable tokenizer in"),
    "the tokenizer is truncated": (truncate(TOKENIZER_JSON, 500), TOKENIZER_JSON, "cannot be loaded"),
    "the tokenizer is empty": (write(TOKENIZER_JSON, b"{}"), TOKENIZER_JSON, "cannot be loaded"),
    "the tokenizer is deeply nested": (write(TOKENIZER_JSON, b"[" * 100_000), TOKENIZER_JSON, "recursion"),
    "the tokenizer config is truncated": (
        truncate("tokenizer_config.json", 9),
        "tokenizer_config.json",
        "not valid JSON",
    ),
    "the tokenizer class is not a name": (
        set_json("tokenizer_config.json", tokenizer_class=True),
        "tokenizer_config.json",
        "cannot",
    ),
    "the special tokens are truncated": (
        write("special_tokens_map.json", b'{"eos'),
        "special_tokens_map.json",
        "not valid",
    ),
    "the added tokens are a list": (write("added_tokens.json", b"[]"), "added_tokens.json", "one JSON object"),
    # the chat template
    "an invalid template": (write("chat_template.jinja", b"{% for m in"), "", "is not valid Jinja: line 1"),
    "a binary template": (write("chat_template.jinja", b"\xff\xfe"), "chat_template.jinja", "not UTF-8"),
    "an oversized template": (write("chat_template.jinja", bytes(2 << 20)), "chat_template.jinja", "at most 1048576"),
    "a template that is a number": (set_json("tokenizer_config.json", chat_template=5), "", "must be a text"),
}


@pytest.fixture
def model(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(("change", "file", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_file_fails_the_load_and_is_named(model, change, file, reason):
    change(model)
    with pytest.raises(ConfigError, match=f"(?s){file}.*{reason}") as caught:
        load(model)
    assert str(model) in str(caught.value)
    assert not (model / "ran").exists()


INVALID_SIZES = [
    *({"num_hidden_layers": value} for value in (0, -1, 10**9)),
    *({"num_attention_heads": value} for value in (0, -4)),
    *({"num_key_value_heads": value} for value in (0, -2, 10**9)),
    *({"head_dim": value} for value in (0, -2, 10**9)),
    *({"hidden_size": value} for value in (0, -64, 2**40)),
    *({"intermediate_size": value} for value in (0, 10**12)),
    *({"vocab_size": value} for value in (0, -1, 10**8, 10**12)),
    *({"max_position_embeddings": value} for value in (0, 1, -5, 10**12)),
]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("sizes", INVALID_SIZES, ids=str)
def test_invalid_sizes_are_rejected_before_allocation(model, monkeypatch, sizes, load_format):
    set_json(CONFIG_JSON, **sizes)(model)
    monkeypatch.setattr(model_loader, "load_weights", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=CONFIG_JSON):
        load(model, load_format=load_format)


def test_sizes_of_each_layer_are_checked(tmp_path):
    """In Gemma 4, heads of layers without a window have another size."""
    sizes = {"head_dim": 16, "global_head_dim": 32, "tie_word_embeddings": False, "hidden_size_per_layer_input": 0}
    layer_types = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(**COMMON | sizes | {"num_hidden_layers": 2}, layer_types=layer_types, sliding_window=7)
    save_tiny(config, tmp_path)
    assert [layer.self_attn.head_dim for layer in load(tmp_path).model.layers] == [16, 32]
    set_json(CONFIG_JSON, per_layer_config={"1": {"head_dim": 10**9}})(tmp_path)
    with pytest.raises(ConfigError, match=rf"{CONFIG_JSON}: head_dim=1000000000: must be 1\.\."):
        load(tmp_path)


@pytest.mark.parametrize(
    "values",
    [(None, -1, 10**18, "x", [10**9]), pytest.param((0, 7, 1e308, [], {}), marks=pytest.mark.nightly)],
    ids=str,
)
def test_any_value_in_config_json_loads_or_is_rejected(model, values):
    """Any other exception would lack the file name, or end the process."""
    given, outcomes = json.loads((model / CONFIG_JSON).read_text()), set()
    for field in given:
        for value in values:
            (model / CONFIG_JSON).write_text(json.dumps(given | {field: value}))
            try:
                outcomes.add(type(load(model, max_model_len=16)).__name__)
            except ConfigError:
                outcomes.add("rejected")
    assert outcomes == {"rejected", "LlamaForCausalLM"}


def test_oversized_text_file_is_not_read(model, monkeypatch):
    monkeypatch.setitem(model_files.MAX_BYTES, ".json", 5000)
    (model / TOKENIZER_JSON).write_bytes(b"[" * 5001)
    with pytest.raises(ConfigError, match=f"{TOKENIZER_JSON}: 5001 bytes; must be at most 5000"):
        load(model)


def test_remote_code_of_known_model_type_is_not_executed(model):
    custom_code(model)
    set_json(CONFIG_JSON, auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})(model)
    assert type(load(model)).__name__ == "LlamaForCausalLM"
    assert not (model / "ran").exists()


@pytest.mark.parametrize("layout", ["shards", "links", "with a pickle"])
def test_valid_files_load_in_any_layout(model, tmp_path_factory, layout):
    if layout == "shards":
        AutoModelForCausalLM.from_pretrained(model).save_pretrained(model, max_shard_size="200KB")
        (model / WEIGHTS).unlink()
        assert len(list(model.glob("model-*-of-*.safetensors"))) > 1
    elif layout == "links":  # as in the hub's cache
        blobs = tmp_path_factory.mktemp("blobs")
        for file in list(model.iterdir()):
            file.rename(blobs / file.name)
            file.symlink_to(blobs / file.name)
    else:
        malicious_pickle(PICKLE)(model)
    load(model)
    assert not (model / "ran").exists()


def damaged(whole, end, seed):
    """Return the bytes with one random defect in the first `end` bytes, or truncated anywhere."""
    rng = random.Random(seed)
    data, offset = bytearray(whole), rng.randrange(end)
    kind = rng.choice(("bit", "bytes", "cut", "more"))
    if kind == "bit":
        data[offset] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        data[offset : offset + 3] = rng.randbytes(3)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    else:
        data[offset:offset] = rng.randbytes(rng.randint(1, 8))
    return bytes(data)


def check_loads_equal_or_is_rejected(file, end, seeds, expected, model_path, **options):
    """Damage a file once per seed. Each load fails with an error that names the file, or gives the same weights."""
    whole, errors = file.read_bytes(), []
    for seed in seeds:
        file.write_bytes(damaged(whole, end, seed))
        try:
            found = load(model_path, **options).state_dict()
        except ConfigError as error:
            errors.append(str(error))
            continue
        assert found.keys() == expected.keys(), f"seed {seed}"
        assert all(torch.equal(found[name], expected[name]) for name in expected), f"seed {seed}"
    assert errors
    assert all(str(file.parent) in error for error in errors)


SEEDS = [range(15), pytest.param(range(15, 80), marks=pytest.mark.nightly)]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("name", [WEIGHTS, CONFIG_JSON, TOKENIZER_JSON, "tokenizer_config.json"])
def test_damaged_file_is_rejected_or_changes_no_weight(model, tiny, name, seeds):
    """Only the header of the weights is damaged: damage in a tensor's bytes cannot be detected."""
    whole = (model / name).read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0] if name == WEIGHTS else len(whole)
    check_loads_equal_or_is_rejected(model / name, end, seeds, tiny[1].state_dict(), model)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_damaged_gguf_is_rejected_or_changes_no_weight(tmp_path, seeds):
    file, tokenizer = tmp_path / "tiny.gguf", tmp_path / "tokenizer"
    write_gguf(file, save_tiny(CONFIG, tmp_path / "model"))
    byte_tokenizer().save_pretrained(tokenizer)
    state_dict = load(file, tokenizer=str(tokenizer)).state_dict()
    expected = {name: tensor.clone() for name, tensor in state_dict.items()}
    end = min(int(tensor.data_offset) for tensor in gguf.GGUFReader(file).tensors)
    check_loads_equal_or_is_rejected(file, end, seeds, expected, file, tokenizer=str(tokenizer))


@pytest.mark.parametrize("size", [0, 3, 100, -100])
def test_truncated_gguf_is_named(tmp_path, size):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, save_tiny(CONFIG, tmp_path / "model"))
    truncate("tiny.gguf", size)(tmp_path)
    with pytest.raises(ConfigError, match=rf"^{file}: is truncated, damaged or no GGUF file: ") as caught:
        load(file, tokenizer=str(tmp_path / "model"))
    assert CONFIG_JSON not in str(caught.value)


def test_nested_arrays_of_a_gguf_are_an_error(tmp_path):
    """Reading them one inside of the other would end with Python's limit of recursion."""
    file, nested = tmp_path / "nested.gguf", struct.pack("<IQ", 9, 1) * 5000
    file.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<I", 9) + nested)
    with pytest.raises(ConfigError, match=rf"^{file}: .*an array of the type 9: must be numbers or strings"):
        model_files.check_weights(file, quantized=False)


@pytest.mark.parametrize(("has_tensor", "reason"), [(True, ".*nonsense"), (False, "contains no tensors")])
def test_other_errors_of_a_gguf_do_not_name_config_json(tmp_path, has_tensor, reason):
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "nonsense")
    if has_tensor:
        writer.add_tensor("token_embd.weight", torch.ones(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/tiny\.gguf: {reason}") as caught:
        load(tmp_path / "tiny.gguf")
    assert CONFIG_JSON not in str(caught.value)
