"""vLLM as a contestant; see protocol.py. Its engine is stepped here, to add requests when they arrive."""

import time
from typing import Any

from protocol import Clock, Job, serve

engine: Any = None


def load(**options: Any) -> dict[str, Any]:
    """Load a model. options: fields of vLLM's EngineArgs."""
    global engine
    from vllm import EngineArgs, LLMEngine, __version__

    engine = LLMEngine.from_engine_args(EngineArgs(disable_log_stats=True, **options))
    cache, scheduler = engine.vllm_config.cache_config, engine.vllm_config.scheduler_config
    return {
        "version": __version__,
        "kv_cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "block_size": cache.block_size,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
    }


def run(jobs: list[Job]) -> dict[str, Any]:
    clock, waiting = Clock(jobs), list(enumerate(jobs))
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1]["arrival"] <= clock.now():
            add(*waiting.pop(0))
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][1]["arrival"] - clock.now()))
            continue
        outputs = engine.step()
        when = clock.now()
        for output in outputs:
            for sample in output.outputs:
                clock.tokens(int(output.request_id), sample.index, list(sample.token_ids), when)
    return clock.result()


def add(key: int, job: Job) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        n=job["n"],
        temperature=0.0 if job["n"] == 1 else 1.0,
        max_tokens=job["output"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine.add_request(str(key), {"prompt_token_ids": job["prompt"]}, sampling)


if __name__ == "__main__":  # the worker processes of vLLM import this file as well
    serve({"load": load, "run": run})
