"""The field quantization_config of config.json: which methods and settings are supported. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paged_backend.api.errors import ConfigError

FIELD = "quantization_config"
CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
PACKAGES: Mapping[str, tuple[str, ...]] = {  # that transformers needs, by quant_method: module or module=package
    "aqlm": ("aqlm",),
    "auto-round": ("auto_round=auto-round",),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors=compressed-tensors",),
    "eetq": ("eetq", "accelerate"),
    "fbgemm_fp8": ("fbgemm_gpu=fbgemm-gpu", "accelerate"),
    "fp8": ("accelerate",),
    "fp_quant": ("fp_quant=fp_quant",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "mxfp4": ("accelerate",),
    "quanto": ("optimum.quanto=optimum-quanto", "accelerate"),
    "quark": ("quark=amd-quark",),
    "spqr": ("spqr_quant", "accelerate"),
    "torchao": ("torchao",),
    "vptq": ("vptq", "accelerate"),
}


def check_known(settings: Any, file: Path, methods: Collection[str]) -> None:
    """Raise ConfigError for a method that transformers does not know. It would load the weights as if not quantized.

    file: config.json. methods: the methods that transformers knows.
    """
    with _errors_named(file):
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{FIELD}={json.dumps(settings, default=str)}: must be an object")
        method = settings.get("quant_method")
        if method not in methods and not _loads_in_bits(settings):
            raise ConfigError(f"{FIELD}.quant_method={json.dumps(method, default=str)}: unknown")


def check_settings(settings: Mapping[str, Any], file: Path, *, on_cpu: bool) -> None:
    """Raise ConfigError for settings of quantized weights that are not supported, or need a package that is missing.

    file: config.json. on_cpu: whether the model runs on a CPU, where the engine reads the formats that it knows;
    transformers reads all others.
    """
    with _errors_named(file):
        if on_cpu and settings.get("quant_method") in CHECKS:
            CHECKS[settings["quant_method"]](settings)
        else:
            _check_packages(settings)


@contextmanager
def _errors_named(file: Path) -> Iterator[None]:
    """Make errors inside the context name config.json."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (AttributeError, TypeError) as error:  # a value of another type
        raise ConfigError(f"{file}: {FIELD} is invalid: {error}") from error


def _check_packages(settings: Mapping[str, Any]) -> None:
    method = method_of(settings)
    for requirement in PACKAGES.get(method, ()):
        module, _, package = requirement.partition("=")
        if not _is_installed(module):
            raise ConfigError(
                f"{FIELD}.quant_method={json.dumps(method)}: requires the package {package or module}, which is not"
                " installed"
            )


def method_of(settings: Mapping[str, Any]) -> str:
    """Return the method of a quantization_config. Early models of bitsandbytes do not name theirs."""
    return str(settings.get("quant_method") or ("bitsandbytes" if _loads_in_bits(settings) else "none"))


def _loads_in_bits(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))


def _check_awq(settings: Mapping[str, Any]) -> None:
    _check_one_of(settings, "bits", (4,), 4)
    _check_one_of(settings, "version" if "version" in settings else "format", ("gemm", "GEMM"), "gemm")


def _check_gptq(settings: Mapping[str, Any]) -> None:
    _check_one_of(settings, "bits", (4, 8))
    _check_one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if settings.get("dynamic"):
        raise ConfigError(f"{FIELD}.dynamic: other settings for some layers are not supported on a CPU")


def _check_fp8(settings: Mapping[str, Any]) -> None:
    if (size := settings.get("weight_block_size")) is not None:
        _check_block_size(size, f"{FIELD}.weight_block_size")


def _check_compressed_tensors(settings: Mapping[str, Any]) -> None:
    _check_format(settings.get("format"), f"{FIELD}.format")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ConfigError(f"{FIELD}.sparsity_config: sparse weights are not supported on a CPU")
    if settings.get("transform_config"):
        raise ConfigError(f"{FIELD}.transform_config: transformed weights are not supported on a CPU")
    sizes: list[Any] = []
    for name, group in config_groups(settings).items():
        field = f"{FIELD}.config_groups.{name}"
        if (own := group.get("format")) is not None:
            _check_format(own, f"{field}.format")
        weights = group.get("weights") or {}
        if weights.get("num_bits", 8) not in (4, 8):
            raise ConfigError(f"{field}.weights.num_bits={json.dumps(weights['num_bits'])}: must be 4 or 8 on a CPU")
        if (size := weights.get("block_structure")) is not None:
            _check_block_size(size, f"{field}.weights.block_structure")
            if size not in (sizes or [size]):
                raise ConfigError(f"{field}.weights.block_structure={size}: must be that of the other groups")
            sizes.append(size)


def config_groups(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the groups of layers of compressed-tensors by name."""
    groups = settings.get("config_groups")
    return groups if isinstance(groups, dict) else {}


def _check_one_of(settings: Mapping[str, Any], name: str, allowed: Sequence[Any], default: Any = None) -> None:
    value = settings.get(name, default)
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        shown = ", ".join(json.dumps(choice) for choice in allowed)
        raise ConfigError(f"{FIELD}.{name}={json.dumps(value, default=str)}: must be {shown} on a CPU")


def _check_block_size(size: Any, field: str) -> None:
    """Raise ConfigError if this is not the number of outputs and of inputs that share a scale."""
    is_pair = (
        isinstance(size, list | tuple) and len(size) == 2 and all(type(number) is int and number > 0 for number in size)
    )
    if not is_pair or size[1] % 8:
        raise ConfigError(f"{field}={size}: must be two numbers above 0, the second a multiple of 8")


def _check_format(name: Any, field: str) -> None:
    if name not in CT_FORMATS:
        raise ConfigError(f"{field}={json.dumps(name)}: must be one of {', '.join(CT_FORMATS)} on a CPU")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


# Checks of the settings that are read on a CPU, by quant_method.
CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "awq": _check_awq,
    "gptq": _check_gptq,
    "compressed-tensors": _check_compressed_tensors,
    "fp8": _check_fp8,
    "fbgemm_fp8": _check_fp8,
    "mxfp4": lambda settings: None,
}
