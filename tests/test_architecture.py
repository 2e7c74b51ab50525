"""The structure of the sources: layers, import cycles, and the sizes of files and classes."""

import ast
import re
from pathlib import Path

import pytest

from tests.support import architecture
from tests.support.architecture import LAYERS, MAX_TOP_LEVEL, ROOT, imports, layer_of, modules

MAX_FILE_LINES = 350
MAX_METHODS = 20
JUSTIFICATION = re.compile(r"^# Over \d+ lines: \S+", re.M)  # a comment in a longer file that says why
DIAGRAMS = ["docs/architecture.md"]
ACROSS_MODULES = ("docs", "e2e", "integration", "project", "support")  # folders of tests/ that mirror no package
FEATURES = {  # test modules of one package that are named after a feature that several of its modules have
    "client": {"client"},
    "kernels": {
        "batch_invariance",
        "decoder_layer",
        "expert_linear",
        "import_name",
        "invariant_model",
        "linear",
        "pool",
        "quantization",
    },
}
# Of packages whose tests are in another folder.
TEST_FOLDERS = {"paged_kernels": "kernels", "paged_client": "client", "paged_bench": "bench"}
NOT_TESTED = {  # source modules that no test runs, and why not
    "paged_bench._children.llama_cpp_child": "needs llama.cpp",
}
# Source modules without a test module of their own name, and the test module that tests each of them.
TESTED_THROUGH = {
    "paged_kernels.aot_cases": "tests/kernels/test_aot.py",
    "paged_kernels.attention_arguments": "tests/kernels/test_paged_attention.py",
    "paged_kernels.attention_kernels": "tests/kernels/test_paged_attention.py",
    "paged_kernels.attention_tile": "tests/kernels/test_paged_attention.py",
    "paged_kernels.cpu.block_copy": "tests/kernels/test_block_copy.py",
    "paged_kernels.cpu.kv_write": "tests/kernels/test_kv_write.py",
    "paged_kernels.cpu.latent_kv_write": "tests/kernels/test_latent_kv_write.py",
    "paged_kernels.cpu.layer_ops": "tests/kernels/test_add_rms_norm.py",
    "paged_kernels.cpu.native": "tests/kernels/cpu/test_decoder_layer.py",
    "paged_kernels.cpu.packed_linear": "tests/kernels/cpu/test_linear.py",
    "paged_kernels.cpu.rope_kv_write": "tests/kernels/test_rope_kv_write.py",
    "paged_kernels.cpu.sampling": "tests/kernels/test_sampling.py",
    "paged_kernels.cpu.step_inputs": "tests/kernels/test_step_inputs.py",
    "paged_kernels.paging": "tests/kernels/test_cascade.py",
    "paged_kernels.sampling_metadata": "tests/kernels/test_sampling.py",
    "paged_kernels.tuning_inputs": "tests/kernels/test_tune.py",
    "paged_backend.api.guide": "tests/guided/test_compiler.py",
    "paged_backend.engine.engine_service": "tests/engine/test_remote_engine.py",
    "paged_backend.engine.frame_sender": "tests/engine/test_remote_engine.py",
    "paged_backend.engine.rank": "tests/engine/test_workers.py",
    "paged_backend.memory.cache_tier": "tests/memory/test_tier_chain.py",
    "paged_backend.memory.redis_store": "tests/memory/test_remote.py",
    "paged_backend.guided.sandbox_process": "tests/guided/test_sandbox.py",
    "paged_bench._quantization_models": "tests/bench/test_quantization.py",
    "paged_bench._checkpoints": "tests/loading/test_quantized_checkpoint.py",
    "paged_backend.loading.awq": "tests/loading/test_quantized_checkpoint.py",
    "paged_backend.loading.checkpoint_formats": "tests/loading/test_quantized_checkpoint.py",
    "paged_backend.loading.compressed_tensors": "tests/loading/test_quantized_checkpoint.py",
    "paged_backend.loading.fp8": "tests/loading/test_quantized_checkpoint.py",
    "paged_backend.loading.attention_probe": "tests/loading/test_verification.py",
    "paged_backend.loading.gguf_weights": "tests/loading/test_weights.py",
    "paged_backend.loading.gptq": "tests/loading/test_quantized_checkpoint.py",
    "paged_backend.loading.mxfp4": "tests/loading/test_quantized_checkpoint.py",
    "paged_backend.loading.stored_weights": "tests/loading/test_quantized_checkpoint.py",
    "paged_backend.models.fused_layer": "tests/models/test_fusion.py",
    "paged_backend.models.fusible": "tests/models/test_fusion.py",
    "paged_backend.models.native_decoder": "tests/models/test_fusion.py",
    "paged_backend.models.pipeline": "tests/loading/test_stages.py",
    "paged_backend.scheduling.plan": "tests/scheduling/test_plan_builder.py",
    "paged_backend.scheduling.state_checkpoints": "tests/scheduling/test_state_slots.py",
    "paged_backend.server.arrival": "tests/server/test_admission.py",
    "paged_backend.server.metric_factory": "tests/server/test_metrics.py",
    "paged_backend.server.pooling": "tests/server/test_embedding.py",
    "paged_backend.server.messages": "tests/server/test_message_handler.py",
    "paged_client.__main__": "tests/client/test_cli.py",
    "paged_client.openai.limits": "tests/client/openai/test_app.py",
    "paged_client.openai.pooling": "tests/client/openai/test_embeddings.py",
    "paged_client.openai.pooling_routes": "tests/client/openai/test_classification.py",
    "paged_client.pooling": "tests/client/test_sync_client.py",
    "paged_client.addresses": "tests/client/commands/test_generate.py",
    "paged_client.commands.local_server": "tests/client/commands/test_profile.py",
    "paged_client.commands.unknown_arguments": "tests/client/test_cli.py",
    "paged_client.serving.stubs": "tests/client/serving/test_launch.py",
    "paged_client.sampling_values": "tests/client/test_chat.py",
    "paged_bench._children.vllm_child": "tests/bench/test_vllm.py",
    "paged_bench._conversations": "tests/bench/test_routing.py",
    "paged_bench._environments": "tests/bench/test_cpu.py",
    "paged_bench._gateways": "tests/bench/test_routing.py",
    "paged_bench._gguf": "tests/bench/test_cpu.py",
    "paged_bench._gpu_idle": "tests/bench/test_engine.py",
    "paged_bench._http_load": "tests/e2e/test_load.py",
    "paged_bench._lines": "tests/bench/test_kernels.py",
    "paged_bench._server_load": "tests/e2e/test_load.py",
    "paged_bench._redis_server": "tests/memory/test_remote.py",
    "paged_bench._step_profile": "tests/bench/test_cpu.py",
    "paged_backend.server.replica": "tests/e2e/test_replicas.py",
    "paged_backend.server.replicas": "tests/e2e/test_replicas.py",
    "paged_backend.engine.tier_builder": "tests/integration/test_remote_cache.py",
    "paged_bench._machines": "tests/e2e/test_nodes.py",
    "paged_bench._cache_simulation": "tests/bench/test_memory.py",
    "paged_bench.gateway": "tests/e2e/test_load.py",
    "paged_bench.models.null.modeling_null": "tests/e2e/test_load.py",
    "paged_bench.server": "tests/e2e/test_load.py",
    "paged_bench.trtllm": "tests/e2e/test_load.py",
}


