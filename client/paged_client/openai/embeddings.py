"""The body of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paged_client.async_client import AsyncClient
from paged_client.openai.pooling import PoolingBody, usage
from paged_client.openai.schema import Integer, ListOf, split_inputs
from paged_client.pooling import to_base64
from paged_client.types import Embedding


class EmbeddingRequest(PoolingBody[Embedding]):
    input: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return [{"input": item} for item in split_inputs(self.input)]

    async def ask(self, client: AsyncClient, arguments: Mapping[str, Any]) -> Embedding:
        return await client.embed(dimensions=self.dimensions, **arguments)

    def response(self, results: Sequence[Embedding], request_id: str, model: str) -> dict[str, Any]:
        return {
            "object": "list",
            "model": model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _encode(embedding.values, self.encoding_format)}
                for index, embedding in enumerate(results)
            ],
            "usage": usage(results),
        }


def _encode(values: Sequence[float], encoding: str | None) -> list[float] | str:
    """Encode an embedding: as a list or, for "base64", as little-endian float32."""
    return to_base64(values) if encoding == "base64" else list(values)
