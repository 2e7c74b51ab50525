"""The config.pbtxt of each model, from the table of its tensors. `python -m paged_backend.trtllm.configs` writes them
into model_repository/."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paged_backend.trtllm.tensors import INPUTS, LLMAPI, MAX_BATCH_SIZE, OUTPUTS

_HEAD = """\
# Written by `python -m paged_backend.trtllm.configs` from the tables in paged_backend/trtllm/tensors.py, which say what
# becomes of each tensor. Names, types and dims are those of {whose}.
{first}
backend: "python"
max_batch_size: {batch}
model_transaction_policy {{ decoupled: {decoupled} }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters [
  {{ key: "engine_model_name" value {{ string_value: "paged_llm" }} }},  # the model that generates
  {{ key: "interface" value {{ string_value: "{name}" }} }}
]
"""
_LLMAPI_HEAD = """\
# The directory's name is the model's: clients call theirs tensorrt_llm. With `decoupled: true` it streams, and of
# the calls that wait for one response the server takes `generate` alone."""


def config(name: str) -> str:
    """The text of the model's config.pbtxt."""
    inputs = [
        _tensor(tensor, one.data_type, one.dims, "" if one.required else "  optional: true")
        for tensor, one in INPUTS[name].items()
    ]
    outputs = [_tensor(tensor, one.data_type, one.dims) for tensor, one in OUTPUTS[name].items()]
    newer = name == LLMAPI
    head = _HEAD.format(
        name=name,
        whose="TensorRT-LLM's model of the LLM API" if newer else "tensorrtllm_backend's model of this name",
        first=_LLMAPI_HEAD if newer else f'name: "{name}"',
        batch=0 if newer else MAX_BATCH_SIZE,
        decoupled="false" if newer else "true",
    )
    return head + _list("input", inputs) + _list("output", outputs)


def _tensor(name: str, data_type: str, dims: Iterable[int], more: str = "") -> str:
    return f'  {{ name: "{name}"  data_type: {data_type}  dims: [ {", ".join(map(str, dims))} ]{more} }}'


def _list(name: str, entries: Iterable[str]) -> str:
    return f"\n{name} [\n" + ",\n".join(entries) + "\n]\n"


def main() -> None:
    repository = Path(__file__).resolve().parents[2] / "model_repository"
    for name in INPUTS:
        (repository / name).mkdir(exist_ok=True)
        (repository / name / "config.pbtxt").write_text(config(name))


if __name__ == "__main__":
    main()
