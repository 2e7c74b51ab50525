"""Runs in the clients' environment: calls litellm as its users do, and prints the results as JSON.

python litellm_calls.py GENERATE_URL GATEWAY_URL PROMPT
"""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it first fetches prices from the network

import litellm

litellm.suppress_debug_info = True  # printed when an error is raised
generate, gateway, prompt = sys.argv[1:]
ASKED = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "timeout": 120}
TRITON = ASKED | {"model": "triton/paged_llm", "api_base": generate, "top_k": 1}
OPENAI = {"api_base": gateway, "api_key": "key", "timeout": 120}
CHAT = ASKED | OPENAI | {"model": "openai/paged_llm", "temperature": 0}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
EMBEDDING = OPENAI | {"model": "openai/paged_llm", "input": [prompt, "x"]}


def text(answer):
    return answer.choices[0].message.content


def pieces(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def error(**arguments):
    try:
        return text(litellm.completion(**arguments))
    except litellm.BadRequestError as raised:
        return str(raised)


async def alike():
    """Make both calls concurrently with asyncio."""
    whole, stream = await asyncio.gather(litellm.acompletion(**TRITON), litellm.acompletion(**TRITON, stream=True))
    return [text(whole), "".join([chunk.choices[0].delta.content or "" async for chunk in stream])]


def streamed_chat():
    chunks = list(litellm.completion(**CHAT, **USAGE))
    usage = next(chunk.usage for chunk in reversed(chunks) if getattr(chunk, "usage", None))
    return [pieces(chunk for chunk in chunks if chunk.choices), usage.completion_tokens]


print(json.dumps({
    "triton": text(litellm.completion(**TRITON)),
    "triton, streamed": pieces(litellm.completion(**TRITON, stream=True)),
    "triton, async": asyncio.run(alike()),
    "triton, refused": error(**TRITON, min_p=2),
    "chat": text(litellm.completion(**CHAT)),
    "chat, streamed": streamed_chat(),
    "chat, refused": error(**CHAT, seed="x"),
    "text": litellm.text_completion(
        **OPENAI, model="text-completion-openai/paged_llm", prompt=prompt, max_tokens=12, temperature=0
    ).choices[0].text,
    "embedding": [one["embedding"] for one in litellm.embedding(**EMBEDDING).data],
}))  # fmt: skip
