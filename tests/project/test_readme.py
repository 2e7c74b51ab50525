"""What the documentation says about this repository: tests, links, names, terms, options and commands that exist."""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import InputLimits
from paged_backend.distributed import links
from paged_backend.kv.stores import block_file
from paged_backend.server import service
from paged_backend.server.metrics.families import FAMILIES
from paged_client.openai import schema
from tests.support import runs

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / name / "README.md" for name in ("kernels", "paged_bench")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ELSEWHERE = ("CHANGELOG.md", "comparison.md")  # which name files of earlier versions, and of other projects
COMPARISON = ROOT / "docs/comparison.md"
HEADS = ["", "this project", "vllm_backend", "tensorrtllm_backend", "SGLang", "NVIDIA Dynamo", "llama.cpp", "LightLLM"]
HEADS += ["LMDeploy"]
METRIC_SUFFIXES = ("_total", "_seconds", "_blocks", "_requests", "_up")
PACKAGES = {"accelerate", "gguf", "bitsandbytes", "torchao"}  # in other tables of the tuning guide
TEST_LINK = re.compile(r"\[`(test_\w+)`\]\((?:\.\./)*(tests/[\w/]+\.py)\)")
NAME_LINK = re.compile(r"\[`([A-Za-z_][\w.]*)`\]\(([^)#\s]+\.py)\)")
FILE_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)\)")
PATH = re.compile(r"`((?:paged_backend|paged_bench|client|tests|kernels|model_repository|docs|docker)/[\w/.-]*)`")
BENCHMARK = re.compile(r"paged bench (\w+)((?: [^\s`;#]+)*)")
SOURCE = re.compile(r" \[([VTSDLIM]\d+)\](?=$|;)")


def _name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def _table(text: str) -> list[list[str]]:
    """The lines of the first table, cell by cell; its head is the first of them."""
    lines = re.search(r"(?m)(?:^\|.*\n)+", text).group().splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in rows if not re.fullmatch(r"-+", "".join(row))]


def _compared() -> list[list[str]]:
    """The rows of all tables of features in the comparison."""
    tables = [_table(part) for part in COMPARISON.read_text().split("\n## ")[1:] if f"| {HEADS[1]} |" in part]
    assert all(heads == HEADS for heads, *_ in tables)
    return [row for _, *rows in tables for row in rows]


@cache
def _definitions(file: Path) -> set[str]:
    """Functions, classes, methods (as `Class.method`) and constants of a module."""
    found = set()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{one.name}" for one in methods}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


# --- comparison with other backends --------------------------------------------------------------------------------


def test_each_feature_of_ours_names_existing_tests():
    features = [row[0] for row in _compared() if row[1] != "no"]
    _, *named = _table(COMPARISON.read_text().partition("\n## Tests\n")[2])
    assert [feature for feature, _ in named] == features and len(features) > 40
    for feature, tests in named:
        found = TEST_LINK.findall(tests)
        assert len(found) == len(tests.split(", ")), feature
        for name, file in found:
            assert name in _definitions(ROOT / file), f"{file} has no {name}"


def test_each_foreign_cell_of_the_comparison_has_a_source():
    text, cited = COMPARISON.read_text(), set()
    for row in _compared():
        assert len(row) == len(HEADS) and all(row)
        for cell in row[2:]:
            assert SOURCE.search(cell) and cell.endswith("]"), f"{row[0]}: {cell}"
            cited.update(SOURCE.findall(cell))
    assert cited == set(re.findall(r"(?m)^\[(\w+)\]: https://", text)), "sources without an address, or without a use"


# --- links and names -----------------------------------------------------------------------------------------------


def _headings(document: Path) -> set[str]:
    """Return the headings of a document as links name them."""
    titles = re.findall(r"(?m)^#+ (.+)$", document.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("pattern", [FILE_LINK, NAME_LINK, TEST_LINK, PATH, BENCHMARK], ids=lambda one: one.pattern)
def test_documents_have_what_is_checked(pattern):
    """A pattern that matches nothing would check nothing."""
    assert sum(len(pattern.findall(document.read_text())) for document in DOCUMENTS) > 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(document):
    for path, heading in FILE_LINK.findall(document.read_text()):
        target = document.parent / path if path else document
        assert target.exists(), path
        assert not heading or heading in _headings(target), f"{path}#{heading}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_linked_names_are_defined_in_the_file(document):
    for name, path in NAME_LINK.findall(document.read_text()):
        assert name in _definitions(document.parent / path), f"{path} has no {name}"


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if one.name not in ELSEWHERE], ids=_name)
def test_paths_in_the_text_exist(document):
    for path in PATH.findall(document.read_text()):
        assert (ROOT / path).exists(), path


def test_every_document_is_linked():
    linked = {
        (document.parent / path).resolve()
        for document in DOCUMENTS
        for path in re.findall(r"\]\((?!https?://)([^)#\s]+)", document.read_text())
    }
    assert [_name(document) for document in DOCUMENTS if document not in linked and document.name != "README.md"] == []
    readme = (ROOT / "README.md").read_text()
    for folder in ("docs", "docs/guides", "docs/design"):
        for document in (ROOT / folder).glob("*.md"):
            assert f"({_name(document)})" in readme, f"README.md does not link {_name(document)}"


# --- README --------------------------------------------------------------------------------------------------------


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_key_figures_are_in_the_results():
    results = (ROOT / "docs/performance.md").read_text()
    table = (ROOT / "README.md").read_text().partition("## Key figures")[2]
    rows = [row for row in _table(table) if any(row)]
    assert len(rows) == 5
    for _, figures in rows:
        for number in re.findall(r"\d[\d,.]*\d%?", figures):
            assert number in results, f"{number} is not in docs/performance.md"


