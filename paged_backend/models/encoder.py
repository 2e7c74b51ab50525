"""Sentence encoders, such as BERT, behind the interface of a decoder.

An encoder's tokens attend to later ones, so a prompt is computed in one step and nothing of it is kept. Its embedding
takes the place of the last token's hidden state. The layers run unmodified, over batches of padded sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from paged_backend.models.attention import AttentionMeta

LEAST_FILLED = 0.7  # least length of a sequence in a padded batch, relative to the longest
MOST_PADDED_TOKENS = 8192  # tokens of a padded batch of several sequences, which bounds the memory of activations


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask).sum(1) / mask.sum(1)


def _max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask == 0, float("-inf")).amax(1)


def _last(states: Tensor, mask: Tensor) -> Tensor:
    ends = mask[..., 0].sum(1).long() - 1
    return states[torch.arange(len(states), device=states.device), ends]


# From float32 states [num_seqs, length, hidden_size] and a mask [num_seqs, length, 1] of the tokens that are not
# padding to embeddings [num_seqs, hidden_size].
POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda states, mask: states[:, 0],
    "lasttoken": _last,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": lambda states, mask: (states * mask).sum(1) / mask.sum(1).sqrt(),
}


class Embedder(nn.Module):
    """Computes the embedding of each sequence of a packed batch."""

    def __init__(self, layers: PreTrainedModel, pooling: str) -> None:
        """pooling: a key of POOLINGS."""
        super().__init__()
        self.layers = layers
        self._pool = POOLINGS[pooling]
        self._pad_id = getattr(layers.config, "pad_token_id", None) or 0

    def forward(self, input_ids: Tensor, ends: Sequence[int]) -> BaseModelOutput:
        """Return hidden states [1, num_tokens, hidden_size] float32: the embedding at the last token of each sequence,
        zeros elsewhere. input_ids: [1, num_tokens]. ends: row after the last token of each sequence."""
        sequences = [input_ids[0, start:end] for start, end in zip((0, *ends), ends, strict=False)]
        embedded = [(batch, self.embed([sequences[index] for index in batch])) for batch in batches(sequences)]
        states = embedded[0][1].new_zeros(1, input_ids.shape[1], embedded[0][1].shape[1])
        for batch, embeddings in embedded:
            states[0, [ends[index] - 1 for index in batch]] = embeddings
        return BaseModelOutput(last_hidden_state=states)

    def embed(self, sequences: list[Tensor], *, pad_id: int | None = None) -> Tensor:
        """Return embeddings [num_seqs, hidden_size] float32 of sequences of token ids. pad_id: a token to pad with
        instead of the model's; embeddings must not depend on it."""
        padding = self._pad_id if pad_id is None else pad_id
        padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=padded.device)
        mask = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        states = self.layers(input_ids=padded, attention_mask=mask.long()).last_hidden_state
        return self._pool(states.float(), mask[..., None].float())


class Encoder(nn.Module):
    """An encoder that takes the arguments of a decoder. It has no logits: it returns zeros for the rows that are asked
    for, over a vocabulary of one token."""

    def __init__(self, layers: PreTrainedModel, pooling: str) -> None:
        super().__init__()
        self.config = layers.config
        self.generation_config = None
        self.base_model = Embedder(layers, pooling)

    @property
    def device(self) -> torch.device:
        return self.base_model.layers.device

    @property
    def dtype(self) -> torch.dtype:
        return self.base_model.layers.dtype

    @property
    @torch.inference_mode()
    def hidden_size(self) -> int:
        """The size of an embedding."""
        return self.base_model.embed([torch.ones(2, dtype=torch.int64, device=self.device)]).shape[1]

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor, paged: AttentionMeta, **unused: Any) -> CausalLMOutput:
        """Compute the embeddings of a packed batch. Hooks of `base_model` get them."""
        self.base_model(input_ids, paged.pagings[0].query_starts[1:].tolist())
        return CausalLMOutput(logits=torch.zeros(1, len(logits_to_keep), 1, device=input_ids.device))


def batches(sequences: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of sequences that are padded to the same length, the longest first."""
    batch: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda index: -len(sequences[index])):
        longest = len(sequences[batch[0]]) if batch else 0
        if batch and (
            len(sequences[index]) < LEAST_FILLED * longest or (len(batch) + 1) * longest > MOST_PADDED_TOKENS
        ):
            yield batch
            batch = []
        batch.append(index)
    yield batch
