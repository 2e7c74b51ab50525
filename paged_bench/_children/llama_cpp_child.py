"""llama.cpp as a contestant; see protocol.py.

As in its batched-bench, each request is a sequence, and every batch has all sequences. Requests have one sample and
arrive at once.
"""

import ctypes
from typing import Any

import llama_cpp
import numpy as np
from protocol import Clock, Job, serve

BATCH = 2048  # default number of tokens per batch
GGML_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}

Row = tuple[int, int, int, bool]  # request, position, token, whether its logits are needed

model: Any = None
threads = 1
cache = 1


def load(path: str, num_threads: int, kv_dtype: str) -> dict[str, Any]:
    global model, threads, cache
    llama_cpp.llama_backend_init()
    threads, cache = num_threads, GGML_TYPES[kv_dtype]
    options = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise ValueError(f"{path} cannot be loaded")
    return {"kv_dtype": kv_dtype, "system": llama_cpp.llama_print_system_info().decode()}


def quantize(source: str, target: str, kind: str, num_threads: int) -> dict[str, Any]:
    """Write a GGUF file with weights of another kind: "Q4_0"."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.nthread = num_threads
    if code := llama_cpp.llama_model_quantize(source.encode(), target.encode(), options):
        raise ValueError(f"llama_model_quantize returned {code}")
    return {}


def run(jobs: list[Job]) -> dict[str, Any]:
    assert all(job["n"] == 1 and job["arrival"] == 0 for job in jobs), "one sample of each request, all at once"
    context = context_for(jobs)
    try:
        return serve_all(context, jobs)
    finally:
        llama_cpp.llama_free(context)


def context_for(jobs: list[Job]) -> Any:
    options = llama_cpp.llama_context_default_params()
    longest = max(len(job["prompt"]) + job["output"] for job in jobs)
    options.n_seq_max = len(jobs)
    options.n_ctx = len(jobs) * -(-longest // 256) * 256
    options.n_batch = BATCH
    options.n_threads = options.n_threads_batch = threads
    options.type_k = options.type_v = cache
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise ValueError(f"no context of {options.n_ctx} tokens for {len(jobs)} sequences")
    return context


def serve_all(context: Any, jobs: list[Job]) -> dict[str, Any]:
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    clock = Clock(jobs)
    rows = [(key, at, token, at + 1 == len(job["prompt"])) for key, job in enumerate(jobs)
            for at, token in enumerate(job["prompt"])]  # fmt: skip
    while rows:
        ends = []
        for begin in range(0, len(rows), BATCH):
            ends += step(context, batch, rows[begin : begin + BATCH], vocabulary, clock)
        rows = [
            (key, len(jobs[key]["prompt"]) + len(clock.outputs[key]) - 1, token, True)
            for key, token in ends
            if len(clock.outputs[key]) < jobs[key]["output"]
        ]
    llama_cpp.llama_batch_free(batch)
    return clock.result()


def step(context: Any, batch: Any, rows: list[Row], vocabulary: int, clock: Clock) -> list[tuple[int, int]]:
    """Decode rows, and return (request, greedy token) for those whose logits are needed."""
    batch.n_tokens = len(rows)
    for index, (key, position, token, wanted) in enumerate(rows):
        batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, key
    if code := llama_cpp.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode returned {code}")
    sampled = []
    for index, (key, _, _, wanted) in enumerate(rows):
        if wanted:
            row = llama_cpp.llama_get_logits_ith(context, index)
            logits = np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (vocabulary,))
            sampled.append((key, int(logits.argmax())))
    when = clock.now()
    for key, token in sampled:
        clock.tokens(key, 0, [token], when)
    return sampled


serve({"load": load, "quantize": quantize, "run": run})
