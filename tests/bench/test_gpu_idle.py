"""What a profile of a GPU is reduced to, with the events of a GPU that need not exist."""

from types import SimpleNamespace

import pytest
import torch

from paged_bench import _gpu_idle


def event(name, start, end, device=torch.autograd.DeviceType.CUDA):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)


@pytest.fixture
def profiled(monkeypatch):
    """Two steps of two launches each, beside a function of the host."""
    events = [event("attend", 0, 30), event("cast", 30, 40), event("attend", 50, 90), event("cast", 90, 95)]
    events.append(event("host", 0, 1000, torch.autograd.DeviceType.CPU))

    class Profiler:
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            return SimpleNamespace(events=lambda: events)

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_time_and_launches_of_each_kernel_in_a_step(profiled):
    whole, *kernels = _gpu_idle.kernels("2x8/2", 2, lambda: None)
    assert (whole.name, whole.value, whole.peers) == ("GPU time of a step 2x8/2", 42.5, {"launches": 2.0})
    assert [(one.name.rpartition(": ")[2], one.value, one.peers["launches"]) for one in kernels] == [
        ("attend", 35.0, 1.0),
        ("cast", 7.5, 1.0),
    ]


def test_idle_time_is_what_no_kernel_covers(profiled, monkeypatch):
    seconds = iter((0.0, 100e-6))
    monkeypatch.setattr(_gpu_idle.time, "perf_counter", lambda: next(seconds))
    assert _gpu_idle.gpu_idle(lambda: None) == pytest.approx(15.0)  # 85 of 100 us
