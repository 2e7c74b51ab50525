"""Messages between ranks: what they carry, and that none but a rank's is read."""

import pickle
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from paged_backend.distributed.messages import MessageError, Messages

KEY = b"secret of the ranks"


class Command(Enum):
    STOP = "stop"


class Pair(NamedTuple):
    first: int
    second: str | None


@dataclass(frozen=True, eq=False)
class Inner:
    rows: Tensor
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Step:
    tokens: Tensor
    inner: Inner | None
    pair: Pair
    anything: Any = None


def ends(*kinds, key=KEY):
    return Messages(KEY, "steps", *kinds), Messages(key, "steps", *kinds)


def test_values_arrive_with_their_types():
    sender, receiver = ends(Step, Command, type(None))
    tensors = [
        torch.tensor(3),
        torch.arange(12)[::2],
        torch.zeros(0, 4, dtype=torch.int32),
        torch.tensor([[True], [False]]),
        torch.tensor([float("inf"), 0.1]),
    ]
    for tensor in tensors:
        sent = Step(tensor, Inner(tensor[None], ((1, 2),)), Pair(2**62, "ü"))
        found = receiver.decode(memoryview(sender.encode(sent)))
        assert [type(getattr(found, spec.name)) for spec in fields(Step)] == [Tensor, Inner, Pair, type(None)]
        assert found.tokens.dtype == tensor.dtype and torch.equal(found.tokens, tensor)
        assert torch.equal(found.inner.rows, tensor[None]) and found.inner.pairs == ((1, 2),)
        assert found.pair == (2**62, "ü")
        found.tokens.zero_()  # is not read-only
    assert receiver.decode(memoryview(sender.encode(Command.STOP))) is Command.STOP
    assert receiver.decode(memoryview(sender.encode(None))) is None


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a message ran code",)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: pickle.dumps(Bomb()), id="pickle"),
        pytest.param(lambda data: b"", id="nothing"),
        pytest.param(lambda data: data[:-1], id="cut"),
        pytest.param(lambda data: data[:-1] + bytes([data[-1] ^ 1]), id="changed"),
        pytest.param(lambda data: bytes(Messages(b"another secret", "steps", Command).encode(Command.STOP)), id="key"),
        pytest.param(lambda data: bytes(Messages(KEY, "results", Command).encode(Command.STOP)), id="name"),
    ],
)
def test_message_of_no_rank_is_refused(change):
    sender, receiver = ends(Command)
    with pytest.raises(MessageError, match="is not from a rank of this engine"):
        receiver.decode(memoryview(change(bytes(sender.encode(Command.STOP)))))


def test_message_cannot_be_repeated():
    sender, receiver = ends(Command)
    message = memoryview(sender.encode(Command.STOP))
    receiver.decode(message)
    with pytest.raises(MessageError, match="not the next one"):
        receiver.decode(message)


def test_only_the_given_types_are_read():
    """Also if a rank itself has been taken over."""
    (sender, _), (_, receiver) = ends(Step), ends(Command)
    with pytest.raises(MessageError, match="cannot be read"):
        receiver.decode(memoryview(sender.encode(Step(torch.zeros(1), None, Pair(1, None)))))
    with pytest.raises(TypeError, match="Bomb: cannot be part of a message"):
        sender.encode(Step(torch.zeros(1), None, Pair(1, None), Bomb()))


def test_tensor_outside_of_its_message_is_refused():
    class Forged(NamedTuple):
        tokens: tuple[str, tuple[int, ...], int]

    class Plain(NamedTuple):
        tokens: Tensor

    for tensor in (
        ("<i8", (4,), 0),
        ("<i8", (1,), -8),
        ("<i8", (1,), 2**63 - 4),
        ("<i8", (2**62, 4), 0),
        ("|O", (1,), 0),
    ):
        (sender, _), (_, receiver) = ends(Forged), ends(Plain)
        with pytest.raises(MessageError, match="cannot be read"):
            receiver.decode(memoryview(sender.encode(Forged(tensor))))
