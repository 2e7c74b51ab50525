"""Tensor parallelism: the shards of a rank.

transformers shards a model while loading it, following the plan of its architecture (Megatron-LM, Shoeybi et al. 2019:
query, key, value and MLP input projections by columns, output projections by rows). This gives DTensors, and hooks that
wrap and unwrap them at each call. `replace_dtensors` replaces them by plain local tensors, in modules that communicate:

    linear layer by columns             nn.Linear with fewer outputs
    linear layer by rows                RowParallelLinear: the ranks' products are summed
    output layer, by columns            GatheredLinear: every rank gets the logits of all
    embedding, by tokens                VocabParallel: the ranks' rows are summed

These can be copied and converted to another data type as any module, which the hooks of transformers cannot.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.models.linear import Ranks, RowParallelLinear

if TYPE_CHECKING:  # imported late, because only ranks need it
    from torch.distributed.tensor import DTensor

GATHERED = ("colwise_gather_output", "colwise_rep")  # plans of transformers whose outputs every rank gets


def pick_rank_device(device: torch.device, local_rank: int) -> torch.device:
    """Return the device of a rank: rank i of a machine uses its GPU i."""
    return torch.device("cuda", local_rank) if device.type == "cuda" else device


class Parallelism(NamedTuple):
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


NOT_PARALLEL = Parallelism()


def distributed_arguments(ranks: Parallelism) -> dict[str, object]:
    """Return the arguments with which `from_pretrained` loads this rank's shards of its stage. Call after `join`."""
    if ranks.size == 1:
        return {}
    from transformers.distributed import DistributedConfig

    sizes = {"tp_size": ranks.tensor} | ({"pp_size": ranks.pipeline} if ranks.pipeline > 1 else {})
    return {"distributed_config": DistributedConfig(**sizes)}


class GatheredLinear(nn.Linear):
    """A linear layer whose outputs are split over ranks, each of which gets the outputs of all."""

    ranks: Ranks
    num_outputs: int  # outputs of all ranks together

    def forward(self, x: Tensor) -> Tensor:  # [..., in_features] -> [..., num_outputs]
        product = super().forward(x)
        widest = -(-self.num_outputs // self.ranks.size)  # split as in torch.chunk
        return self.ranks.gather(F.pad(product, (0, widest - product.shape[-1])))[..., : self.num_outputs]


class VocabParallel(nn.Embedding):
    """A base class of embeddings whose tokens are split over ranks. Each rank looks up its own, and the rows are
    summed."""

    ranks: Ranks
    first: int  # token of the first row of this rank

    def forward(self, input_ids: Tensor) -> Tensor:  # [..., num_tokens] -> [..., num_tokens, hidden_size]
        local = input_ids - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = super().forward(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        return self.ranks.sum(rows)


def replace_dtensors(model: PreTrainedModel) -> None:
    """Replace the DTensors of linear layers and embeddings by this rank's shards as plain tensors. Other sharded
    modules (experts) keep their DTensors."""
    from torch.distributed.tensor import DTensor

    shards: dict[Tensor, nn.Parameter] = {}  # shards by DTensor, so that tied weights stay tied
    for name, module in model.named_modules():
        plan = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if plan == "replicated_with_grad_allreduce":
            vars(module).pop("forward", None)  # is about gradients only
        elif isinstance(module, nn.Embedding) and isinstance(module.weight, DTensor):
            _replace_embedding(module, shards)
        elif type(module) is nn.Linear and isinstance(module.weight, DTensor):
            ranks, num_outputs = _ranks_of(module.weight), module.weight.shape[0]
            _replace_parameters(module, shards)
            if plan not in ("colwise", "rowwise", *GATHERED):
                continue
            vars(module).pop("forward", None)
            module.out_features, module.in_features = module.weight.shape
            if plan == "rowwise":
                _become(module, RowParallelLinear, ranks=ranks)
            elif plan in GATHERED:
                _become(module, GatheredLinear, ranks=ranks, num_outputs=num_outputs)


def _become(module: nn.Module, kind: type[nn.Module], **attributes: object) -> None:
    """Change the class of a module to a subclass of it, and set attributes."""
    module.__class__ = kind
    vars(module).update(attributes)


def _ranks_of(weight: DTensor) -> Ranks:
    """Return the ranks that share a weight."""
    mesh = weight.device_mesh
    return Ranks(None if mesh.size() == dist.get_world_size() else mesh.get_group())


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
    from torch.distributed.tensor import DTensor, Shard

    weight = module.weight
    assert isinstance(weight, DTensor)
    if weight.placements != (Shard(0),):
        return
    ranks = _ranks_of(weight)
    first = ranks.rank * -(-weight.shape[0] // ranks.size)  # split as in torch.chunk
    _replace_parameters(module, shards)
    vars(module).pop("forward", None)
    module.padding_idx = None  # removes an index of the whole vocabulary, which only affects gradients
    # The embedding's own class may scale the rows.
    kind = type(f"VocabParallel{type(module).__name__}", (VocabParallel, type(module)), {})
    _become(module, kind, ranks=ranks, first=first)
