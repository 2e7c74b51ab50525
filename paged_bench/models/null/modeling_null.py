"""A model that computes nothing, to measure the cost of serving alone.

The next token is looked up in a table by its position. The single attention layer exists only for the load-time check,
which has to see all layers: no logit depends on it, and steps of the engine (`paged`) skip it. With `step_seconds` in
its configuration a step takes that long without holding the GIL, as a step on a GPU does.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WIDTH = 512  # logits per row, less than a vocabulary, because sampling takes time as well
FIRST = 300  # first token to generate: the tokens before it are single bytes and special tokens in BPE vocabularies
PERIOD = 64  # positions after which the tokens repeat


class NullConfig(PretrainedConfig):
    model_type = "paged_null"
    step_seconds = 0.0


class NullAttention(nn.Module):
    layer_idx = 0
    is_causal = True


class NullForCausalLM(PreTrainedModel):
    config_class = NullConfig
    _supports_attention_backend = True
    _supports_sdpa = True
    generation_config = None

    def __init__(self, config: NullConfig):
        super().__init__(config)
        self.attention = NullAttention()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(FIRST, WIDTH, (PERIOD,), generator=generator)
        self.table = nn.Parameter(torch.zeros(PERIOD, WIDTH).scatter_(1, tokens[:, None], 1.0), requires_grad=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the table is the only weight."""

    def forward(
        self,
        input_ids: Tensor,  # [1, num_tokens]
        position_ids: Tensor | None = None,  # [1, num_tokens]
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if "paged" not in kwargs:
            self._attend(input_ids, position_ids)
        elif self.config.step_seconds:
            time.sleep(self.config.step_seconds)
        if isinstance(logits_to_keep, Tensor):
            position_ids = position_ids[:, logits_to_keep]
        return CausalLMOutputWithPast(logits=self.table[position_ids % PERIOD])

    def _attend(self, input_ids: Tensor, position_ids: Tensor) -> None:
        hidden = torch.zeros(1, input_ids.shape[1], self.config.hidden_size, device=self.device, dtype=self.dtype)
        mask = create_causal_mask(self.config, hidden, None, None, position_ids)  # the 4th has had several names
        heads = hidden[:, None]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _nothing)
        attend(self.attention, heads, heads, heads, mask, scaling=1.0, dropout=0.0)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing. This is the attention of the model outside of the engine."""
