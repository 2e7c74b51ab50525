"""Which input a prompt came in."""

import json

import numpy as np
import pytest

from tests.support.wire_requests import read, text

PROMPTS = {
    "text_input": text("x"),
    "messages": text(json.dumps([{"role": "user", "content": "x"}])),
    "input_ids": np.array([5], np.int32),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompts_input_is_named_and_a_prompt_continues_the_session(name):
    call = read({"sequence_id": 7, "sequence_end": True}, **{name: PROMPTS[name]})
    assert (call.prompt_field, call.only_ends_session) == (name, False)


def test_a_call_without_a_prompt_only_ends_its_session():
    assert read({"sequence_id": 7, "sequence_end": True}).only_ends_session
