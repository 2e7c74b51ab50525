"""Ahead-of-time compilation for every chip, in a subprocess without Triton's interpreter."""

import itertools
import json
import os
import subprocess
import sys

import pytest

from paged_kernels.aot import ATTENTION, CHIPS, MAX_SPILLED_BYTES, PRODUCER, SMALL_KERNELS


def report(environment: dict[str, str], *arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "paged_kernels.aot", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == (0 if all(row["fits"] for row in rows) else 1), done.stderr
    return rows


def check(rows: list[dict]) -> set[tuple[str, str | None]]:
    """Check the resources of compiled kernels. Return the kernels and formats."""
    assert [row for row in rows if not row["fits"]] == []
    assert all(row["registers"] > 0 and row["spilled"] <= MAX_SPILLED_BYTES for row in rows)
    return {(row["kernel"], row["format"]) for row in rows}


def kernels_and_formats(chip: str) -> set[tuple[str, str | None]]:
    kernels = (*ATTENTION, "kv_write", "latent_kv_write", "rope_kv_write")
    return {
        *itertools.product(kernels, (None, "int8", "fp8")),
        *({(PRODUCER, None)} if chip == "sm_90" else ()),
        *((kernel, "int4") for kernel in (*ATTENTION, "kv_write", "pack_blocks")),
        *(
            (kernel, None)
            for kernel in ("add_rms_norm", "few_rows_linear", "invariant_linear", "swiglu", *SMALL_KERNELS)
        ),
    }


def check_products(rows: list[dict]) -> None:
    """A batch-invariant launch multiplies with the same instructions for any number of rows, with splits or without."""
    found: dict[tuple, set] = {}
    for row in rows:
        sizes = (row["width"], row["outputs"]) if row["kernel"] == "invariant_linear" else (row["window"],)
        key = row["kernel"].removesuffix("_split"), row["dtype"], row["head_dim"], row["format"], *sizes
        found.setdefault(key, set()).add(tuple(row["products"]))
    assert all(len(products) == 1 for products in found.values())
    assert all(products != {()} for key, products in found.items() if "bf16" in key)


def test_a_configuration_of_each_kernel_compiles_without_spilling(compiled_environment):
    found = check(report(compiled_environment, "--sample", "--chip", "sm_90"))
    assert {kernel for kernel, _ in found} == {kernel for kernel, _ in kernels_and_formats("sm_90")}
    assert {format for _, format in found} == {None, "int8", "fp8", "int4"}


COMPARE_STEPS = """
from paged_kernels.aot import Case, compile_case
for block_size in (16, 64):
    print(*compile_case(Case("sm_90", "decode", block_size=block_size)).steps)
"""


def test_a_step_over_many_blocks_takes_hardly_more_instructions_than_one_within_a_block(compiled_environment):
    """Places of rows within blocks are not computed in the loop, and keys and values share block numbers."""
    command = [sys.executable, "-c", COMPARE_STEPS]
    done = subprocess.run(command, capture_output=True, text=True, env=compiled_environment)
    assert done.returncode == 0, done.stderr
    several, one = map(int, done.stdout.split())
    assert 100 < several < 1.1 * one


@pytest.mark.nightly
@pytest.mark.parametrize("chip", CHIPS)
def test_heaviest_configurations_compile_without_spilling(chip, compiled_environment):
    rows = report(compiled_environment, "--chip", chip)
    assert check(rows) == kernels_and_formats(chip)
    check_products([row for row in rows if row["kernel"].startswith("invariant")])


@pytest.mark.nightly
@pytest.mark.parametrize("chip", CHIPS)
def test_every_configuration_compiles_without_spilling(chip, compiled_environment, hours, figures):
    """Compile as many configurations as there is time for, in random order."""
    rows = report(compiled_environment, "--full", "--hours", str(hours), "--chip", chip)
    assert [row for row in rows if not row["fits"]] == []
    figures(f"{len(rows)} configurations")


@pytest.mark.nightly
def test_the_oldest_supported_triton_compiles_every_kernel(compiled_environment, tmp_path):
    """PyTorch 2.11 comes with Triton 3.6."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        "triton==3.6.0",
    ]
    subprocess.run(command, check=True)
    paths = os.pathsep.join((str(tmp_path), compiled_environment["PYTHONPATH"]))
    check(report({**compiled_environment, "PYTHONPATH": paths}, "--chip", "sm_90"))
