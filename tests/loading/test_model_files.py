"""Files of models that are broken, foreign or hostile: each stops the load with an error that names it, no code in it
runs, nothing is unpickled, and no memory is taken for what it only claims."""

import json
import math
import os
import pickle
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paged_backend.api.config import ConfigError, EngineConfig
from paged_backend.loading import model_files, model_loader
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
    """A change of a file: ... takes a field away."""

    def change(directory):
        file = directory / name
        now = (json.loads(file.read_text()) if file.exists() else {}) | values
        file.write_text(json.dumps({key: value for key, value in now.items() if value is not ...}))

    return change


def write(name, content):
    return lambda directory: (directory / name).write_bytes(content)


def cut(name, keep):
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:keep])


def head(change):
    """The header of the weights after `change`, and the tensors as they were."""

    def rewrite(directory):
        data = (directory / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        change(header)
        new = json.dumps(header).encode()
        (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])

    return rewrite


def tensor(**values):
    return head(lambda header: header[TENSOR].update(values))


def weights(change):
    def rewrite(directory):
        held = load_file(directory / WEIGHTS)
        change(held)
        save_file(held, directory / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def index(change=lambda places: None, **values):
    """The weights in a shard of an index that says where each tensor is."""

    def rewrite(directory):
        places = dict.fromkeys(load_file(directory / WEIGHTS), SHARD)
        (directory / WEIGHTS).rename(directory / SHARD)
        change(places)
        written = {"metadata": {}, "weight_map": places} | values
        (directory / INDEX).write_text(json.dumps(written))

    return rewrite


def instead(name, make):
    def change(directory):
        (directory / name).unlink()
        make(directory / name)

    return change


class Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, directory):
        self.place = directory / "ran"

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def hostile(name):
    return lambda directory: (directory / name).write_bytes(pickle.dumps(Touch(directory)))


def own_code(directory):
    (directory / "own.py").write_text(f"import os\nos.mkdir({str(directory / 'ran')!r})\n")


def both(*changes):
    def change(directory):
        for one in changes:
            one(directory)

    return change


def drop(*names):
    return lambda directory: [(directory / name).unlink() for name in names]


def remap(name):
    return lambda places: places.update({TENSOR: name})


