"""The layers of the project, and the imports that its source files contain.

`python -m tests.support.architecture` prints the layer diagram; `--write FILE` puts it between the markers of a
Markdown file. tests/test_architecture.py checks both against the sources.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = {
    "paged_kernels": ROOT / "kernels",
    "paged_backend": ROOT,
    "paged_client": ROOT / "client",
    "paged_bench": ROOT,
}
MARKERS = ("<!-- layers: begin -->", "<!-- layers: end -->")


@dataclass(frozen=True)
class Layer:
    """A package, and what it is for."""

    package: str
    purpose: str
    imports: tuple[str, ...] | None = None  # the only lower layers that it may import; None: any


# Lowest first. A module may import its own package and packages of lower layers.
LAYERS = (
    Layer("paged_kernels", "paged attention and other kernels, for GPU (Triton) and CPU (C++)"),
    Layer("paged_backend.utils", "the machine's memory and cores, background threads", ()),
    Layer(
        "paged_backend.api", "engine options, request and sampling parameters, limits, errors", ("paged_backend.utils",)
    ),
    Layer(
        "paged_backend.files",
        "model files, their content and directories; no torch",
        ("paged_backend.utils", "paged_backend.api"),
    ),
    Layer(
        "paged_backend.text",
        "tokenization, detokenization, chat templates, stop strings",
        ("paged_backend.api", "paged_backend.files"),
    ),
    Layer(
        "paged_backend.kv",
        "KV cache: pages, block tables, prefix cache, transfers, stores",
        ("paged_kernels", "paged_backend.utils", "paged_backend.api", "paged_backend.files"),
    ),
    Layer(
        "paged_backend.scheduling",
        "the scheduler: which tokens each step computes; no tensors",
        ("paged_backend.api", "paged_backend.kv"),
    ),
    Layer(
        "paged_backend.distributed",
        "ranks on several machines: process groups, step inputs",
        ("paged_backend.utils", "paged_backend.api"),
    ),
    Layer("paged_backend.sampling", "logits processing, sampling, log probabilities"),
    Layer("paged_backend.guided", "structured outputs: grammars and their token masks"),
    Layer("paged_backend.models", "attention, fused and quantized layers, LoRA, shards and stages"),
    Layer("paged_backend.execution", "batches, the forward pass, CUDA graphs, draft models"),
    Layer("paged_backend.loading", "model files, the load-time check of the logits, adapters"),
    Layer("paged_backend.engine", "the step loop, warm-up, worker processes"),
    Layer("paged_backend.server", "Triton requests and responses, admission, sessions, metrics"),
    Layer("paged_backend.trtllm", "the interface of tensorrtllm_backend"),
    Layer(
        "paged_client",
        "client library, command line, OpenAI gateway, server launcher",
        ("paged_backend.utils", "paged_backend.api", "paged_backend.files", "paged_backend.text"),
    ),
    Layer("paged_bench", "benchmarks"),
)
MAX_TOP_LEVEL = 18  # packages and modules, __init__.py files aside


@cache
def modules() -> dict[str, Path]:
    """Every source module by its import name."""
    found = {}
    for package, root in SOURCE_ROOTS.items():
        for file in sorted((root / package).rglob("*.py")):
            name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            if name != "paged_backend":  # which holds packages only
                found[name] = file
    return found


def layer_of(module: str) -> int:
    """The index of a module's layer in LAYERS. Raises KeyError for a module that no layer has."""
    for index, layer in enumerate(LAYERS):
        if module == layer.package or module.startswith(layer.package + "."):
            return index
    raise KeyError(f"{module}: in no layer; add its package to LAYERS in {Path(__file__).relative_to(ROOT)}")


@cache
def imports() -> dict[str, frozenset[str]]:
    """The source modules that each source module imports, inside functions and TYPE_CHECKING blocks too."""
    return {name: frozenset(_imports(name, file)) - {name} for name, file in modules().items()}


def _imports(name: str, file: Path) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _known(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                yield from _known(f"{base}.{alias.name}", base)


def _known(*candidates: str) -> Iterable[str]:
    """The first candidate that is a source module, if any: `from package import name` may name a module or a value."""
    return [one for one in candidates if one in modules()][:1]


def cycles() -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(imports()[name]):
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in sorted(modules()):
        if name not in order:
            visit(name)
    return found


def diagram() -> str:
    """The layers as a text diagram, highest first."""
    width = max(len(layer.package) for layer in LAYERS)
    lines = [f"{layer.package:<{width}}  {layer.purpose}" for layer in reversed(LAYERS)]
    inner = max(map(len, lines))
    rule = "+" + "-" * (inner + 2) + "+"
    boxes = [f"| {line:<{inner}} |" for line in lines]
    return "\n".join(["```text", rule, *(part for box in boxes for part in (box, rule)), "```"])


def with_diagram(text: str) -> str:
    """A Markdown text with the current diagram between its markers. Raises ValueError where a marker is missing."""
    begin, end = MARKERS
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the text has no {begin} ... {end}")
    return f"{before}{begin}\n{diagram()}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the layer diagram.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a Markdown file whose diagram is replaced")
    file = parser.parse_args().write
    if file is None:
        print(diagram())
    else:
        file.write_text(with_diagram(file.read_text()))


if __name__ == "__main__":
    main()
