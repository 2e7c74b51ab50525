"""Selects the GPUs of a model instance from its config.pbtxt."""

from __future__ import annotations

from paged_backend.api.errors import ConfigError

GPU_DEVICE_IDS = "GPU_DEVICE_IDS"
SIZES = "tensor_parallel_size * pipeline_parallel_size * data_parallel_size"  # the number of GPUs


def visible_gpus(kind: str, device: int, wanted: str, processes: int, visible: str | None) -> str | None:
    """Return the value for CUDA_VISIBLE_DEVICES; None: leave it unchanged.

    kind, device: kind and device id of the instance, as Triton passes them ("GPU", "MODEL", "CPU").
    wanted: the parameter GPU_DEVICE_IDS of config.pbtxt, comma-separated numbers; "" if it is not set.
    processes: the number of GPUs that the model uses (SIZES).
    visible: the current CUDA_VISIBLE_DEVICES; device numbers count the GPUs in it.

    Raises ConfigError for a contradiction or an invalid number.
    """
    if kind == "GPU":
        if processes > 1:
            raise ConfigError(
                f"{SIZES}={processes}: KIND_GPU is for one GPU, please specify KIND_MODEL in config.pbtxt"
            )
        ids = [device]
    elif kind == "MODEL" and wanted:
        ids = _numbers(wanted, processes)
    else:
        return None
    return ",".join(_name(gpu, visible) for gpu in ids)


def replica_gpus(number: int, size: int, visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for one data parallel engine. number: the engine's number. size: GPUs of each engine.
    Raises ConfigError if there are too few."""
    return ",".join(_name(gpu, visible) for gpu in range(number * size, (number + 1) * size))


def _numbers(wanted: str, processes: int) -> list[int]:
    parts = [part.strip() for part in wanted.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f'{GPU_DEVICE_IDS}="{wanted}": must be comma-separated numbers of GPUs, like "0,1"')
    ids = [int(part) for part in parts]
    if len(set(ids)) < len(ids):
        raise ConfigError(f'{GPU_DEVICE_IDS}="{wanted}": names a GPU twice')
    if processes > 1 and len(ids) != processes:
        raise ConfigError(f'{GPU_DEVICE_IDS}="{wanted}": must name {SIZES}={processes} GPUs')
    return ids


def _name(number: int, visible: str | None) -> str:
    if visible is None:
        return str(number)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if number >= len(names):
        raise ConfigError(f'{GPU_DEVICE_IDS}="{number}": CUDA_VISIBLE_DEVICES="{visible}" leaves {len(names)} GPUs')
    return names[number]
