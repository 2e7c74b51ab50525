"""One output: its tokens, text and logprobs, and what has been sent of them."""

from tests.support.in_process import WAIT
from tests.support.streams import LogprobsClient, step_with_logprobs


def test_tokens_after_a_stop_string_have_no_logprobs(opened):
    """The tokens of the stop string itself count as output and have logprobs."""
    responder, _, _ = opened
    client = LogprobsClient(1, stop=["cd"])
    responder.open(client.stream)
    responder.emit(step_with_logprobs(1, "abcdef"))
    assert client.got.get(timeout=WAIT) == ("abcd", [-2.0], True)
