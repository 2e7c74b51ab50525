"""Tests of /classify, /score and /rerank with a fake server."""

import json

import pytest

from tests.support.gateway import gateway, recording_server


@pytest.fixture(scope="module")
def fake():
    """Score a prompt by its length; with two labels for a prompt of token ids."""
    with recording_server() as seen:

        def script(inputs):
            asked = json.loads(inputs["classification_request"])
            for field in ("query", "document"):
                if asked.get(field) == "":
                    reason = f'INVALID_ARGUMENT: classification_request.{field}="": must be text'
                    return {"say": [], "fail": reason}
            if asked.get("document") == "without template":
                reason = "the model has 2 labels; scores need a model with one; classifying a pair needs the engine"
                return {"say": [], "fail": f'INVALID_ARGUMENT: classification_request.query="a": {reason} option …'}
            if asked.get("document") == "bad":
                return {"say": [], "fail": "INVALID_ARGUMENT: prompt_tokens=9: must be 1..8"}
            prompt = asked.get("input") or asked.get("document") or asked["messages"][0]["content"]
            probs = [0.25, 0.75] if isinstance(prompt, list) or "labels" in prompt else [len(prompt) / 8]
            return {"say": [json.dumps({"label": "good", "probs": probs})]}

        seen.scripted_response = script
        yield seen


@pytest.fixture(scope="module")
def front(fake):
    with gateway(fake.url) as made:
        yield made


PAIRS = [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]


def ask(front, path, **fields):
    return front.ask(path, {"model": "paged_llm", **fields})


