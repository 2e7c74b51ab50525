"""Dependent launches: no kernel touches memory that an earlier one may use before it has waited."""

import subprocess
import sys

import pytest

from paged_kernels.launch import DEPENDENT_LAUNCHES, Device, read_features

KERNELS = (
    "few_rows_linear",
    "rope_kv_write",
    "latent_kv_write",
    "kv_write",
    "split",
    "add_rms_norm",
    "swiglu",
    "embed",
)
COMPILE = f"""
import re
from unittest import mock
import triton
from paged_kernels import aot
from paged_kernels.launch import OPTIONS, Device

features = frozenset([{DEPENDENT_LAUNCHES!r}])
with mock.patch.object(aot, "Device", lambda chip, multiprocessors: Device(chip, multiprocessors, features)):
    for name in {KERNELS!r}:
        size = dict(aot.LATENT_SIZES[1]) if name == "latent_kv_write" else {{}}
        case = aot.Case("sm_90", name, norm=name in ("few_rows_linear", "add_rms_norm"), length=16, **size)
        planned = aot._launch(case)
        options = {{option: planned.arguments[option] for option in OPTIONS if option in planned.arguments}}
        source = aot._source(planned.kernel, planned.arguments)
        ptx = triton.compile(source, target=aot.CHIPS["sm_90"][0], options=options).asm["ptx"]
        before, waits, after = ptx.partition("griddepcontrol.wait")
        touched = re.findall(r"\\b(?:ld|st|atom|red)\\.global|\\bcp\\.async\\.c", before)
        print(name, options["launch_pdl"], bool(waits), touched, "prefetch.global" in before, "prefetch" in after)
"""


def test_kernels_wait_before_they_touch_memory(compiled_environment):
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, env=compiled_environment, check=False)
    assert done.stdout.splitlines() == [f"{name} True True [] {name == 'few_rows_linear'} False" for name in KERNELS], (
        done.stderr
    )


@pytest.mark.parametrize("chip", ["sm_90", "sm_100", "sm_120", "sm_80", "sm_89", "gfx942"])
def test_launches_are_dependent_on_chips_that_can(chip):
    with_feature = Device(chip, 132, frozenset([DEPENDENT_LAUNCHES])).dependence
    can = chip in ("sm_90", "sm_100", "sm_120")
    assert with_feature == ({"DEPENDENT": True, "launch_pdl": True} if can else {"DEPENDENT": False})
    assert Device(chip, 132).dependence == {"DEPENDENT": False}


def test_features_are_read_from_a_list():
    assert read_features("") == frozenset()
    assert read_features("producers, dependent_launches") == {"producers", "dependent_launches"}
    with pytest.raises(ValueError, match="PAGED_GPU_FEATURES='fast': 'fast' is none of"):
        read_features("fast")
