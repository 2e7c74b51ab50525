"""Recurrent layers of transformers models, over a packed batch.

A hybrid model has layers whose mixer keeps a fixed-size state instead of keys and values: Mamba, Mamba 2, a gated delta
net, a short convolution. transformers' mixers read and write that state in a cache object. Here each mixer runs
unchanged, with a cache object of transformers that holds the states of some sequences:

    packed batch    | a | b | c c c c c | d d d |      a, b decode; c continues a prompt; d starts one
    calls           [a, b]    [c c c c c]  [d d d]     2 sequences of 1 row; 1 sequence of 5; 1 of 3
    states          read from their blocks, changed in place, and written back; d's are zero before

The rows arrive in the keyword argument `paged` of the model, as for attention. Not every model passes it on to its
mixers, so they get it from `RecurrentModel`, which runs before the model's own `forward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from paged_backend.kv.cache import LayerState, StateCache, StateShape, TensorShape
from paged_backend.models.attention import AttentionMeta, UnsupportedModel
from paged_backend.models.overrides import Overrides, overridden
from paged_backend.models.state_rows import StateRows

# transformers.models.<key>.modeling_<key>.<value>
MIXERS = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
}
# Mixers whose scan over several tokens always starts from the zero state. They continue a prompt token by token.
SINGLE_STEP = {"falcon_mamba", "jamba", "mamba"}
# What mixers call the cache: the first since transformers 5.24, before that one of the others
CACHE_NAMES = ("cache", "cache_params", "past_key_values")
# Layers that compute every token by itself, so keep nothing.
STATELESS = {"nemotron_h": {"NemotronHMLP", "NemotronHMoE"}}


def recurrent_mixers(model: nn.Module) -> list[nn.Module]:
    """Return the recurrent mixers of a model, in the order of its layers."""
    return [module for module in model.modules() if MIXERS.get(_family(module)) == type(module).__name__]


def is_stateless(layer: nn.Module) -> bool:
    """Return whether a decoder layer without attention and without a recurrent mixer keeps nothing for a sequence."""
    return any(type(module).__name__ in STATELESS.get(_family(module), ()) for module in layer.modules())


def _family(module: nn.Module) -> str:
    """Return the name of a model family in transformers; "" for a class that is defined elsewhere."""
    parts = type(module).__module__.split(".")
    is_modeling = parts[:2] == ["transformers", "models"] and parts[-1] == f"modeling_{parts[2]}"
    return parts[2] if is_modeling else ""


@contextmanager
def record_states(mixers: Sequence[Any]) -> Iterator[dict[int, StateShape]]:
    """Collect the states that each mixer stores in forward passes inside the context, by its index in `mixers`."""
    shapes: dict[int, StateShape] = {}

    def recorder(index: int, mixer: Any) -> Any:
        run = _Call(mixer)

        def forward(hidden_states: Tensor, *args: Any, **rest: Any) -> Tensor:
            layer = LinearAttentionLayer()
            output = run(hidden_states, layer)
            shapes[index] = _shape_of(layer, mixer)
            return output

        return forward

    with overridden({(mixer, "forward"): recorder(index, mixer) for index, mixer in enumerate(mixers)}):
        yield shapes


def _shape_of(layer: LinearAttentionLayer, mixer: nn.Module) -> StateShape:
    conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
    if conv is None:
        raise UnsupportedModel(f"{type(mixer).__name__}: keeps no convolution state")
    return StateShape(_without_batch(conv), None if recurrent is None else _without_batch(recurrent))


def _without_batch(state: Tensor) -> TensorShape:
    return TensorShape(tuple(state.shape[1:]), state.dtype)


class _Call:
    """Calls a mixer's own `forward` with a cache object."""

    def __init__(self, mixer: Any) -> None:
        self._forward = mixer.forward
        self._layer_idx = mixer.layer_idx
        parameters = signature(mixer.forward).parameters
        names = [name for name in CACHE_NAMES if name in parameters]
        if len(names) != 1:
            raise UnsupportedModel(f"{type(mixer).__name__}: takes no cache as {' or '.join(CACHE_NAMES)}")
        self._cache_name = names[0]

    def __call__(self, hidden_states: Tensor, layer: LinearAttentionLayer) -> Tensor:
        # The mixer only looks at its own layer.
        cache = Cache(layers=[layer] * (self._layer_idx + 1))
        output: Tensor = self._forward(hidden_states, **{self._cache_name: cache})
        return output


def _cache_layer(conv: Tensor, recurrent: Tensor | None, *, is_start: bool) -> LinearAttentionLayer:
    """Return a layer of transformers' cache that updates these states in place. is_start: whether they are to be
    overwritten without being read."""
    layer = LinearAttentionLayer()
    layer.dtype, layer.device = conv.dtype, conv.device
    layer.conv_states[0], layer.is_conv_states_initialized[0] = conv, True
    layer.conv_kernel_size[0] = conv.shape[-1]
    if recurrent is not None:
        layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = recurrent, True
    layer.has_previous_state[0] = not is_start
    return layer


class _Batch(NamedTuple):
    """Rows of a step that a mixer computes in one call, of one sequence or one row each of several."""

    rows: slice | Tensor | None  # None: all rows of the step
    sources: Tensor  # [num_sequences, num_units] int64: the units of the states before the rows
    targets: Tensor  # those of the states after them
    is_chunk: bool = False
    is_start: bool = False  # whether the states before the rows are zero


