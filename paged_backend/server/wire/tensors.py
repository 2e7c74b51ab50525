"""Input and output tensors of the model `paged_llm`: types, shapes and descriptions.

Names, defaults and meanings are as in Triton's vLLM backend, plus conversations, token ids, text offsets, receipts,
embeddings and control requests. `make reference` writes the descriptions to docs/reference/request_tensors.md.

In the frames of the local socket (utils/local_socket.py) tensors are JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paged_backend.utils.local_socket import FrameError


class TensorSpec(NamedTuple):
    """A tensor as config.pbtxt declares it."""

    data_type: str
    dims: tuple[int, ...]
    help: str = ""  # description for the reference


NUMPY_TYPES = {
    "TYPE_STRING": np.object_,
    "TYPE_BOOL": np.bool_,
    "TYPE_FP32": np.float32,
    "TYPE_UINT32": np.uint32,
    "TYPE_INT32": np.int32,
}


def _string(help: str) -> TensorSpec:
    return TensorSpec("TYPE_STRING", (1,), help)


def _strings(help: str) -> TensorSpec:
    return TensorSpec("TYPE_STRING", (-1,), help)


def _flag(help: str) -> TensorSpec:
    return TensorSpec("TYPE_BOOL", (1,), help)


def _int32s(help: str) -> TensorSpec:
    return TensorSpec("TYPE_INT32", (-1,), help)


_PARAMETER = "The sampling parameter of this name."
# Sampling parameters that may also be tensors, because Triton's generate endpoints accept lists only as tensors.
LIST_PARAMETERS = {
    "stop": _strings(_PARAMETER),
    "bad_words": _strings(_PARAMETER),
    "choice": _strings(_PARAMETER),
    "stop_token_ids": _int32s(_PARAMETER),
    "allowed_token_ids": _int32s(_PARAMETER),
}
SCALAR_PARAMETERS = {
    "json_schema": _string(_PARAMETER),
    "json_object": _flag(_PARAMETER),
    "regex": _string(_PARAMETER),
    "grammar": _string(_PARAMETER),
}

INPUTS = {
    "text_input": _string("The prompt as text."),
    "messages": _string(
        'A conversation instead of a prompt: a JSON list of `{"role": ..., "content": ...}`, rendered by the model\'s'
        " chat template. At most 2,048 messages (`limits.max_messages`), including the earlier turns of a session, with"
        " 128 `tool_calls` each (`limits.max_tool_calls`). Keys of a message are `role`, `content`, `name`,"
        " `tool_calls`, `tool_call_id`, `reasoning_content`, `reasoning`, and others that the chat template has. The"
        " text of a special token is text, see the option `special_tokens_in_messages`."
    ),
    "tools": _string(
        "Functions for the chat template, with `messages`: a JSON list of"
        ' `{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`. At most 128'
        " (`limits.max_tools`) in 1,048,576 characters (`limits.max_tools_chars`). Messages may then have `tool_calls`,"
        " whose `arguments` are objects, and the role `tool`. The model's calls are part of `text_output`, or"
        " with `return_tool_calls` of `tool_calls`."
    ),
    "chat_template_kwargs": _string(
        'Variables for the chat template, with `messages`: a JSON object like `{"enable_thinking": false}`. They apply'
        " to this request only, also in a session. Names that the template does not use have no effect. At most"
        " 1,048,576 characters (`limits.max_tools_chars`)."
    ),
    "input_ids": _int32s("The prompt as token ids. No special tokens are added."),
    "image": _strings("Not supported; rejected."),
    "stream": _flag("Send text as it is generated. Default: one response at the end."),
    "sampling_parameters": _string(
        "[Sampling parameters](sampling_parameters.md) as a JSON object. They override request parameters of the same"
        " name."
    ),
    "exclude_input_in_output": _flag(
        "Leave the prompt out of `text_output`. Default: false for a `text_input` without `stream`, otherwise true."
        " With `messages` it must be true."
    ),
    "return_finish_reason": _flag("Return `finish_reason`."),
    "return_stop_reason": _flag("Return `stop_reason`."),
    "return_cumulative_logprob": _flag("Return `cumulative_logprob`."),
    "return_logprobs": _flag("Return `logprobs`, if the sampling parameter `logprobs` is set."),
    "return_num_input_tokens": _flag("Return `num_input_tokens`."),
    "return_num_output_tokens": _flag("Return `num_output_tokens`."),
    "return_token_ids": _flag("Return `token_ids` and `prompt_token_ids`."),
    "return_text_offsets": _flag("Return `text_offsets`."),
    "return_reasoning_content": _flag("Return `reasoning_content`, which is then not part of `text_output`."),
    "return_tool_calls": _flag("Return `tool_calls`, which are then not part of `text_output`."),
    "return_receipt": _flag("Return `receipt`."),
    "pool_map": _flag(
        "Control request: return `pool_map`. No other input is allowed. Answered between two steps, however full the"
        " queue is."
    ),
    "adapters": _flag("Control request: return `adapters`. No other input is allowed."),
    "model_info": _flag("Control request: return `model_info`. No other input is allowed."),
    "stop_request": _flag(
        "Control request: cancel every open request with the request id of this one (`id` over HTTP), and return"
        " `num_stopped`. No other input is allowed."
    ),
    "embedding_request": _string(
        'Instead of a prompt: a JSON object `{"input": ..., "pooling_params": {"dimensions": [d]}}`, whose `input` is'
        " text or a list of token ids. See [embeddings](../guides/requests.md#embeddings)."
    ),
    "classification_request": _string(
        'Instead of a prompt, for a model that classifies: a JSON object with `"input"` (text or a list of token ids),'
        ' `"messages"`, or `"query"` and `"document"`. `"pooling_params": {"use_activation": false}` returns scores'
        " instead of probabilities. See [classification](../guides/requests.md#classification)."
    ),
    **LIST_PARAMETERS,
    **SCALAR_PARAMETERS,
}
# Outputs that are returned on request.
RETURNED = frozenset(name.removeprefix("return_") for name in INPUTS if name.startswith("return_"))
OUTPUTS = {
    "text_output": _strings(
        "The generated text; when streaming, the text since the previous response. It never ends inside a character."
        " For an embedding, a JSON list of numbers; for a classification, a JSON object with `label` and `probs`."
    ),
    "reasoning_content": _strings(
        "The model's reasoning, without the marks around it; when streaming, the part since the previous response."
        " Empty if the model has not reasoned, and for a model whose marks are not known. See"
        " [reasoning and tool calls](../guides/requests.md#reasoning-and-tool-calls)."
    ),
    "tool_calls": _strings(
        'JSON list of the tool calls that this response completes: `{"type": "function", "function": {"name": ...,'
        ' "arguments": {...}}}`. A call that is cut off or invalid is part of `text_output`.'
    ),
    "finish_reason": _strings("`stop`, `length` or `timeout`; `None` before the last response."),
    "stop_reason": _strings(
        "What ended an output with the finish reason `stop`: the stop string, the stop token id, or a JSON list of the"
        " token ids of a stop word. `None` for the end-of-sequence token, and before the last response."
    ),
    "cumulative_logprob": TensorSpec(
        "TYPE_FP32", (-1,), "Sum of the log probabilities of all output tokens so far, also when streaming."
    ),
    "logprobs": _strings(
        "JSON list with one object per token of this response:"
        ' `{token id: {"logprob": ..., "rank": ..., "decoded_token": ...}}`, first the token itself, then the most'
        " likely others. `null` without the sampling parameter `logprobs`."
    ),
    "num_input_tokens": TensorSpec("TYPE_UINT32", (1,), "Tokens of the prompt."),
    "num_output_tokens": TensorSpec("TYPE_UINT32", (-1,), "Tokens of this response."),
    "token_ids": _int32s("Tokens of this response, sample by sample."),
    "prompt_token_ids": _int32s("Tokens of the prompt, with the first response."),
    "text_offsets": _int32s(
        "For each of `token_ids`, the number of characters of its sample's text before it. A token inside a character"
        " has the offset of that character. An echoed prompt counts as text. Tokens of a stop string have the offsets"
        " that they would have if it were not removed."
    ),
    "prompt_text_offsets": _int32s(
        "The same for the tokens of the prompt, with the first response, if its text is part of the output. Exact if"
        " the tokens decode to that text."
    ),
    "first_prompt_token": _string(
        "Text of the first prompt token, which `prompt_logprobs` does not contain. Returned with `prompt_text_offsets`."
    ),
    "prompt_logprobs": _string(
        "With the first response after the prompt has been computed,"
        " if the sampling parameter `prompt_logprobs` is set: a JSON list with an object as in"
        " `logprobs` for each token of the prompt, `null` for the first. Missing if the request ends before its prompt"
        " is computed."
    ),
    "receipt": _string(
        "With the last response, as JSON: tokens of the prompt, found in the prefix cache, and generated; blocks new,"
        " reused, not found in the cache (`blocks_missed`), copied on write, and brought from host memory;"
        " preemptions; seconds queued, in prefill, in decode, and waiting after preemptions, which count as neither;"
        " times of arrival, first step, first and last token in nanoseconds of the machine's monotonic clock; draft"
        " tokens verified and accepted; tokens that the remote cache has after a `prefill_only` request"
        " (`stored_tokens`); with `logits_digest` the digest of each output (`logits_digests`)."
    ),
    "pool_map": _string(
        "State of the KV cache as JSON: `time`, `block_size`, `num_blocks`, requests `running` and `waiting`, `tokens`"
        " in used blocks, `max_model_len`, whether the model is `sleeping`, and since the start `cached_tokens_hit` and"
        " `preemptions`. `states` has one character per block: `.` free, `c` cached, `1` to `9` held by that many"
        " sequences, `+` by more, `p` pinned by a session."
    ),
    "adapters": _string(
        'JSON list of the configured LoRA adapters: `{"name": ..., "rank": ..., "resident": ...}`, where `resident`'
        " means on the device. An adapter that cannot be served has the rank `null` and an `error`."
    ),
    "model_info": _string(
        "What a router or a frontend has to know of the model, as JSON: `path` of its files on the server, `tasks`"
        " (`generate`, `embed`, `classify`), `chat_template` or `null`, `max_model_len`, `block_size`, `num_blocks`,"
        " `max_num_seqs`, `max_num_batched_tokens`, `max_loras` (0 without adapters), `kv_events` (`endpoint` and"
        " `topic` of the [KV cache events](../guides/cache.md#kv-cache-events), or `null`), and `remote_cache`, whether"
        " the server shares blocks with others."
    ),
    "num_stopped": TensorSpec("TYPE_UINT32", (1,), "Number of requests that a `stop_request` cancelled."),
}


def write_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Return tensors as JSON values. Bytes that are not valid UTF-8 become lone surrogates."""
    return {
        name: [_text(value) for value in values.tolist()] if values.dtype == np.object_ else values.tolist()
        for name, values in tensors.items()
    }


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


def read_tensors(values: Any, specs: Mapping[str, TensorSpec]) -> dict[str, np.ndarray]:
    """Return one-dimensional tensors with the types of `specs`. Raises FrameError."""
    try:
        return {name: _tensor(value, specs[name]) for name, value in values.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"invalid tensors: {type(error).__name__}: {error}") from None


def _tensor(values: list[Any], spec: TensorSpec) -> np.ndarray:
    if spec.data_type == "TYPE_STRING":
        values = [value.encode(errors="surrogateescape") for value in values]
    tensor = np.array(values, NUMPY_TYPES[spec.data_type])
    if tensor.ndim != 1:
        raise FrameError(f"a tensor has {tensor.ndim} dimensions; must have 1")
    return tensor
