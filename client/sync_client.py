"""The synchronous client."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from client.conversation import Conversation
from client.stream import Cancellable, StreamBase
from client.types import Adapter, Completion, Delta, Embedding, PagedError, PoolMap
from client.wire import (
    ADAPTERS_REQUEST,
    POOL_MAP_REQUEST,
    STOP_REQUEST,
    Fields,
    Message,
    Prompt,
    Values,
    check_request_id,
    check_timeout,
    embedding_values,
    may_stream,
    read_adapters,
    read_embedding,
    read_num_stopped,
    read_pool_map,
    request_values,
)

DEFAULT_URLS = {"grpc": "localhost:8001", "http": "localhost:8000"}


class Responses(Cancellable, Protocol):
    def next(self) -> Fields | None:
        """Wait for the next response; None after the last. Raises PagedError."""


class Stream(StreamBase):
    """One streaming request: an iterator of Delta, and a context manager that cancels on the way out.

    The request is sent when the stream is made. Leaving the `with` block, `cancel()` and dropping the last
    reference all end it on the server. One thread iterates; any thread may cancel.
    """

    def __init__(self, responses: Responses) -> None:
        super().__init__(responses)
        self._next = responses.next

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        """Raises PagedError, once, where the request failed; a cancelled stream just ends."""
        self.peek()
        if not self._deltas:
            raise StopIteration
        return self._deltas.popleft()

    def peek(self) -> None:
        """Wait until the next piece, or the end, is there. Raises PagedError as iterating does."""
        while not self._deltas and not self._ended:
            fields = self._receive()
            if fields is not None:
                self._deltas.extend(self._transcript.add(fields))

    def _receive(self) -> Fields | None:
        try:
            fields = self._next()
        except PagedError as error:
            self._end(error)
            return None
        if fields is None:
            self._end()
        return fields

    def close(self) -> None:
        self.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Transport(Protocol):
    """One protocol's way to one model of one server."""

    must_stream: bool  # even where the whole answer is wanted at once

    def open(self, values: Values, request_id: str, timeout: float | None) -> Responses: ...

    def close(self) -> None: ...


def _transport(url: str, model: str, protocol: str) -> Transport:
    # Imported on use: grpc takes longer to load than all the rest.
    if protocol == "grpc":
        from client.sync_grpc import GrpcTransport

        return GrpcTransport(url, model)
    from client.sync_http import HttpTransport

    return HttpTransport(url, model)


class Client:
    """A client of one served model, for any number of threads and concurrent requests.

    Args:
        url: HOST:PORT of the gRPC or HTTP endpoint (for HTTP a web address will do); by default port 8001
            or 8000 of this machine.
        model: the model's name in the repository.
        protocol: "grpc" or "http".
    """

    def __init__(self, url: str | None = None, model: str = "paged_llm", protocol: str = "grpc") -> None:
        if protocol not in DEFAULT_URLS:
            raise ValueError(f"protocol={protocol!r}: must be one of {', '.join(DEFAULT_URLS)}")
        self._transport = _transport(url or DEFAULT_URLS[protocol], model, protocol)

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Completion:
        """The whole answer. Arguments and errors are those of `stream`."""
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
        """Send a request; its answer arrives piece by piece.

        Args:
            prompt: text to continue, as it is, or its token ids.
            messages: instead of `prompt`, a conversation: {"role": ..., "content": ...} each. The server
                applies the model's chat template. `tools=[...]` beside them, functions as OpenAI's
                interface describes them, are for the template, too.
            request_id: appears in the server's log; `cancel` ends the request by it.
            timeout: seconds for the whole request; None: no limit.
            sampling: the server's sampling parameters, vLLM's names: max_tokens=64, stop=["\\n"], … And
                return_token_ids and return_text_offsets; for a session sequence_id, sequence_start and
                sequence_end, or see `conversation`.

        Raises:
            ValueError: arguments that no request can be made of.
            PagedError: here or while iterating; `code` tells why.
        """
        return self._open(request_values(prompt, messages, sampling, stream=True), request_id, timeout)

    def conversation(self, **sampling: object) -> Conversation:
        """A session of its own on the server, which then remembers what was said; `sampling` goes with every turn."""
        return Conversation(self, sampling)

    def pool_map(self, *, timeout: float | None = None) -> PoolMap:
        """Which blocks of the server's pool are free, cached and held at this moment. It comes between two steps of
        the engine, however busy that is.

        Raises:
            ValueError: a timeout that is none.
            PagedError: the server cannot be reached or has no such map.
        """
        return read_pool_map(self._ask(POOL_MAP_REQUEST, "", timeout))

    def cancel(self, request_id: str, *, timeout: float | None = None) -> int:
        """End whatever is open at the server under this request id, whoever sent it; how many requests that were. They
        end with the error CANCELLED.

        Raises:
            ValueError: no request id, or a timeout that is none.
            PagedError: the server cannot be reached.
        """
        return read_num_stopped(self._ask(STOP_REQUEST, check_request_id(request_id), timeout))

    def adapters(self, *, timeout: float | None = None) -> tuple[Adapter, ...]:
        """The LoRA adapters that the server lists, none where it serves none. Errors are those of `pool_map`."""
        return read_adapters(self._ask(ADAPTERS_REQUEST, "", timeout))

    def embed(
        self,
        input: str | Sequence[int],
        *,
        dimensions: int | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Embedding:
        """The model's last hidden state for the prompt's last token, scaled to length 1.

        Args:
            input: text, or the prompt as token ids.
            dimensions: keep that many of the numbers, before they are scaled; for models trained for it only.
            request_id, timeout: as for `stream`.
            sampling: what has a meaning here: priority, cache_salt, lora_name, timeout_ms, truncate_prompt_tokens,
                add_special_tokens.

        Raises:
            ValueError: arguments that no request can be made of.
            PagedError: `code` tells why.
        """
        return read_embedding(self._ask(embedding_values(input, dimensions, sampling), request_id, timeout))

    def _ask(self, values: Values, request_id: str, timeout: float | None) -> Fields | None:
        """The one response of a request that has no more."""
        responses = self._transport.open(values, request_id, check_timeout(timeout))
        try:
            answer = responses.next()
            with suppress(PagedError):
                responses.next()  # the end: a call that is dropped before can keep a server from exiting
        finally:
            responses.cancel()
        return answer

    def _open(self, values: Values, request_id: str, timeout: float | None) -> Stream:
        return Stream(self._transport.open(values, request_id, check_timeout(timeout)))

    def close(self) -> None:
        """Let go of the connection. Streams that are still open end."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
