"""Which GPUs a model instance sees, as its config.pbtxt says."""

from __future__ import annotations

from paged_backend.api.errors import ConfigError

GPU_DEVICE_IDS = "GPU_DEVICE_IDS"


def visible_gpus(kind: str, device: int, wanted: str, processes: int, visible: str | None) -> str | None:
    """What CUDA_VISIBLE_DEVICES is to be; None: as it is.

    kind, device: the instance's, as Triton names them ("GPU", "MODEL", "CPU").
    wanted: config.pbtxt's parameter GPU_DEVICE_IDS, numbers between commas; "" without one.
    processes: how many GPUs the engine takes (tensor_parallel_size).
    visible: what CUDA_VISIBLE_DEVICES is now. Triton counts the GPUs that this leaves it.

    Raises ConfigError.
    """
    if kind == "GPU":
        if processes > 1:
            raise ConfigError(
                f"tensor_parallel_size={processes}: KIND_GPU is for one GPU, please specify KIND_MODEL in config.pbtxt"
            )
        ids = [device]
    elif kind == "MODEL" and wanted:
        ids = _numbers(wanted, processes)
    else:
        return None
    return ",".join(_name(one, visible) for one in ids)


def _numbers(wanted: str, processes: int) -> list[int]:
    parts = [part.strip() for part in wanted.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f'{GPU_DEVICE_IDS}="{wanted}": must be numbers of GPUs between commas, like "0,1"')
    ids = [int(part) for part in parts]
    if len(set(ids)) < len(ids):
        raise ConfigError(f'{GPU_DEVICE_IDS}="{wanted}": names a GPU twice')
    if processes > 1 and len(ids) != processes:
        raise ConfigError(f'{GPU_DEVICE_IDS}="{wanted}": must name tensor_parallel_size={processes} GPUs')
    return ids


def _name(number: int, visible: str | None) -> str:
    if visible is None:
        return str(number)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if number >= len(names):
        raise ConfigError(f'{GPU_DEVICE_IDS}="{number}": CUDA_VISIBLE_DEVICES="{visible}" leaves {len(names)} GPUs')
    return names[number]
