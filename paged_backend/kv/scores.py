"""The optional outputs of the prompt tokens of a cached block, so that later requests need not compute them again.

They are kept with blocks only if the engine computes the same logits for the same tokens in every batch. The first
token of a block is scored from the logits of the position before the block:

    position of the logits     3    4    5    6   |  7    8 ...
    token that they score      4    5    6    7   |  8    9 ...
                            |<---- block 1 ---->|
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paged_backend.api.token_outputs import TOKEN_OUTPUTS, Requested, Values


class _Packed(NamedTuple):
    """The values of one output, in little memory."""

    num_top: int  # how many of the most likely tokens they describe
    values: Any


class BlockScores:
    """The values of the tokens of a block, by output."""

    def __init__(self, packed: Mapping[str, _Packed]):
        self._packed = packed

    @classmethod
    def of(cls, requested: Requested, values: Values) -> BlockScores:
        """Return the scores of a request: for each output that it requested, the values of all tokens of the block."""
        return cls({name: _Packed(top, TOKEN_OUTPUTS[name].pack(values[name])) for name, top in requested.items()})

    def cover(self, requested: Requested) -> bool:
        """Return whether a request finds all values that it needs."""
        return all(name in self._packed and top <= self._packed[name].num_top for name, top in requested.items())

    def values(self, requested: Requested) -> Values:
        """Return the values that a request needs, which these scores cover."""
        found = {}
        for name, top in requested.items():
            output = TOKEN_OUTPUTS[name]
            found[name] = [output.narrowed(value, top) for value in output.unpack(self._packed[name].values)]
        return found

    def merged(self, other: BlockScores | None) -> BlockScores:
        """Return scores that cover what either of the two covers."""
        if other is None:
            return self
        names = self._packed.keys() | other._packed.keys()
        most = {name: [one._packed[name] for one in (self, other) if name in one._packed] for name in names}
        return BlockScores({name: max(found, key=lambda one: one.num_top) for name, found in most.items()})
