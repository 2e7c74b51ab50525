"""Check log probabilities against transformers."""

from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.pb_utils import untraced


def check(model, prompt, tokens, logprobs, count):
    """Compare the log probabilities of generated tokens with the model's own logits."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    log_probs = logits.log_softmax(-1)
    assert len(logprobs) == len(tokens)
    for token, row, expected, (sampled, *others) in zip(tokens, logits, log_probs, logprobs, strict=True):
        best = expected.topk(count).indices.tolist()
        assert [sampled.token, *(entry.token for entry in others)] == [
            token,
            *(other for other in best if other != token),
        ]
        for entry in (sampled, *others):
            assert entry.logprob == pytest.approx(expected[entry.token].item(), abs=1e-4)
            assert entry.rank == 1 + (row > row[entry.token]).sum().item()


class Caller(SimpleQueue):
    """A Triton request that is also its own response sender. Receives whether each response is an error."""

    def __init__(self, **inputs):
        self.tensors = [
            SimpleNamespace(name=lambda name=name: name, as_numpy=lambda value=value: np.array([value]))
            for name, value in inputs.items()
        ]
        self.inputs, self.get_response_sender = lambda: self.tensors, lambda: self
        self.parameters, self.is_cancelled = lambda: "", lambda: False
        self.timeout = self.correlation_id = self.flags = lambda: 0
        self.trace = untraced
        self.request_id = lambda: ""

    def send(self, response, flags):
        self.put(response[1] is not None)
