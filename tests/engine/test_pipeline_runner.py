"""Pipeline parallelism: stages generate the same tokens as one process, with steps of several requests in flight."""

import pytest
import torch
import transformers as hf

from paged_backend.api.errors import ConfigError
from paged_backend.engine.outputs import EngineDied
from tests.support.beams import beams
from tests.support.in_process import WAIT, running, save_tiny, tiny_assembly

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with GPUs the ranks would use them")

OPTIONS = {"num_gpu_blocks_override": 24}
COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [list(range(1, 30)), [5, 6, 7], list(range(40, 57)), [8]]
SIZES = [(1, 2), (1, 3), (2, 2)]  # tensor_parallel_size, pipeline_parallel_size


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with tied embeddings, which the first and the last stage have."""
    directory = tmp_path_factory.mktemp("stages")
    save_tiny(hf.Qwen2Config(**COMMON, tie_word_embeddings=True), directory)
    return directory


@pytest.fixture(scope="module")
def alone(directory):
    return tiny_assembly(directory, **OPTIONS)


@pytest.fixture(scope="module", params=SIZES, ids=lambda sizes: "tp{}-pp{}".format(*sizes))
def staged(request, directory):
    tensor, stages = request.param
    assembly = tiny_assembly(directory, **OPTIONS, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    yield assembly
    assembly.close()


def both(alone, staged, run):
    found = []
    for assembly in (alone, staged):
        with running(assembly) as engine:
            found.append(run(engine))
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9},
        {"temperature": 0.8, "seed": 1, "top_k": 20, "repetition_penalty": 1.2},
        {"beam_width": 3},
    ],
)
def test_tokens_match_a_single_process(alone, staged, sampling):
    one, many = both(alone, staged, lambda engine: engine.generate(PROMPTS, max_tokens=12, **sampling))
    assert one == many
