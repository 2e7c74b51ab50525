"""The bodies of /tokenize and /detokenize, compatible with vLLM. The server does both: the gateway has no tokenizer."""

from __future__ import annotations

from typing import Any, ClassVar

from paged_client.openai.chat_schema import ChatRequest
from paged_client.openai.errors import ApiError
from paged_client.openai.schema import Body, CompletionRequest, ListOf, read_object, validate
from paged_client.openai.translation import EngineRequest, Sampling

_NO_STRINGS = {"return_token_strs": (None, False)}  # they are the vocabulary's, which the server does not send
# What determines the tokens of a prompt, and who may compute it when.
_SAMPLING = (
    "tools", "chat_template_kwargs", "add_special_tokens", "truncate_prompt_tokens", "lora_name", "priority",
    "cache_salt", "timeout_ms",
)  # fmt: skip


class TokenizeText(CompletionRequest):
    unsupported_fields: ClassVar = {**CompletionRequest.unsupported_fields, **_NO_STRINGS}

    prompt: str


class TokenizeChat(ChatRequest):
    unsupported_fields: ClassVar = {**ChatRequest.unsupported_fields, **_NO_STRINGS}


def parse(body: bytes) -> TokenizeText | TokenizeChat:
    """Parse the body of /tokenize. Raises ApiError."""
    values = read_object(body)
    return validate(TokenizeChat, values) if "messages" in values else validate(TokenizeText, values)


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: ListOf[int]

    def check(self) -> None:
        if not self.tokens:
            raise ApiError(400, "tokens: is empty", param="tokens")


def sampling(request: EngineRequest) -> Sampling:
    """Return the sampling parameters for a request that only returns the tokens of its prompt."""
    given = {name: request.sampling[name] for name in _SAMPLING if name in request.sampling}
    return {**given, "max_tokens": 1, "return_token_ids": True}  # conversations cannot have 0


def detokenize_sampling(adapter: str | None) -> Sampling:
    """Return the sampling parameters for a request that only returns the text of its prompt."""
    return {"max_tokens": 0, "echo": True, "skip_special_tokens": False} | ({"lora_name": adapter} if adapter else {})


def tokens_body(tokens: Any, max_model_len: int | None) -> dict[str, Any]:
    return {"count": len(tokens), "max_model_len": max_model_len, "tokens": list(tokens), "token_strs": None}
