"""The tensors of requests for embeddings and classifications, and of their responses."""

from __future__ import annotations

import base64
import json
import operator
import struct
from collections.abc import Mapping, Sequence

from paged_client.types import Classification, Embedding, PagedError
from paged_client.wire import TRACE_CONTEXT, Fields, Values, check_text, input_value, json_object


def embedding_values(text: str | Sequence[int], dimensions: int | None, sampling: Mapping[str, object]) -> Values:
    """Return the inputs of an embedding request. Raises ValueError like `request_values`."""
    pooling = {} if dimensions is None else {"dimensions": [_index("dimensions", dimensions)]}
    return _values("embedding_request", {"input": _prompt(text), "pooling_params": pooling}, sampling)


def classification_values(
    text: str | Sequence[int] | None,
    messages: Sequence[Mapping[str, object]] | None,
    query: str | None,
    document: str | None,
    use_activation: bool,
    sampling: Mapping[str, object],
) -> Values:
    """Return the inputs of a classification request. Raises ValueError like `request_values`."""
    given = {"input": text, "messages": messages, "query": query, "document": document}
    names = [name for name, value in given.items() if value is not None]
    if names not in (["input"], ["messages"], ["query", "document"]):
        raise ValueError(f"{', '.join(names) or 'no prompt'}: give either input, messages, or query and document")
    request: dict[str, object] = {"pooling_params": {"use_activation": input_value("use_activation", use_activation)}}
    if text is not None:
        request["input"] = _prompt(text)
    elif messages is not None:
        request["messages"] = list(messages)
    else:
        request |= {name: check_text(name, given[name]) for name in names}
    return _values("classification_request", request, sampling)


def _prompt(text: str | Sequence[int]) -> str | list[int]:
    return check_text("input", text) if isinstance(text, str) else [_index("input", token) for token in text]


def _values(name: str, request: Mapping[str, object], sampling: Mapping[str, object]) -> Values:
    context = {name: input_value(name, sampling[name]) for name in TRACE_CONTEXT if name in sampling}
    sampling = {name: value for name, value in sampling.items() if name not in context}
    return {
        name: json.dumps(request, ensure_ascii=False),
        "sampling_parameters": json_object(sampling),
        "return_num_input_tokens": True,
        "return_receipt": True,
        **context,
    }


def _index(name: str, value: object) -> int:
    """Return an integer, which may be a NumPy integer, as int. Raises ValueError that names the argument."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}={value!r}: must be a whole number") from None


def read_embedding(response: Fields | None) -> Embedding:
    """Parse the response of an embedding request. Raises PagedError if it is malformed."""
    try:
        fields = response or {}
        values = tuple(map(float, json.loads(str(fields["text_output"][0]))))
        return Embedding(values, int(fields["num_input_tokens"][0]), *_receipts(fields))
    except (LookupError, TypeError, ValueError) as error:
        raise PagedError("INTERNAL", f"the server sent no embedding: {type(error).__name__}: {error}") from None


def read_classification(response: Fields | None) -> Classification:
    """Parse the response of a classification request. Raises PagedError if it is malformed."""
    try:
        fields = response or {}
        answer = json.loads(str(fields["text_output"][0]))
        probs = tuple(map(float, answer["probs"]))
        return Classification(str(answer["label"]), probs, int(fields["num_input_tokens"][0]), *_receipts(fields))
    except (LookupError, TypeError, ValueError) as error:
        raise PagedError("INTERNAL", f"the server sent no classification: {type(error).__name__}: {error}") from None


def _receipts(fields: Fields) -> list[Mapping[str, float]]:
    return [json.loads(str(text)) for text in fields.get("receipt", [])]


def to_base64(values: Sequence[float]) -> str:
    """Return an embedding as base64 of little-endian float32, as OpenAI's `encoding_format` has it."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
