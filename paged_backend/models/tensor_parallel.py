"""Tensor parallelism: the shards of a rank.

transformers shards a model while loading it, following the plan of its architecture (Megatron-LM, Shoeybi et al. 2019:
query, key, value and MLP input projections by columns, output projections by rows). This gives DTensors, and hooks that
wrap and unwrap them at each call. `replace_dtensors` replaces them by plain local tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.models.linear import RowParallelForward

if TYPE_CHECKING:  # imported late, because only ranks need it
    from torch.distributed.tensor import DTensor


def pick_rank_device(device: torch.device, local_rank: int) -> torch.device:
    """Return the device of a rank: rank i of a machine uses its GPU i."""
    return torch.device("cuda", local_rank) if device.type == "cuda" else device


class Ranks(NamedTuple):
    """The numbers of ranks that share the layers of a model, and of stages that divide them."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.tensor * self.pipeline

    @property
    def own(self) -> int:
        """The tensor parallel rank of this process."""
        return dist.get_rank() % self.tensor if dist.is_initialized() else 0


ONE_RANK = Ranks()


def distributed_arguments(ranks: Ranks) -> dict[str, object]:
    """Return the arguments with which `from_pretrained` loads this rank's shards of its stage. Call after `join`."""
    if ranks.size == 1:
        return {}
    from transformers.distributed import DistributedConfig

    sizes = {"tp_size": ranks.tensor} | ({"pp_size": ranks.pipeline} if ranks.pipeline > 1 else {})
    return {"distributed_config": DistributedConfig(**sizes)}


def replace_dtensors(model: PreTrainedModel) -> None:
    """Replace the DTensors of linear layers and embeddings by this rank's shards as plain tensors.

    A column-parallel linear layer becomes an ordinary layer with fewer outputs. A row-parallel layer gets a
    `RowParallelForward`, and the output layer keeps the hook of transformers that gathers. Other sharded modules
    (experts) keep their DTensors.
    """
    from torch.distributed.tensor import DTensor

    shards: dict[Tensor, nn.Parameter] = {}  # shards by DTensor, so that tied weights stay tied
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and isinstance(module.weight, DTensor):
            _replace_embedding(module, shards)
        elif type(module) is nn.Linear and isinstance(module.weight, DTensor):
            group = _group_of(module.weight)
            _replace_parameters(module, shards)
            plan = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
            if plan == "colwise":
                vars(module).pop("forward", None)
                module.out_features = module.weight.shape[0]
            elif plan == "rowwise":
                module.in_features = module.weight.shape[1]
                module.__dict__["forward"] = RowParallelForward(module, group=group)


def _group_of(weight: DTensor) -> dist.ProcessGroup | None:
    """Return the ranks that share a weight; None: all ranks."""
    mesh = weight.device_mesh
    return None if mesh.size() == dist.get_world_size() else mesh.get_group()


def _replace_parameters(module: nn.Module, shards: dict[Tensor, nn.Parameter]) -> None:
    from torch.distributed.tensor import DTensor

    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            if parameter not in shards:
                local = parameter.to_local()
                # A clone, because a view would keep the whole tensor in memory.
                local = local.clone() if local.untyped_storage().nbytes() > local.nbytes else local
                shards[parameter] = nn.Parameter(local, requires_grad=False)
            module.register_parameter(name, shards[parameter])


def _replace_embedding(module: nn.Embedding, shards: dict[Tensor, nn.Parameter]) -> None:
    """Shard an embedding by vocabulary: each rank looks up its own tokens, and the results are summed."""
    from torch.distributed.tensor import DTensor, Shard

    weight = module.weight
    assert isinstance(weight, DTensor)
    if weight.placements != (Shard(0),):
        return
    group = _group_of(weight)
    first = dist.get_rank(group) * -(-weight.shape[0] // dist.get_world_size(group))  # split as in torch.chunk
    _replace_parameters(module, shards)
    module.padding_idx = None  # removes an index of the whole vocabulary, which only affects gradients
    module.forward = _lookup(module, first, len(module.weight), group)


def _lookup(
    module: nn.Embedding, first: int, count: int, group: dist.ProcessGroup | None
) -> Callable[[Tensor], Tensor]:
    """Return the forward function of a shard that holds the rows of tokens first to first + count - 1."""
    embed = type(module).forward  # forward of the subclass, which may scale the embeddings

    def forward(input_ids: Tensor) -> Tensor:  # [..., num_tokens] -> [..., num_tokens, hidden_size]
        local = input_ids - first
        elsewhere = (local < 0) | (local >= count)
        rows = embed(module, local.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        dist.all_reduce(rows, group=group)
        return rows

    return forward
