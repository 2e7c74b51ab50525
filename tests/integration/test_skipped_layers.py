"""Some layers keep keys and values in the type of the activations beside a KV cache in one byte."""

import pytest

from paged_backend.api.errors import ConfigError
from tests.support.in_process import running, tiny_assembly
from tests.support.tiny_family import TinyFamily

MAX_TOKENS = 8


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def family(request, tmp_path_factory):
    return TinyFamily.create(request.param, tmp_path_factory.mktemp("family"))


def outputs_of(assembly, prompts):
    with running(assembly) as engine:
        return engine.generate(prompts, max_tokens=MAX_TOKENS)


def test_skipped_layers_keep_their_type(family):
    """In part, with windows, and all of them, which leaves nothing quantized. The device pool has pages to spare."""
    plain = tiny_assembly(family.directory)
    count = len(plain.loaded.spec.layers)
    expected = outputs_of(plain, family.prompts)
    skipped = {"all": list(range(count)), "some": [0, str(count - 1)]}
    if family.name == "gemma3":
        skipped["windows"] = ["sliding_window"]
    for name, layers in skipped.items():
        assembly = tiny_assembly(family.directory, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=layers)
        formats = [cache.format for cache in assembly.runner.kv.layers]
        windows = [bool(layer.window) for layer in assembly.loaded.spec.layers]
        kept = windows if name == "windows" else [index in map(int, layers) for index in range(count)]
        assert formats == [None if keeps else "int8" for keeps in kept]
        outputs = outputs_of(assembly, family.prompts)
        assert all(len(output) == MAX_TOKENS for output in outputs)
        if name == "all":
            assert outputs == expected


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([0, 99], r"kv_cache_dtype_skip_layers=\[0, 99\]: 99: the model has the layers 0 to "),
        (["sliding_window"], r"sliding_window: the model has no layer with a window"),
    ],
)
def test_layers_that_the_model_lacks_are_rejected(layers, problem, tmp_path):
    family = TinyFamily.create("llama", tmp_path)
    with pytest.raises(ConfigError, match=problem):
        tiny_assembly(family.directory, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=layers)
