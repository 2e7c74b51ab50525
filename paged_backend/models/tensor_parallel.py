"""Tensor parallelism: the processes that share a model, what they agree on, and what each keeps of the model.

transformers shards a model while it loads it, by the plan that its architecture brings (Megatron's, Shoeybi et al.
2019: projections into heads and into the MLP by columns, those out of them by rows). What it leaves are DTensors and
hooks that wrap them at each call; `localise` puts plain tensors in their place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig, PreTrainedModel

from paged_backend.api.config import ConfigError, EngineConfig

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # for the slowest process to read its weights, or to compute a step
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True, eq=False)
class TensorParallelGroup:
    """The processes that share a model, as one of them sees them. Each must call the same methods in the same order."""

    device: torch.device
    rank: int = 0
    size: int = 1

    def join(self, rendezvous: Path) -> None:
        """Meet the others over a file, and wait until all are there. Raises RuntimeError after ten minutes."""
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            init_method=f"file://{rendezvous}",
            rank=self.rank,
            world_size=self.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.device if gpu else None,
        )

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self) -> None:
        """Have what waits for a rank that is gone fail instead. From any thread."""
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()  # gloo notices a closed connection by itself

    def all_reduce_min(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        if self.size == 1:
            return number
        agreed = torch.tensor(number, device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return int(agreed)

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Overwrite `tokens`, on the device, with rank 0's. Waits for nothing on a GPU."""
        if self.size > 1 and tokens.numel():
            dist.broadcast(tokens, 0)


def pick_rank_device(device: torch.device, rank: int) -> torch.device:
    return torch.device("cuda", rank) if device.type == "cuda" else device


def check_devices(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError for more ranks than GPUs."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size={size}: must be at most {torch.cuda.device_count()}, the GPUs that are visible"
        )
    if device.type == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            f'tensor_parallel_size={size}: on device="cpu" only where no GPU is visible (CUDA_VISIBLE_DEVICES="")'
        )


def check_model(config: EngineConfig, hf_config: PretrainedConfig) -> None:
    """Raises ConfigError for a model that cannot be split among so many ranks."""
    size, text = config.tensor_parallel_size, hf_config.get_text_config()
    if size == 1:
        return
    if not text.base_model_tp_plan:
        raise ConfigError(
            f"tensor_parallel_size={size}: must be 1, since transformers has no tensor parallel plan for"
            f" {text.model_type}"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None) or text.num_attention_heads
        if isinstance(heads, int) and heads % size:
            raise ConfigError(f"tensor_parallel_size={size}: must divide {heads}, the model's {name}")


def distributed_arguments(config: EngineConfig) -> dict[str, object]:
    """What `from_pretrained` needs so that each rank reads its share of the weights. After `Ranks.join`."""
    if config.tensor_parallel_size == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=config.tensor_parallel_size)}


def replace_dtensors(model: PreTrainedModel) -> None:
    """Have linear layers and embeddings hold their share of the weights as plain tensors.

    A linear layer by columns becomes one of fewer columns and nothing else; by rows it keeps the hook of transformers
    that sums over the ranks, and the output layer that which gathers. What else is sharded (experts) stays a DTensor.
    """
    shares: dict[Tensor, nn.Parameter] = {}  # tied weights stay tied
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and isinstance(module.weight, DTensor):
            _localise_embedding(module, shares)
        elif type(module) is nn.Linear and isinstance(module.weight, DTensor):
            _localise_parameters(module, shares)
            if model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) == "colwise":
                vars(module).pop("forward", None)
                module.out_features = module.weight.shape[0]


def _localise_parameters(module: nn.Module, shares: dict[Tensor, nn.Parameter]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            if parameter not in shares:
                local = parameter.to_local()
                # It may be a view of the whole, which would stay in memory.
                local = local.clone() if local.untyped_storage().nbytes() > local.nbytes else local
                shares[parameter] = nn.Parameter(local, requires_grad=False)
            module.register_parameter(name, shares[parameter])


def _localise_embedding(module: nn.Embedding, shares: dict[Tensor, nn.Parameter]) -> None:
    """Each rank looks up the tokens of its part of the vocabulary, and they add up what they found."""
    weight = module.weight
    assert isinstance(weight, DTensor)
    if weight.placements != (Shard(0),):
        return
    first = dist.get_rank() * -(-weight.shape[0] // dist.get_world_size())  # as torch.chunk cuts it
    _localise_parameters(module, shares)
    module.padding_idx = None  # of the whole vocabulary, and of no use without gradients
    module.forward = _lookup(module, first, len(module.weight))  # type: ignore[method-assign]


def _lookup(module: nn.Embedding, first: int, count: int) -> Callable[[Tensor], Tensor]:
    plain = type(module).forward  # a subclass may scale what it finds

    def forward(input_ids: Tensor) -> Tensor:  # [..., num_tokens] -> [..., num_tokens, hidden_size]
        local = input_ids - first
        elsewhere = (local < 0) | (local >= count)
        found = plain(module, local.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        dist.all_reduce(found)
        return found

    return forward