BROKEN = {
    # weights: the file itself
    "empty": (write(WEIGHTS, b""), WEIGHTS, "header too small"),
    "cut in the header's length": (cut(WEIGHTS, 7), WEIGHTS, "header too small"),
    "cut in the header": (cut(WEIGHTS, 500), WEIGHTS, "header"),
    "cut in the tensors": (cut(WEIGHTS, -1), WEIGHTS, "not fully covered"),
    "a byte too many": (lambda d: (d / WEIGHTS).open("ab").write(b"x"), WEIGHTS, "not fully covered"),
    "no header": (write(WEIGHTS, bytes(100)), WEIGHTS, "invalid JSON in header"),
    "a huge header": (write(WEIGHTS, b"\xff" * 100), WEIGHTS, "header too large"),
    "another's file": (write(WEIGHTS, b"\x93NUMPY" * 20), WEIGHTS, "header"),
    "a directory": (instead(WEIGHTS, Path.mkdir), WEIGHTS, "not a regular file"),
    "a pipe": (instead(WEIGHTS, os.mkfifo), WEIGHTS, "not a regular file"),
    "a device": (instead(WEIGHTS, lambda p: p.symlink_to("/dev/zero")), WEIGHTS, "not a regular file"),
    "a link to nowhere": (instead(WEIGHTS, lambda p: p.symlink_to("/nowhere")), "", r"no weights: neither"),
    # weights: the header
    "offsets past the end": (tensor(data_offsets=[10**9, 10**9 + 16384]), WEIGHTS, "invalid offset"),
    "offsets of another": (tensor(data_offsets=[0, 16384]), WEIGHTS, "invalid offset"),
    "offsets below zero": (tensor(data_offsets=[-4, 16380]), WEIGHTS, "invalid value"),
    "a shape past all numbers": (tensor(shape=[2**40, 2**40]), WEIGHTS, "overflow"),
    "a type of another size": (tensor(dtype="F16"), WEIGHTS, "invalid shape, data type"),
    "a type that is none": (tensor(dtype="Q9"), WEIGHTS, "unknown variant"),
    "a type for whole numbers": (tensor(dtype="I32"), WEIGHTS, f"{TENSOR}: has dtype I32"),
    "TensorFlow's": (head(lambda h: h.update(__metadata__={"format": "tf"})), WEIGHTS, 'format="tf"'),
    # weights: what is in them
    "a tensor is missing": (weights(lambda w: w.pop(TENSOR)), WEIGHTS, f"{TENSOR} missing or not in the shape"),
    "a tensor of another shape": (
        weights(lambda w: w.update({TENSOR: torch.ones(3)})),
        WEIGHTS,
        f"{TENSOR} missing or not in the shape",
    ),
    "a tensor too many": (weights(lambda w: w.update(more=torch.ones(3))), WEIGHTS, "contains more, which the model"),
    "truth values": (weights(lambda w: w.update({TENSOR: w[TENSOR] > 0})), WEIGHTS, f"{TENSOR}: has dtype BOOL"),
    "NaN": (weights(lambda w: w[TENSOR].fill_(float("nan"))), "", f"{TENSOR} contains NaN"),
    "infinity": (weights(lambda w: w[TENSOR].fill_(float("inf"))), "", f"{TENSOR} contains NaN or infinity"),
    # weights: the index
    "the index is cut": (both(index(), cut(INDEX, 100)), INDEX, "not valid JSON"),
    "the index is a list": (both(index(), write(INDEX, b"[]")), INDEX, "must contain one JSON object"),
    "the index has no map": (index(weight_map={}), INDEX, "weight_map: must map"),
    "the index maps to numbers": (index(weight_map={TENSOR: 1}), INDEX, "weight_map: must map"),
    "the index has no metadata": (index(metadata=None), INDEX, "metadata: must be an object"),
    "a shard is missing": (index(remap("model-00002-of-00002.safetensors")), "model-00002", "no such file"),
    "a shard is above": (index(remap("../model.safetensors")), INDEX, "must be a file name without a directory"),
    "a shard is far above": (index(remap("../../x.safetensors")), INDEX, "must be a file name without a directory"),
    "a shard is anywhere": (index(remap("/x.safetensors")), INDEX, "must be a file name without a directory"),
    "a shard lacks a tensor": (index(lambda m: m.update(more=SHARD)), SHARD, f"more is in {INDEX} but not in"),
    "a shard has one too many": (index(lambda m: m.pop(TENSOR)), SHARD, f"{TENSOR} is not in {INDEX}"),
    "a shard nobody knows": (
        both(index(), lambda d: shutil.copy(d / SHARD, d / "model-00002-of-00002.safetensors")),
        "model-00002-of-00002.safetensors",
        f"not in {INDEX}",
    ),
    # pickles
    "a pickle alone": (both(drop(WEIGHTS), hostile(PICKLE)), "", f"{PICKLE} is a pickle file"),
    "a pickle beside other tensors": (
        both(lambda d: (d / WEIGHTS).rename(d / "x.safetensors"), hostile(PICKLE)),
        "",
        f"{PICKLE} is a pickle file",
    ),
    "a pickle as a shard": (
        both(index(remap(PICKLE)), hostile(PICKLE)),
        INDEX,
        f"{PICKLE}.*only read from \\.safetensors files",
    ),
    "a pickle by name": (
        both(set_json(CONFIG_JSON, transformers_weights="adapter_model.bin"), hostile("adapter_model.bin")),
        CONFIG_JSON,
        'transformers_weights="adapter_model.bin"',
    ),
    "a pickle in safetensors' place": (hostile(WEIGHTS), WEIGHTS, "header"),
    "an adapter in the model's place": (
        both(set_json("adapter_config.json", peft_type="LORA"), hostile("adapter_model.bin")),
        "adapter_config.json",
        "multi_lora.json",
    ),
    # code
    "a model of its own": (
        both(own_code, set_json(CONFIG_JSON, model_type="own", auto_map={"AutoConfig": "own.C"})),
        CONFIG_JSON,
        "trust_remote_code",
    ),
    "a model of the hub's": (
        set_json(CONFIG_JSON, model_type="own", auto_map={"AutoConfig": "own/er--own.C"}),
        CONFIG_JSON,
        "trust_remote_code",
    ),
    "a tokenizer of its own": (
        both(
            own_code,
            set_json("tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.T", "own.T"]}),
        ),
        "tokenizer_config.json",
        "trust_remote_code",
    ),
    # config.json
    "no config.json": (drop(CONFIG_JSON), CONFIG_JSON, "model_type"),
    "config.json is cut": (cut(CONFIG_JSON, 40), CONFIG_JSON, "not valid JSON"),
    "config.json is a list": (write(CONFIG_JSON, b"[]"), CONFIG_JSON, "must contain one JSON object"),
    "config.json is no text": (write(CONFIG_JSON, b"\xff\xfe\0"), CONFIG_JSON, "not valid JSON"),
    "config.json is deep": (write(CONFIG_JSON, b"[" * 100_000), CONFIG_JSON, "recursion"),
    "no model type": (set_json(CONFIG_JSON, model_type=...), CONFIG_JSON, "model_type"),
    "an unknown model type": (set_json(CONFIG_JSON, model_type="nonsense"), CONFIG_JSON, "nonsense"),
    "an encoder": (set_json(CONFIG_JSON, model_type="bert"), WEIGHTS, "bert.* missing or not in the shape"),
    "a number as text": (set_json(CONFIG_JSON, num_hidden_layers="3"), CONFIG_JSON, "num_hidden_layers"),
    "an unknown activation": (set_json(CONFIG_JSON, hidden_act="nonsense"), CONFIG_JSON, "nonsense"),
    "an unknown type": (set_json(CONFIG_JSON, dtype="nonsense"), CONFIG_JSON, "nonsense"),
    "an unknown quantization": (
        set_json(CONFIG_JSON, quantization_config={"quant_method": "nonsense"}),
        CONFIG_JSON,
        'quant_method="nonsense": unknown',
    ),
    "fewer layers than there are": (set_json(CONFIG_JSON, num_hidden_layers=1), WEIGHTS, r"contains model\.layers\.1"),
    "more layers than there are": (
        set_json(CONFIG_JSON, num_hidden_layers=4),
        WEIGHTS,
        r"model\.layers\.3.* missing or not in the shape",
    ),
    "angles without a base": (
        set_json(CONFIG_JSON, rope_parameters={"rope_type": "default", "rope_theta": 0}),
        CONFIG_JSON,
        "rope_theta=0: must be a positive number",
    ),
    "angles of no number": (
        set_json(CONFIG_JSON, rope_parameters={"rope_type": "default", "rope_theta": math.nan}),
        CONFIG_JSON,
        "rope_theta=NaN: must be a positive number",
    ),
    # generation_config.json
    "generation_config.json is cut": (write(GENERATION, b"{"), GENERATION, "not valid JSON"),
    "an end that is no token": (set_json(GENERATION, eos_token_id="x"), GENERATION, 'eos_token_id="x"'),
    "an end among ends that is none": (set_json(GENERATION, eos_token_id=[1, {}]), GENERATION, "eos_token_id={}"),
    # the tokenizer
    "no tokenizer": (drop(TOKENIZER_JSON, "tokenizer_config.json"), "", "tokenizer: no loadable tokenizer in"),
    "the tokenizer is cut": (cut(TOKENIZER_JSON, 500), TOKENIZER_JSON, "cannot be loaded"),
    "the tokenizer is empty": (write(TOKENIZER_JSON, b"{}"), TOKENIZER_JSON, "cannot be loaded"),
    "the tokenizer is deep": (write(TOKENIZER_JSON, b"[" * 100_000), TOKENIZER_JSON, "recursion"),
    "the tokenizer's settings are cut": (cut("tokenizer_config.json", 9), "tokenizer_config.json", "not valid JSON"),
    "its class is no name": (
        set_json("tokenizer_config.json", tokenizer_class=True),
        "tokenizer_config.json",
        "cannot",
    ),
    "its special tokens are cut": (write("special_tokens_map.json", b'{"eos'), "special_tokens_map.json", "not valid"),
    "its added tokens are a list": (write("added_tokens.json", b"[]"), "added_tokens.json", "one JSON object"),
    # the chat template
    "a template that is none": (write("chat_template.jinja", b"{% for m in"), "", "is not valid Jinja: line 1"),
    "a template that is no text": (write("chat_template.jinja", b"\xff\xfe"), "chat_template.jinja", "not UTF-8"),
    "a template too large": (write("chat_template.jinja", bytes(2 << 20)), "chat_template.jinja", "at most 1048576"),
    "a template that is a number": (set_json("tokenizer_config.json", chat_template=5), "", "must be a text"),
}


