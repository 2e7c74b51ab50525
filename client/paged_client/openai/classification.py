"""The bodies of /classify, /score and /rerank, compatible with vLLM, and /rerank with Jina's clients."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from paged_backend.api.errors import SEVERAL_LABELS
from paged_client.async_client import AsyncClient
from paged_client.openai.errors import ApiError
from paged_client.openai.pooling import PoolingBody, usage
from paged_client.openai.schema import Flag, Integer, ListOf, StrictModel, shown, split_inputs
from paged_client.types import Classification, PagedError

_LABELS = re.compile(rf"has (\d+) {SEVERAL_LABELS}")


class _ClassificationBody(PoolingBody[Classification]):
    use_activation: Flag | None = None
    activation: Flag | None = None  # the older name of use_activation

    def check(self) -> None:
        if self.activation is not None and self.use_activation is not None:
            raise ApiError(400, "activation: is another name of use_activation; give one", param="activation")

    async def ask(self, client: AsyncClient, arguments: Mapping[str, Any]) -> Classification:
        use = self.activation if self.use_activation is None else self.use_activation
        return await client.classify(use_activation=use is not False, **arguments)

    def _list(
        self, id: str, data: Sequence[Mapping[str, Any]], results: Sequence[Classification], model: str
    ) -> dict[str, Any]:
        """Return a response body with an element for each input."""
        return {
            "id": id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": index, **item} for index, item in enumerate(data)],
            "usage": usage(results),
        }


class ClassifyRequest(_ClassificationBody):
    input: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]] | None = None
    messages: ListOf[dict[str, Any]] | None = None

    def check(self) -> None:
        super().check()
        if (self.input is None) is (self.messages is None):
            raise ApiError(400, "input: give either input or messages", param="input")

    @property
    def list_field(self) -> str:
        return "input" if self.messages is None else "messages"

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        if self.messages is not None:
            return [{"messages": self.messages}]
        assert self.input is not None
        return [{"input": item} for item in split_inputs(self.input)]

    def response(self, results: Sequence[Classification], request_id: str, model: str) -> dict[str, Any]:
        data = [
            {"label": result.label, "probs": list(result.probs), "num_classes": len(result.probs)} for result in results
        ]
        return self._list(f"classify-{request_id}", data, results, model)


class _PairBody(_ClassificationBody):
    """Bodies whose inputs are a query with a document each."""

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        raise NotImplementedError

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return [{"query": query, "document": document} for query, document in self.pairs]

    async def ask(self, client: AsyncClient, arguments: Mapping[str, Any]) -> Classification:
        try:
            return await super().ask(client, arguments)
        except PagedError as error:  # without a template for pairs, the engine says that none would help
            if match := _LABELS.search(error.message):
                raise _several_labels(int(match[1])) from None
            raise

    def names(self, index: int) -> dict[str, str]:
        names = super().names(index)
        return {**names, "document": names["input"]}


# The names in vLLM of a field with queries and one with documents.
_SCORE_FIELDS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


class ScoreRequest(_PairBody):
    """A query for all documents, or one for each, under one of the pairs of names in _SCORE_FIELDS."""

    text_1: str | ListOf[str] | None = None
    text_2: str | ListOf[str] | None = None
    data_1: str | ListOf[str] | None = None
    data_2: str | ListOf[str] | None = None
    queries: str | ListOf[str] | None = None
    documents: str | ListOf[str] | None = None
    items: str | ListOf[str] | None = None

    def check(self) -> None:
        super().check()
        given = self._given
        if given not in _SCORE_FIELDS:
            names = {0: "is missing", 1: "is given alone"}.get(len(given), f"is given with {' and '.join(given[1:])}")
            pairs = [" and ".join(pair) for pair in _SCORE_FIELDS]
            field = given[0] if given else "text_1"
            message = f"{field}: {names}; give {', or '.join(pairs)}"
            raise ApiError(400, message, param=field)
        queries, documents = self._texts
        if not documents or len(queries) not in (1, len(documents)):
            message = f"{given[0]}: {len(queries)} texts for {len(documents)} in {given[1]}; must be one or as many"
            raise ApiError(400, message, param=given[0])

    @property
    def _given(self) -> tuple[str, ...]:
        """The names of the given fields: once checked, the field of the queries and the field of the documents."""
        names = dict.fromkeys(name for pair in _SCORE_FIELDS for name in pair)
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def _texts(self) -> tuple[list[str], list[str]]:
        queries, documents = (getattr(self, name) for name in self._given)
        return _as_list(queries), _as_list(documents)

    @property
    def list_field(self) -> str:
        return self._given[1]

    def names(self, index: int) -> dict[str, str]:
        queries = self._given[0]
        return {**super().names(index), "query": self.element(queries, min(index, len(self._texts[0]) - 1))}

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        queries, documents = self._texts
        return list(zip(queries * (len(documents) if len(queries) == 1 else 1), documents, strict=True))

    def response(self, results: Sequence[Classification], request_id: str, model: str) -> dict[str, Any]:
        data = [{"object": "score", "score": _score(result)} for result in results]
        return self._list(f"score-{request_id}", data, results, model)


class Document(StrictModel):
    place = "documents[]."

    text: str


class RerankRequest(_PairBody):
    query: str
    documents: ListOf[str | Document] = Field(min_length=1)
    top_n: Integer | None = None
    return_documents: Flag | None = None
    max_tokens_per_doc: Integer | None = None

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        documents = values.get("documents")
        for index, document in enumerate(documents if isinstance(documents, list) else ()):
            is_object = isinstance(document, dict) and isinstance(document.get("text"), str)
            if not isinstance(document, str) and not is_object:
                field = f"documents[{index}]"
                raise ApiError(400, f'{field}={shown(document)}: must be a string or {{"text": "..."}}', param=field)

    def check(self) -> None:
        super().check()
        if self.max_tokens_per_doc is not None:
            reason = "not supported; shorten the documents, or let truncate_prompt_tokens shorten whole prompts"
            message = f"max_tokens_per_doc={self.max_tokens_per_doc}: {reason}"
            raise ApiError(400, message, param="max_tokens_per_doc")
        if self.top_n is not None and self.top_n < 0:
            raise ApiError(400, f"top_n={self.top_n}: must be at least 0, which returns all documents", param="top_n")

    @property
    def list_field(self) -> str:
        return "documents"

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        return [(self.query, document if isinstance(document, str) else document.text) for document in self.documents]

    def response(self, results: Sequence[Classification], request_id: str, model: str) -> dict[str, Any]:
        ranked = sorted(enumerate(results), key=lambda indexed: _score(indexed[1]), reverse=True)
        texts = [text for _, text in self.pairs]
        return {
            "id": f"rerank-{request_id}",
            "model": model,
            "usage": usage(results),
            "results": [
                {
                    "index": index,
                    **({} if self.return_documents is False else {"document": {"text": texts[index]}}),
                    "relevance_score": _score(result),
                }
                for index, result in ranked[: self.top_n or None]
            ],
        }


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _score(result: Classification) -> float:
    """Return the score of a model with one label."""
    if len(result.probs) != 1:
        raise _several_labels(len(result.probs))
    return result.probs[0]


def _several_labels(count: int) -> ApiError:
    return ApiError(400, f"model: has {count} {SEVERAL_LABELS}", param="model")