@pytest.mark.parametrize("module", modules())
def test_module_imports_lower_layers_only(module):
    own = layer_of(module)
    allowed = LAYERS[own].imports
    for other in imports()[module]:
        theirs = layer_of(other)
        assert theirs <= own, f"{module} imports {other}, which is in a higher layer"
        assert theirs == own or allowed is None or LAYERS[theirs].package in allowed, f"{module} may not import {other}"


def test_there_are_no_import_cycles():
    assert architecture.cycles() == []


def test_number_of_top_level_packages_and_modules():
    top = {file.name for file in (ROOT / "paged_backend").iterdir() if file.suffix == ".py" or file.is_dir()}
    packages = top - {"__init__.py", "__pycache__"}
    assert len(packages) + len(architecture.SOURCE_ROOTS) - 1 <= MAX_TOP_LEVEL


@pytest.mark.parametrize("document", DIAGRAMS)
def test_diagram_matches_the_layers(document):
    text = (ROOT / document).read_text()
    assert architecture.with_diagram(text) == text, f"run python -m tests.support.architecture --write {document}"


@pytest.mark.parametrize("module", modules())
def test_file_is_short_or_says_why_not(module):
    text = modules()[module].read_text()
    lines = len(text.splitlines())
    assert lines <= MAX_FILE_LINES or JUSTIFICATION.search(text), f"{lines} lines, limit {MAX_FILE_LINES}"


@pytest.mark.parametrize("module", modules())
def test_classes_have_few_methods(module):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.ClassDef):
            names = [one.name for one in node.body if isinstance(one, kinds)]
            assert len(names) <= MAX_METHODS, f"{node.name} has {len(names)} methods, limit {MAX_METHODS}"


def test_test_modules_do_not_import_each_other():
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("tests.")]
            else:
                continue
            for name in names:
                assert not any(part.startswith("test_") for part in name.split(".")[:-1]), f"{file} imports {name}"
                assert not (ROOT / f"{name.replace('.', '/')}.py").name.startswith("test_"), f"{file} imports {name}"


def test_test_modules_are_named_after_source_modules():
    """tests/<package>/test_<module>.py tests one module; tests of several modules are in tests/integration and e2e."""
    packages = {folder: package for package, folder in TEST_FOLDERS.items()}
    for folder in sorted(file for file in (ROOT / "tests").iterdir() if (file / "__init__.py").exists()):
        if folder.name in ACROSS_MODULES:
            continue
        package = packages.get(folder.name, f"paged_backend.{folder.name}")
        names = {one.rpartition(".")[2].lstrip("_") for one in modules() if f"{one}.".startswith(f"{package}.")}
        tested = {file.stem.removeprefix("test_") for file in folder.rglob("test_*.py")}
        assert tested - names == FEATURES.get(folder.name, set()), f"tests/{folder.name}"


def test_every_source_module_has_a_test_module():
    """TESTED_THROUGH names the test module of every source module that has none of its own name, and of no other."""
    without = {one for one, file in modules().items() if file.name != "__init__.py" and not own_tests(one).exists()}
    declared = set(TESTED_THROUGH)
    missing, superfluous = without - declared - set(NOT_TESTED), (declared | set(NOT_TESTED)) - without
    assert not missing, "add a test module, or an entry to TESTED_THROUGH"
    assert not superfluous, "remove these entries: the module has its own test module, or does not exist"
    assert not declared & set(NOT_TESTED)
    assert [file for file in TESTED_THROUGH.values() if not (ROOT / file).is_file()] == []


def own_tests(module: str) -> Path:
    """The test module named after a source module: tests/client/openai/test_keys.py for paged_client.openai.keys."""
    package, *parts = module.removeprefix("paged_backend.").split(".")
    *folders, name = (part.lstrip("_") for part in [TEST_FOLDERS.get(package, package), *parts])
    return ROOT.joinpath("tests", *folders, f"test_{name}.py")
