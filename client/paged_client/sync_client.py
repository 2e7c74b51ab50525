"""The synchronous client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from paged_client.addresses import check_headers
from paged_client.conversation import Conversation
from paged_client.pooling import classification_values, embedding_values, read_classification, read_embedding
from paged_client.sync_stream import Stream, Transport
from paged_client.types import Adapter, Classification, Completion, Embedding, ModelInfo, PagedError, PoolMap
from paged_client.wire import (
    ADAPTERS_REQUEST,
    MODEL_INFO_REQUEST,
    POOL_MAP_REQUEST,
    STOP_REQUEST,
    Fields,
    Message,
    Prompt,
    Values,
    check_request_id,
    check_timeout,
    may_stream,
    read_adapters,
    read_model_info,
    read_num_stopped,
    read_pool_map,
    request_values,
)

DEFAULT_URLS = {"grpc": "localhost:8001", "http": "localhost:8000"}


def _transport(url: str, model: str, protocol: str, headers: Mapping[str, str]) -> Transport:
    # Imported on use: grpc takes longer to import than the rest of the client.
    if protocol == "grpc":
        from paged_client.sync_grpc import GrpcTransport

        return GrpcTransport(url, model, headers)
    from paged_client.sync_http import HttpTransport

    return HttpTransport(url, model, headers)


class Client:
    """A client of one served model. It may be used by several threads, for any number of concurrent requests.

    Args:
        url: HOST:PORT of the gRPC or HTTP endpoint (HTTP also takes http:// and https:// URLs). The default is
            localhost, port 8001 for gRPC and 8000 for HTTP.
        model: name of the model in the model repository.
        protocol: "grpc" or "http".
        headers: HTTP headers, or gRPC metadata, of every request, for a proxy: such as "authorization".
    """

    def __init__(
        self,
        url: str | None = None,
        model: str = "paged_llm",
        protocol: str = "grpc",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if protocol not in DEFAULT_URLS:
            raise ValueError(f"protocol={protocol!r}: must be one of {', '.join(DEFAULT_URLS)}")
        self._transport = _transport(url or DEFAULT_URLS[protocol], model, protocol, check_headers(headers or {}))

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Completion:
        """Generate a completion and return it when it is complete. Arguments and errors as for `stream`."""
        values = request_values(prompt, messages, sampling, stream=self._transport.must_stream and may_stream(sampling))
        with self._open(values, request_id, timeout) as stream:
            for _ in stream:
                pass
            completion = stream.completion
            assert completion is not None  # a stream that failed has raised
            return completion

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Stream:
        """Send a request and return its output as a stream of deltas.

        Args:
            prompt: text or token ids to continue, without a chat template.
            messages: instead of `prompt`, the messages of a conversation, {"role": ..., "content": ...} each. The
                server applies the model's chat template. `tools=[...]` (functions in the format of OpenAI's API)
                and `chat_template_kwargs={...}` (variables such as "enable_thinking") are passed to it too.
            request_id: id for the server's log and for `cancel`.
            timeout: time limit of the whole request in seconds; None is no limit.
            sampling: sampling parameters with vLLM's names, such as max_tokens=64 and stop=["\\n"]; also
                return_token_ids, return_text_offsets, return_reasoning_content, return_tool_calls, and for a
                session sequence_id, sequence_start and sequence_end (see `conversation`).

        Raises:
            ValueError: invalid arguments.
            PagedError: the request failed, here or while iterating; `code` is the error class.
        """
        return self._open(request_values(prompt, messages, sampling, stream=True), request_id, timeout)

    def conversation(self, **sampling: object) -> Conversation:
        """Return a new session, whose messages and KV cache the server keeps. `sampling` applies to every turn."""
        return Conversation(self, sampling)

    def pool_map(self, *, timeout: float | None = None) -> PoolMap:
        """Return a snapshot of the server's block pool, which the engine takes between two steps.

        Raises:
            ValueError: invalid timeout.
            PagedError: the server cannot be reached or does not return a map.
        """
        return read_pool_map(self._ask(POOL_MAP_REQUEST, "", timeout))

    def cancel(self, request_id: str, *, timeout: float | None = None) -> int:
        """Cancel all requests with this id, of any client, and return how many there were. They fail with CANCELLED.

        Raises:
            ValueError: empty request id or invalid timeout.
            PagedError: the server cannot be reached.
        """
        return read_num_stopped(self._ask(STOP_REQUEST, check_request_id(request_id), timeout))

    def adapters(self, *, timeout: float | None = None) -> tuple[Adapter, ...]:
        """Return the LoRA adapters that the server lists. Errors as for `pool_map`."""
        return read_adapters(self._ask(ADAPTERS_REQUEST, "", timeout))

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Return facts about the model, for routers and frontends. Errors as for `pool_map`."""
        return read_model_info(self._ask(MODEL_INFO_REQUEST, "", timeout))

    def embed(
        self,
        input: str | Sequence[int],
        *,
        dimensions: int | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Embedding:
        """Return the embedding of a prompt: the last hidden state of its last token, normalized to length 1.

        Args:
            input: text or token ids.
            dimensions: number of leading dimensions to keep before normalizing (Matryoshka embeddings); only for
                models that were trained for it.
            request_id, timeout: as for `stream`.
            sampling: the parameters that apply to embeddings: priority, cache_salt, lora_name, timeout_ms,
                truncate_prompt_tokens, add_special_tokens.

        Raises:
            ValueError: invalid arguments.
            PagedError: the request failed; `code` is the error class.
        """
        return read_embedding(self._ask(embedding_values(input, dimensions, sampling), request_id, timeout))

    def classify(
        self,
        input: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        query: str | None = None,
        document: str | None = None,
        use_activation: bool = True,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Classification:
        """Return the classes of a prompt, from a model that classifies.

        Args:
            input, messages, query and document: the prompt as text or token ids, or a conversation, or two texts for a
                model that ranks documents; exactly one of the three.
            use_activation: whether to return probabilities; otherwise scores.
            request_id, timeout: as for `stream`.
            sampling: the same parameters as for `embed`.

        Raises:
            ValueError: invalid arguments.
            PagedError: the request failed; `code` is the error class.
        """
        values = classification_values(input, messages, query, document, use_activation, sampling)
        return read_classification(self._ask(values, request_id, timeout))

    def _ask(self, values: Values, request_id: str, timeout: float | None) -> Fields | None:
        """Send a request that has exactly one response, and return the response."""
        responses = self._transport.open(values, request_id, check_timeout(timeout))
        try:
            response = responses.next()
            with suppress(PagedError):
                responses.next()  # read to the end: a call that is dropped earlier can keep the server from exiting
        finally:
            responses.cancel()
        return response

    def _open(self, values: Values, request_id: str, timeout: float | None) -> Stream:
        return Stream(self._transport.open(values, request_id, check_timeout(timeout)))

    def close(self) -> None:
        """Close the connection. Open streams end."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