def request_of(fake):
    return json.loads(fake.requests[-1]["classification_request"])


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classify(front, fake, path):
    status, body = ask(front, path, input=[[5, 6], [7]], priority=2)
    assert (status, body["object"], body["model"]) == (200, "list", "paged_llm")
    one = {"label": "good", "probs": [0.25, 0.75], "num_classes": 2}
    assert body["data"] == [{"index": 0, **one}, {"index": 1, **one}]
    assert body["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
    assert json.loads(fake.requests[-1]["sampling_parameters"]) == {"priority": 2}
    assert request_of(fake)["pooling_params"] == {"use_activation": True}


@pytest.mark.parametrize("name", ["use_activation", "activation"])
def test_scores_instead_of_probabilities(front, fake, name):
    assert ask(front, "/classify", input="four", **{name: False})[0] == 200
    assert request_of(fake) == {"input": "four", "pooling_params": {"use_activation": False}}


def test_conversations_are_classified(front, fake):
    turn = {"role": "user", "content": "four"}
    assert ask(front, "/classify", messages=[turn])[1]["data"][0]["probs"] == [0.5]
    assert request_of(fake)["messages"] == [turn]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize("queries", ["q", ["q"], ["q", "q"]])
def test_score(front, path, names, queries):
    status, body = ask(front, path, **dict(zip(names, (queries, ["four", "six666"]), strict=True)))
    assert status == 200
    assert body["data"] == [
        {"index": 0, "object": "score", "score": 0.5},
        {"index": 1, "object": "score", "score": 0.75},
    ]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(front, fake, path):
    documents = ["one", {"text": "longest"}, "four"]
    status, body = ask(front, path, query="q", documents=documents)
    assert status == 200
    assert [one["index"] for one in body["results"]] == [1, 2, 0]
    assert body["results"][0] == {"index": 1, "document": {"text": "longest"}, "relevance_score": 0.875}
    assert body["usage"]["total_tokens"] == 21
    body = ask(front, path, query="q", documents=documents, top_n=1, return_documents=False)[1]
    assert body["results"] == [{"index": 1, "relevance_score": 0.875}]


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/classify", {}, "input", "input: give either input or messages"),
        ("/classify", {"input": "a", "messages": []}, "input", "input: give either input or messages"),
        (
            "/classify",
            {"input": "a", "activation": True, "use_activation": True},
            "activation",
            "activation: is another name",
        ),
        ("/classify", {"input": ["a"] * 2049}, "input", "input: has 2049 inputs; must be at most 2048 (--max-inputs)"),
        ("/score", {}, "text_1", "text_1: is missing; give text_1 and text_2, or data_1 and data_2, or queries and"),
        ("/score", {"text_2": "a"}, "text_2", "text_2: is given alone; give text_1 and text_2, or data_1 and data_2"),
        ("/score", {"text_2": "a", "queries": ["b"]}, "text_2", "text_2: is given with queries; give text_1 and"),
        (
            "/score",
            {"queries": "a", "documents": "b", "items": "c"},
            "queries",
            "queries: is given with documents and items; give",
        ),
        ("/score", {"data_1": ["a", "b"], "data_2": ["c"]}, "data_1", "data_1: 2 texts for 1 in data_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1: 2 texts for 1 in text_2"),
        ("/score", {"text_1": "a", "text_2": []}, "text_1", "text_1: 1 texts for 0 in text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents=[]: "),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n=-1: must be at least 0"),
        ("/rerank", {"query": "a", "documents": ["b", "bad"]}, "documents[1]", "documents[1]: prompt_tokens=9"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc",
            "max_tokens_per_doc=9: not supported; shorten the documents, or let truncate_prompt_tokens",
        ),
        (
            "/rerank",
            {"query": "a", "documents": ["b", {"image": "x"}]},
            "documents[1]",
            'documents[1]={"image": "x"}: must be a string or {"text": "..."}',
        ),
        ("/rerank", {"query": "a", "documents": [{"text": 5}]}, "documents[0]", 'documents[0]={"text": 5}: must be a'),
        ("/rerank", {"query": "a", "documents": "b"}, "documents", 'documents="b": Input should be a valid list'),
        ("/rerank", {"query": "a", "documents": ["bad"]}, "documents[0]", "documents[0]: prompt_tokens=9"),
        ("/rerank", {"query": "a", "documents": [""]}, "documents[0]", 'documents[0]: document="": must be text'),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", 'documents[1]: document="": must be text'),
        ("/rerank", {"query": "", "documents": ["b"]}, "query", 'query="": must be text'),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2", 'text_2: document="": must be text'),
        ("/score", {"text_1": "a", "text_2": [""]}, "text_2[0]", 'text_2[0]: document="": must be text'),
        ("/score", {"text_1": "", "text_2": ["b", "b"]}, "text_1", 'text_1: query="": must be text'),
        ("/score", {"text_1": ["a", ""], "text_2": ["b", "b"]}, "text_1[1]", 'text_1[1]: query="": must be text'),
        ("/score", {"queries": [""], "documents": ["b", "b"]}, "queries[0]", 'queries[0]: query="": must be text'),
        ("/rerank", {"documents": ["b"]}, "query", "query: is missing"),
    ],
)
def test_invalid_requests_are_rejected(front, path, fields, param, message):
    status, body = ask(front, path, **fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["message"].startswith(message)


@pytest.mark.parametrize("document", ["two labels", "without template"])
def test_scores_need_one_label(front, document):
    status, body = ask(front, "/score", text_1="a", text_2=document)
    assert (status, body["error"]["param"]) == (400, "model")
    assert body["error"]["message"] == "model: has 2 labels; scores need a model with one"


@pytest.mark.parametrize("given", [{}, {"model": None}])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/classify", {"input": "four"}),
        ("/score", {"text_1": "q", "text_2": "four"}),
        ("/rerank", {"query": "q", "documents": ["four"]}),
    ],
)
def test_the_model_is_optional(front, fake, path, fields, given):
    status, body = front.ask(path, fields | given)
    assert (status, body["model"]) == (200, "paged_llm")
    assert "lora_name" not in json.loads(fake.requests[-1]["sampling_parameters"])


def test_keys_are_checked(fake):
    with gateway(fake.url, "--api-key", "secret") as locked:
        assert ask(locked, "/rerank", query="a", documents=["b"])[0] == 401
