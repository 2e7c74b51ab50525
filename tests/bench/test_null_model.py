"""The null model, whose forward pass computes nothing."""

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import assemble
from paged_bench._workload import model_options
from paged_bench.server import NULL
from tests.support.in_process import byte_tokenizer


def test_a_model_without_an_embedding_loads(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    options = model_options(NULL) | {"tokenizer": str(tmp_path), "num_gpu_blocks_override": 8, "device": "cpu"}
    assembly = assemble(EngineConfig.from_options(options))
    assert assembly.loaded.spec.generates
