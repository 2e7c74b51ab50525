"""The paths of requests for embeddings, classes, scores and rankings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_client.openai.classification import ClassifyRequest, RerankRequest, ScoreRequest
from paged_client.openai.embeddings import EmbeddingRequest
from paged_client.openai.pooling import PoolingBody

POOLING_ROUTES: Mapping[str, type[PoolingBody[Any]]] = {
    "/v1/embeddings": EmbeddingRequest,
    "/classify": ClassifyRequest,
    "/v1/classify": ClassifyRequest,
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
}
