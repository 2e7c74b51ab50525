"""Runs in the clients' environment: llama-index's own calls; prints what each gave, as JSON.

python llama_index_calls.py GRPC_URL PROMPT MAX_TOKENS
"""

import json
import sys

from llama_index.llms.nvidia_triton import NvidiaTriton

url, prompt, tokens = sys.argv[1:]
llm = NvidiaTriton(server_url=url, tokens=int(tokens))  # of the model `ensemble`, as tensorrtllm_backend calls it
print(json.dumps({
    "complete": llm.complete(prompt).text,
    "stream": [one.delta for one in llm.stream_complete(prompt)],
}))  # fmt: skip