@pytest.mark.parametrize("file", sorted((ROOT / "docs/results").glob("*.json")), ids=_name)
def test_page_names_the_commit_of_each_record(file):
    report, page = json.loads(file.read_text()), (ROOT / "paged_bench/README.md").read_text()
    run = report["run"]
    assert report["complete"] and run["command"].startswith("paged bench ") and run["processor"]
    assert f"[`{file.name}`](../docs/results/{file.name}) at {run['commit']}, {run['date'][:10]}" in page


def test_performance_is_short():
    assert len((ROOT / "docs/performance.md").read_text().splitlines()) <= 200


# --- messages ------------------------------------------------------------------------------------------------------


def _texts(folder: Path) -> Iterator[str]:
    """Yield the texts in a folder's source; what an f-string inserts is "…"."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…"
                for part in parts
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )


def test_messages_of_the_troubleshooting_guide_are_in_the_source():
    messages = re.findall(r"(?m)^\| `([^`]+)` \|.*\|$", (ROOT / "docs/guides/troubleshooting.md").read_text())
    elsewhere = {"Stub process … is not healthy", "paged_preemptions_total"}
    texts = "\n".join(text for folder in ("paged_backend", "client", "kernels") for text in _texts(ROOT / folder))
    missing = [
        message
        for message in messages
        if message not in elsewhere and not all(part in texts for part in message.split("…"))
    ]
    assert missing == [] and len(messages) > 15


# --- metrics and options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", ROOT / "docs/guides/observe.md", ROOT / "docs/guides/tune.md"], ids=_name
)
def test_metrics_in_the_text_exist(document):
    named = set(re.findall(r"`((?:paged|vllm:|nv)_?[a-z_]+)[`{]", document.read_text()))
    metrics = {name for name in named if name.startswith(("vllm:", "nv_")) or name.endswith(METRIC_SUFFIXES)}
    assert metrics and metrics <= set(FAMILIES)


def test_options_in_the_tuning_guide_exist():
    rows = re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "docs/guides/tune.md").read_text())
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 10
    assert named - PACKAGES <= {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_benchmarks_in_the_text_exist(document):
    shared = "".join((ROOT / f"paged_bench/{name}.py").read_text() for name in ("_harness", "_levels"))
    for name, arguments in BENCHMARK.findall(document.read_text()):
        source = shared + (ROOT / f"paged_bench/{name}.py").read_text()
        for flag in re.findall(r"--[a-z_-]+", arguments):
            assert f'"{flag}"' in source, f"paged bench {name} has no {flag}"


# --- glossary ------------------------------------------------------------------------------------------------------


def _terms() -> list[list[str]]:
    sections = (ROOT / "docs/glossary.md").read_text().split("\n## ")[1:]
    return [row for section in sections for row in _table(section)[1:]]


def test_glossary_has_at_most_60_terms_with_their_equivalents():
    terms = _terms()
    assert 40 <= len(terms) <= 60
    assert all(len(row) == 4 and all(row) for row in terms)
    assert len({row[0].lower() for row in terms}) == len(terms)


def test_terms_of_the_glossary_are_used():
    texts = [file.read_text() for file in DOCUMENTS if file.name != "glossary.md"]
    texts += [file.read_text() for file in (ROOT / "paged_backend").rglob("*.py")]
    text = " ".join(" ".join(texts).lower().replace("-", " ").split())
    assert [term for term, *_ in _terms() if term.lower().replace("-", " ") not in text] == []


# --- options and linters -------------------------------------------------------------------------------------------


def test_options_that_matter_for_security_are_options_with_these_defaults():
    table = (ROOT / "docs/guides/secure.md").read_text().partition("## What to set")[2]
    rows = _table(table)
    options = {name: row[1] for row in rows[1:] for name in re.findall(r"`([a-z_]+)`", row[0])}
    owners = {name: EngineConfig if hasattr(EngineConfig, name) else InputLimits for name in options}
    defaults = {name: getattr(owner, name) for name, owner in owners.items() if name != "cache_salt"}
    for name in ("trust_remote_code", "max_queue_size", "structured_outputs_timeout", "max_sessions", "max_loras"):
        assert str(defaults[name]).lower() in options[name]


def test_pre_commit_runs_the_linters_of_make_lint():
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "--old-file=setup", "lint"], cwd=ROOT, capture_output=True, text=True
    )
    linters = [line for line in done.stdout.splitlines() if line.startswith(".venv/bin/")]
    hooks = re.findall(r"(?m)^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == linters and len(linters) == 3


STATED = [
    (schema.MAX_CONTAINERS, "guides/secure.md", "with more than {} lists and objects"),
    (links.HELLO_SECONDS, "guides/secure.md", "the connection is closed after {} s"),
    (links.MAX_STRANGERS, "guides/secure.md", "the oldest of more than {}"),
    (block_file.READ_SECONDS, "design/block-manager.md", "| a slow answer | {} s |"),
    (100 * service.DRAIN_SHARE, "guides/deploy.md", "`stop_timeout`: {}% for requests"),
    (runs.SLACK, "guides/test.md", "by more than half and {} s"),
]


@pytest.mark.parametrize(("value", "page", "sentence"), STATED)
def test_numbers_of_constants_are_as_stated(value, page, sentence):
    assert sentence.format(f"{value:,.10g}") in (ROOT / "docs" / page).read_text()
