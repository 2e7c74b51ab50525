"""The structure of the sources: layers and import cycles."""

import ast

import pytest

from tests.support import architecture
from tests.support.architecture import LAYERS, MAX_TOP_LEVEL, ROOT, imports, layer_of, modules

DIAGRAMS = ["docs/architecture.md"]


def test_modules_import_lower_layers_only():
    for module in modules():
        own = layer_of(module)
        allowed = LAYERS[own].imports
        for other in imports()[module]:
            theirs = layer_of(other)
            assert theirs <= own, f"{module} imports {other}, which is in a higher layer"
            is_allowed = theirs == own or allowed is None or LAYERS[theirs].package in allowed
            assert is_allowed, f"{module} may not import {other}"


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
