"""Check log probabilities against transformers."""

from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch


def check(model, prompt, tokens, told, count):
    """Hold what was told of generated tokens against the model's own logits, computed at once."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    log_probs = logits.log_softmax(-1)
    assert len(told) == len(tokens)
    for token, row, expected, (drawn, *others) in zip(tokens, logits, log_probs, told, strict=True):
        best = expected.topk(count).indices.tolist()
        assert [drawn.token, *(one.token for one in others)] == [token, *(one for one in best if one != token)]
        for one in (drawn, *others):
            assert one.logprob == pytest.approx(expected[one.token].item(), abs=1e-4)
            assert one.rank == 1 + (row > row[one.token]).sum().item()


class Caller(SimpleQueue):
    """A request of the server's and its way back: whether each answer is an error."""

    def __init__(self, **inputs):
        self.tensors = [
            SimpleNamespace(name=lambda name=name: name, as_numpy=lambda value=value: np.array([value]))
            for name, value in inputs.items()
        ]
        self.inputs, self.get_response_sender = lambda: self.tensors, lambda: self
        self.parameters, self.is_cancelled = lambda: "", lambda: False
        self.timeout = self.correlation_id = self.flags = lambda: 0
        self.request_id = lambda: ""

    def send(self, response, flags):
        self.put(response[1] is not None)
