"""Classification requests: their form, and what is computed from the hidden state."""

import json
from array import array
from dataclasses import replace

import numpy as np
import pytest

from paged_backend.api.errors import RequestError
from paged_backend.api.limits import ClassificationSpec, EngineLimits, InputLimits
from paged_backend.server.wire.pooling import ClassificationCall
from tests.support.callers import serving
from tests.support.classifiers import TEMPLATE, save_classifier
from tests.support.wire_requests import read as read_request
from tests.support.wire_requests import text

SPEC = ClassificationSpec(("a", "b"), "softmax", np.array([[1, 0], [0, 2]], np.float32))
LIMITS = EngineLimits(64, 320, 256, 4, 8, classification=SPEC)
TURN = {"role": "user", "content": "Hi"}


def read(limits=LIMITS, **request):
    return ClassificationCall.parse(request, InputLimits()).checked(limits)


@pytest.mark.parametrize(
    ("activation", "use", "probs"),
    [
        ("softmax", True, [1 / (1 + np.e), np.e / (1 + np.e)]),
        ("sigmoid", True, [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-2))]),
        ("none", True, [1, 2]),
        ("softmax", False, [1, 2]),
    ],
)
def test_activations(activation, use, probs):
    limits = replace(LIMITS, classification=replace(SPEC, activation=activation))
    answer = json.loads(read(limits, input="x", pooling_params={"use_activation": use}).answer(array("f", [1, 1])))
    assert answer["label"] == "b"
    assert answer["probs"] == pytest.approx(probs)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_large_scores_do_not_overflow(activation):
    limits = replace(LIMITS, classification=replace(SPEC, activation=activation))
    answer = json.loads(read(limits, input="x").answer(array("f", [-1e30, 1e30])))
    assert answer["probs"] == [0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_hidden_states_that_are_not_finite_have_no_classes(bad):
    with pytest.raises(ValueError, match="not finite"):
        read(input="x").answer(array("f", [bad, 0.0]))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "classification_request: none is given; give exactly one of input, messages, or query with document"),
        ({"input": "a", "messages": [TURN]}, "classification_request: input and messages are given; "),
        ({"query": "a"}, "classification_request: query are given; "),
        ({"input": ""}, "classification_request.input="),
        ({"input": 5}, "classification_request.input=5: must be a valid Unicode string or a list of token ids"),
        ({"input": [5, 320]}, r"classification_request.input\[1\]=320: must be a token id, 0..319"),
        ({"messages": []}, "messages"),
        ({"query": "a", "document": ""}, "classification_request.document="),
        (
            {"query": "a", "document": "b"},
            "classification_request.query=.*: the model has 2 labels; scores need a model with one; classifying a pair"
            " needs the engine option chat_template",
        ),
        ({"input": "a", "top_n": 1}, "classification_request.top_n=1: unknown; known are input"),
        ({"input": "a", "pooling_params": 1}, "classification_request.pooling_params=1: must be a JSON object"),
        ({"input": "a", "pooling_params": {"x": 1}}, "classification_request.pooling_params.x=1: unknown"),
        (
            {"input": "a", "pooling_params": {"use_activation": 1}},
            "classification_request.pooling_params.use_activation=1: must be true or false",
        ),
    ],
)
def test_invalid_requests_name_the_field(request_, message):
    with pytest.raises(RequestError, match=message):
        read(**request_)


def test_pairs_need_a_template():
    one = ClassificationSpec(("a",), "sigmoid", np.array([[1, 0]], np.float32))
    with pytest.raises(RequestError, match=r"classification_request.query=.*: needs the engine option chat_template"):
        read(replace(LIMITS, classification=one), query="a", document="b")


def test_a_request_that_is_no_object_is_rejected():
    with pytest.raises(RequestError, match=r"classification_request=.*must be a JSON object"):
        read_request(classification_request=text("[]"))


def test_models_that_do_not_classify_reject_the_request():
    with pytest.raises(RequestError, match="classification_request: this model does not classify"):
        read(replace(LIMITS, classification=None), input="a")


def test_other_inputs_are_rejected():
    for beside in ({"text_input": text("a")}, {"return_logprobs": np.array([True])}):
        with pytest.raises(RequestError, match=f"{next(iter(beside))}: has no effect with classification_request"):
            read_request(classification_request=text('{"input": "a"}'), **beside)


def test_prompts_are_rendered_and_text_is_not_generated(tmp_path):
    save_classifier(tmp_path)
    with serving(tmp_path, chat_template=TEMPLATE) as service:

        def ask(**fields):
            (answer,) = service.ask(classification_request=json.dumps(fields))["text_output"]
            return json.loads(answer)["probs"]

        pair = ask(query="Sea?", document="Blue.")
        assert pair == pytest.approx(ask(input="query: Sea?\ndocument: Blue.\n"), rel=1e-4)
        assert pair != pytest.approx(ask(query="Sea?", document="Red."), rel=1e-4)
        assert ask(messages=[TURN]) == pytest.approx(ask(input="user: Hi\n"), rel=1e-4)
        refused = service.call(text_input="a").rejection()
        assert "text_input: this model classifies prompts and generates no text" in refused
