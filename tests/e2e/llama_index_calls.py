"""Runs in the clients' environment: calls llama-index as its users do, and prints the results as JSON.

python llama_index_calls.py GRPC_URL PROMPT MAX_TOKENS
"""

import json
import sys

from llama_index.llms.nvidia_triton import NvidiaTriton

url, prompt, tokens = sys.argv[1:]
llm = NvidiaTriton(server_url=url, tokens=int(tokens))  # the model `ensemble`, like tensorrtllm_backend
print(json.dumps({
    "complete": llm.complete(prompt).text,
    "stream": [one.delta for one in llm.stream_complete(prompt)],
}))  # fmt: skip