@pytest.fixture
def model(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(("change", "file", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_stops_the_load_and_is_named(model, change, file, reason):
    change(model)
    with pytest.raises(ConfigError, match=f"(?s){file}.*{reason}") as caught:
        load(model)
    assert str(model) in str(caught.value)
    assert not (model / "ran").exists()


ABSURD = [
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
@pytest.mark.parametrize("numbers", ABSURD, ids=str)
def test_numbers_that_cannot_be_are_refused_before_memory_is_taken(model, monkeypatch, numbers, load_format):
    set_json(CONFIG_JSON, **numbers)(model)
    monkeypatch.setattr(model_loader, "load_weights", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=CONFIG_JSON):
        load(model, load_format=load_format)


def test_any_value_in_config_json_is_refused_or_loads(model):
    """What is no ConfigError would be told without a file's name, or end the process."""
    given, outcomes = json.loads((model / CONFIG_JSON).read_text()), set()
    for field in given:
        for value in (None, -1, 0, 7, 1e308, 10**18, "x", [], [10**9], {}):
            (model / CONFIG_JSON).write_text(json.dumps(given | {field: value}))
            try:
                outcomes.add(type(load(model, max_model_len=16)).__name__)
            except ConfigError:
                outcomes.add("refused")
    assert outcomes == {"refused", "LlamaForCausalLM"}


def test_a_text_too_large_is_not_read(model, monkeypatch):
    monkeypatch.setitem(model_files.MAX_BYTES, ".json", 5000)
    (model / TOKENIZER_JSON).write_bytes(b"[" * 5001)
    with pytest.raises(ConfigError, match=f"{TOKENIZER_JSON}: 5001 bytes; must be at most 5000"):
        load(model)


def test_code_of_a_known_model_is_left_alone_and_its_weights_served(model):
    own_code(model)
    set_json(CONFIG_JSON, auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})(model)
    assert type(load(model)).__name__ == "LlamaForCausalLM"
    assert not (model / "ran").exists()


@pytest.mark.parametrize("layout", ["shards", "links", "a pickle beside them"])
def test_whole_files_load_in_any_layout(model, tmp_path_factory, layout):
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
        hostile(PICKLE)(model)
    load(model)
    assert not (model / "ran").exists()


def damaged(whole, end, seed):
    """Bytes with one thing wrong in the first `end`, or cut anywhere."""
    draw = random.Random(seed)
    data, place = bytearray(whole), draw.randrange(end)
    kind = draw.choice(("bit", "bytes", "cut", "more"))
    if kind == "bit":
        data[place] ^= 1 << draw.randrange(8)
    elif kind == "bytes":
        data[place : place + 3] = draw.randbytes(3)
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    else:
        data[place:place] = draw.randbytes(draw.randint(1, 8))
    return bytes(data)


def loads_the_same_or_is_refused(file, end, seeds, right, place, **options):
    whole, refusals = file.read_bytes(), []
    for seed in seeds:
        file.write_bytes(damaged(whole, end, seed))
        try:
            found = load(place, **options).state_dict()
        except ConfigError as error:
            refusals.append(str(error))
            continue
        assert found.keys() == right.keys(), f"seed {seed}"
        assert all(torch.equal(found[name], right[name]) for name in right), f"seed {seed}"
    assert refusals
    assert all(str(file.parent) in text for text in refusals)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG_JSON, TOKENIZER_JSON, "tokenizer_config.json"])
def test_damage_anywhere_is_refused_or_changes_no_weight(model, tiny, name):
    """Seeded. Of the weights the header: nothing tells a tensor's bytes from other ones."""
    whole = (model / name).read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0] if name == WEIGHTS else len(whole)
    loads_the_same_or_is_refused(model / name, end, range(60), tiny[1].state_dict(), model)


def test_a_damaged_gguf_is_refused_or_changes_no_weight(tmp_path):
    from gguf import GGUFReader

    file, tokenizer = tmp_path / "tiny.gguf", tmp_path / "tokenizer"
    write_gguf(file, save_tiny(CONFIG, tmp_path / "model"))
    byte_tokenizer().save_pretrained(tokenizer)
    right = {name: one.clone() for name, one in load(file, tokenizer=str(tokenizer)).state_dict().items()}
    end = min(int(one.data_offset) for one in GGUFReader(file).tensors)
    loads_the_same_or_is_refused(file, end, range(80), right, file, tokenizer=str(tokenizer))