def _batches(rows: StateRows, states: StateCache) -> list[_Batch]:
    """Return the batches of a step, in the order in which they are computed."""
    batches = []
    for chunk in rows.chunks:
        span, units = slice(chunk.first_row, chunk.first_row + chunk.length), states.units_of(chunk.pages)
        batches.append(_Batch(span, units, units, is_chunk=True, is_start=chunk.is_start))
    for decode in rows.decodes:
        units = states.units_of(decode.sources)
        batches.append(_Batch(decode.rows, units, units if decode.targets is None else states.units_of(decode.targets)))
    return batches


class RecurrentModel:
    """The `forward` of a model with recurrent layers, which keeps the batches of a step for its mixers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._forward = model.forward
        self.batches: list[_Batch] | None = None  # of the forward pass in progress
        self.states: StateCache | None = None

    def __call__(self, *args: Any, paged: AttentionMeta, **rest: Any) -> Any:
        """Run a forward pass over a packed batch."""
        assert self.batches is None, "forward passes of a model do not nest"
        self.states = paged.kv.states
        if self.states is not None and paged.state_rows is not None:
            self.batches = _batches(paged.state_rows, self.states)
        try:
            return self._forward(*args, paged=paged, **rest)
        finally:
            self.batches = None


class RecurrentMixer:
    """The `forward` of a recurrent mixer, over a packed batch."""

    def __init__(
        self, mixer: Any, model: RecurrentModel, index: int, shape: StateShape, *, batch_invariant: bool = False
    ) -> None:
        """index: the number of the mixer in the state cache. batch_invariant: compute one row after the other; a
        row then depends neither on other sequences nor on how a prompt is split."""
        self._call, self._model, self._index = _Call(mixer), model, index
        self._name = type(mixer).__name__
        self._single_step = batch_invariant or _family(mixer) in SINGLE_STEP
        self._single_rows = batch_invariant
        self.shape = shape

    def __call__(
        self,
        hidden_states: Tensor,  # [1, num_tokens, hidden]
        *args: Any,
        attention_mask: None = None,
        **rest: Any,  # arguments of transformers' own kernels, for batches that are not paged
    ) -> Tensor:  # [1, num_tokens, hidden]
        batches, states = self._model.batches, self._model.states
        if batches is None or states is None:
            raise UnsupportedModel(f"{self._name}: the step has no states")
        if attention_mask is not None:
            raise UnsupportedModel(f"{self._name}: gets an attention mask")
        state = states.layers[self._index]
        parts: list[tuple[slice | Tensor, Tensor]] = []  # rows, and their outputs [num_rows, hidden]
        for batch in batches:
            if batch.rows is None:
                return self._run(hidden_states.transpose(0, 1), batch, state).transpose(0, 1)
            if batch.is_chunk:
                output = self._run(hidden_states[:, batch.rows], batch, state)[0]
            else:
                output = self._run(hidden_states[0, batch.rows, None], batch, state)[:, 0]
            parts.append((batch.rows, output))
        outputs = hidden_states.new_empty(1, hidden_states.shape[1], parts[0][1].shape[1], dtype=parts[0][1].dtype)
        for of_part, output in parts:
            outputs[0, of_part] = output
        return outputs

    def _run(self, hidden_states: Tensor, batch: _Batch, state: LayerState) -> Tensor:
        """Compute a batch, [num_sequences, num_rows, hidden], and store the states after it."""
        if self._single_rows and len(hidden_states) > 1:
            units = zip(batch.sources.split(1), batch.targets.split(1), strict=True)
            rows = zip(hidden_states.split(1), units, strict=True)
            return torch.cat([self._run(row, _Batch(None, *of_row), state) for row, of_row in rows])
        conv = state.conv.read(batch.sources)
        recurrent = state.recurrent.read(batch.sources) if state.recurrent else None
        layer = _cache_layer(conv, recurrent, is_start=batch.is_start)
        if batch.is_chunk and self._single_step and (not batch.is_start or self._single_rows):
            output = torch.cat([self._call(token, layer) for token in hidden_states.split(1, dim=1)], dim=1)
        else:
            output = self._call(hidden_states, layer)
        state.conv.write(batch.targets, conv)
        if state.recurrent and recurrent is not None:
            state.recurrent.write(batch.targets, recurrent)
        return output


def over_packed_batches(
    model: PreTrainedModel, mixers: Sequence[Any], shapes: Sequence[StateShape], *, batch_invariant: bool = False
) -> Overrides:
    """Make the mixers of a model run over packed batches. shapes: the shapes of the states of each mixer."""
    if not mixers:
        return {}
    whole = RecurrentModel(model)
    overrides: Overrides = {(model, "forward"): whole}
    for index, (mixer, shape) in enumerate(zip(mixers, shapes, strict=True)):
        overrides[mixer, "forward"] = RecurrentMixer(mixer, whole, index, shape, batch_invariant=batch_invariant)
    return overrides


def state_shapes(model: nn.Module) -> tuple[StateShape, ...]:
    """Return the states that the recurrent layers of a model keep for a sequence. It must run over packed batches."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return tuple(forward.shape for forward in forwards if isinstance(forward, RecurrentMixer))
