"""The GPUs that a model instance sees."""

import pytest

from paged_backend.api.errors import ConfigError
from paged_backend.server.placement import SIZES, replica_gpus, visible_gpus


@pytest.mark.parametrize(
    ("kind", "device", "wanted", "processes", "visible", "expected"),
    [
        ("GPU", 2, "", 1, None, "2"),
        ("GPU", 1, "", 1, "4,5", "5"),
        ("GPU", 0, "", 1, "GPU-8f2a", "GPU-8f2a"),
        ("GPU", 0, "3", 1, None, "0"),
        ("MODEL", 0, "", 2, "4,5", None),
        ("MODEL", 0, "0, 2", 2, None, "0,2"),
        ("MODEL", 0, "1,0", 2, "4,5", "5,4"),
        ("MODEL", 0, "1,0", 1, None, "1,0"),
        ("CPU", 0, "1", 1, None, None),
    ],
)
def test_an_instance_sees_its_configured_gpus(kind, device, wanted, processes, visible, expected):
    assert visible_gpus(kind, device, wanted, processes, visible) == expected


@pytest.mark.parametrize(
    ("kind", "wanted", "processes", "reason"),
    [
        (
            "GPU",
            "",
            2,
            f"{SIZES}=2: KIND_GPU is for one GPU, please specify",
        ),
        ("MODEL", "0,x", 1, 'GPU_DEVICE_IDS="0,x": must be comma-separated numbers'),
        ("MODEL", "-1", 1, 'GPU_DEVICE_IDS="-1": must be comma-separated numbers'),
        ("MODEL", "0,0", 1, 'GPU_DEVICE_IDS="0,0": names a GPU twice'),
        (
            "MODEL",
            "0",
            2,
            f'GPU_DEVICE_IDS="0": must name {SIZES}=2 GPUs',
        ),
        ("MODEL", "0,7", 2, 'GPU_DEVICE_IDS="7": CUDA_VISIBLE_DEVICES="4,5" leaves 2 GPUs'),
    ],
)
def test_invalid_placements_are_rejected_by_name(kind, wanted, processes, reason):
    with pytest.raises(ConfigError) as caught:
        visible_gpus(kind, 0, wanted, processes, "4,5")
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("number", "size", "visible", "expected"), [(1, 1, None, "1"), (2, 2, None, "4,5"), (1, 2, "7,5,3,1", "3,1")]
)
def test_a_replica_sees_its_own_gpus(number, size, visible, expected):
    assert replica_gpus(number, size, visible) == expected
