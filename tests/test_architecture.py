"""The structure of the sources: layers, import cycles, and the sizes of files and classes."""

import ast
import re

import pytest

from tests.support import architecture
from tests.support.architecture import LAYERS, MAX_TOP_LEVEL, ROOT, imports, layer_of, modules

MAX_FILE_LINES = 350
MAX_METHODS = 20
JUSTIFICATION = re.compile(r"^# Over \d+ lines: \S+", re.M)  # a comment in a longer file that says why
DIAGRAMS = ["docs/architecture.md"]
ACROSS_MODULES = ("docs", "e2e", "integration", "project", "support")  # folders of tests/ that mirror no package
FEATURES = {  # test modules of one package that are named after a feature that several of its modules have
    "kernels": {"decoder_layer", "import_name", "linear", "quantization", "splits"},
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
    packages = {"kernels": "paged_kernels", "client": "client", "bench": "paged_bench"}
    for folder in sorted(file for file in (ROOT / "tests").iterdir() if (file / "__init__.py").exists()):
        if folder.name in ACROSS_MODULES:
            continue
        package = packages.get(folder.name, f"paged_backend.{folder.name}")
        names = {one.rpartition(".")[2].lstrip("_") for one in modules() if f"{one}.".startswith(f"{package}.")}
        tested = {file.stem.removeprefix("test_") for file in folder.rglob("test_*.py")}
        assert tested - names == FEATURES.get(folder.name, set()), f"tests/{folder.name}"
