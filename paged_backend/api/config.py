"""Engine options: one frozen dataclass, validated in one place.

The names are those that vLLM's users know, so that a `model.json` moves over. An option that is not
known, has the wrong type or lies outside its range stops the load with a message that names it.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paged_backend.api import vllm_options
from paged_backend.api.limits import InputLimits
from paged_backend.api.options import Check, option, whole

log = logging.getLogger("paged_llm")

DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}
KV_CACHE_DTYPES = {"auto": "auto", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # owner/model


class ConfigError(ValueError):
    """An engine option that cannot be used; the message names the option, its value and the limit."""


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "must be a non-empty string"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _fraction(value: Any) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if number and 0 < value <= 1 else "must be a number above 0 and at most 1"


def _at_least_zero(value: Any) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if number and 0 <= value < float("inf") else "must be a number of at least 0"


def _above_zero(value: Any) -> str | None:
    return None if _at_least_zero(value) is None and value > 0 else "must be a number above 0"


def _one_of(*allowed: Any) -> Check:
    limit = "must be " + " or ".join(json.dumps(value) for value in allowed)
    return lambda value: None if any(value == a and type(value) is type(a) for a in allowed) else limit


def _power_of_two(value: Any) -> str | None:
    sizes = [1 << shift for shift in range(9)]
    return None if type(value) is int and value in sizes else f"must be one of {sizes}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(InputLimits):
    """What `model_repository/*/1/model.json` and `paged serve -o` may set. Sizes in tokens unless said."""

    model: str = option(
        _text,
        "Hugging Face directory or GGUF file, relative to the repository's root or to where the server is started, or a"
        " name on the hub",
    )
    tokenizer: str | None = option(_text, "tokenizer directory, if not the model's", None, optional=True)
    revision: str | None = option(
        _text, "branch, tag or commit of a model on the hub; default: its main branch", None, optional=True
    )
    tokenizer_revision: str | None = option(_text, "of a `tokenizer` on the hub, likewise", None, optional=True)
    download_dir: str | None = option(
        _text, "directory for what is fetched from the hub; default: the hub's own cache", None, optional=True
    )
    trust_remote_code: bool = option(_flag, "run Python code found in the model directory", False)
    load_format: str = option(
        _one_of("auto", "safetensors", "dummy"), "`dummy` fills the weights at random from `config.json` alone", "auto"
    )
    dtype: str = option(
        _one_of(*DTYPES),
        "weights and activations; `auto`: on a GPU the model's own; on a CPU, whatever the model's own is, bfloat16"
        " where the machine has AVX512-BF16 (all with AMX do), float32 elsewhere",
        "auto",
    )
    quantization: str | None = option(
        _one_of("int8"),
        "on a CPU, `int8`: weights of linear layers are rounded to 8 bits when the model is loaded; half the memory of"
        " 16 bits, and faster with few sequences",
        None,
        optional=True,
    )
    device: str = option(_one_of("auto", "cpu", "cuda"), "`auto`: a GPU where there is one", "auto")
    tensor_parallel_size: int = option(
        whole(1, 64),
        "GPUs of this machine that share the model, each in a process of its own with its part of every layer and of"
        " the keys and values",
        1,
    )
    seed: int = option(whole(0, 2**63 - 1), "seeds dummy weights and the requests that bring no seed of their own", 0)
    compile_level: int = option(
        _one_of(0, 1),
        "1: what lies between the attentions goes through torch.compile (on a CPU through g++) while the model loads;"
        " kept for the next start in `TORCHINDUCTOR_CACHE_DIR`, or else in `~/.cache/paged_llm`",
        0,
    )
    block_size: int = option(_power_of_two, "tokens per block", 16)
    max_model_len: int | None = option(
        whole(2),
        "longest prompt plus output; default, and most: the model's own limit, and with rope types `dynamic` and"
        " `longrope` the original length, past which they would change the angles of all positions",
        None,
        optional=True,
    )
    max_num_seqs: int = option(whole(1, 65536), "sequences in one step at the most", 64)
    max_queue_size: int = option(
        whole(0),
        "requests that may wait to be let in, those that have just come included; one more is refused at once, with"
        " `UNAVAILABLE`. 0: no limit. More than the default is work for a client that can wait for minutes, and who"
        " sends it sets this on purpose",
        4096,
    )
    max_tenant_requests: int = option(
        whole(0),
        "requests of one `cache_salt` that may be open, those without one together; one more is refused at once, with"
        " `UNAVAILABLE`. 0: no limit",
        0,
    )
    fair_tenants: bool = option(
        _flag,
        "of the requests of one priority that wait, the next to be let in is of the `cache_salt` that has had the"
        " fewest tokens (prompts' that were computed, and outputs'), not the one that came first: one tenant's long"
        " queue holds up nobody else. For where tenants cannot choose their salt, since a new one waits the shortest",
        False,
    )
    max_prompt_chars: int | None = option(
        whole(1),
        "characters of a prompt, before it is tokenized; default: `max_model_len` times the longest token, which no"
        " prompt that fits exceeds",
        None,
        optional=True,
    )
    first_response_ms: int = option(
        whole(-1),
        "a streaming request that has no token by then gets an empty response: only from then on does Triton notice"
        " that a client over HTTP has left. -1: never, for clients that take the first response for a token",
        1000,
    )
    max_response_mib: int = option(
        whole(1, 1 << 20),
        "MiB that one request may be answered with; Triton keeps what a client does not read in memory. What would go"
        " beyond ends the request with `UNAVAILABLE`",
        64,
    )
    request_timeout: int = option(
        whole(0),
        "seconds that a request may take at the most, whatever its own limit; it ends as one past its own does. 0: no"
        " limit, and a server that is stopped cuts what is open after its `--exit-timeout-secs`",
        0,
    )
    stop_timeout: int = option(
        whole(1),
        "seconds that the model may take to end once the server unloads it, which is when its own requests have ended:"
        " for those of other models on it, for the step in hand, for files. Less than `--exit-timeout-secs`",
        25,
    )
    stall_timeout: int = option(
        whole(1),
        "seconds that a step, or an answer on its way to the server, may take before the model counts as not ready; of"
        " a step, what is open then fails",
        60,
    )
    max_num_batched_tokens: int = option(
        whole(1), "tokens in one step at the most, or `max_num_seqs` if that is more; a longer prompt is chunked", 512
    )
    target_step_ms: float | None = option(
        _above_zero,
        "milliseconds that a step should take while sequences decode, or twice what decoding takes, if that is more:"
        " the chunks of prompts beside them are made to fit, as steps turn out, which costs some throughput; default:"
        " 100 on a CPU, none with a GPU",
        None,
        optional=True,
    )
    async_scheduling: bool | None = option(
        _flag,
        "plan a step while the one before runs, so that the device does not wait; default: with a GPU, not on a CPU,"
        " which plans and computes with the same cores",
        None,
        optional=True,
    )
    enforce_eager: bool = option(
        _flag, "launch every decode step anew, instead of recording it as a CUDA graph when the model is loaded", False
    )
    num_speculative_tokens: int = option(
        whole(0, 32),
        "guesses of a sequence's next tokens that one step checks; the output stays the same. 0: none. With guesses,"
        " steps are planned one after the other",
        0,
    )
    speculative_model: str | None = option(
        _text,
        "a smaller model with the same tokens, that guesses; default: guesses are looked up in the request's tokens",
        None,
        optional=True,
    )
    prompt_lookup_min: int = option(whole(1, 32), "latest tokens that must have occurred before, at least", 2)
    prompt_lookup_max: int = option(whole(1, 32), "and at the most", 4)
    gpu_memory_utilization: float = option(_fraction, "share of the GPU's memory that weights and pool may take", 0.9)
    kv_cache_memory_bytes: int | None = option(
        whole(1),
        "bytes for the pool, on each GPU; default: on a GPU what `gpu_memory_utilization` leaves, on a CPU half of what"
        " is available but 4 GiB at the most",
        None,
        optional=True,
    )
    num_gpu_blocks_override: int | None = option(
        whole(1), "blocks in the pool, whatever memory there is", None, optional=True
    )
    enable_prefix_caching: bool = option(_flag, "keep the blocks of ended requests for others of the same prefix", True)
    kv_cache_dtype: str = option(
        _one_of(*KV_CACHE_DTYPES),
        "keys and values in the pool: `auto` as `dtype`; `fp8` (also `fp8_e4m3`) or `int8`, one byte each and a scale"
        " for each token and head",
        "auto",
    )
    swap_space: float | None = option(
        _at_least_zero,
        "GiB of host memory for requests that are preempted and for cached blocks that are evicted; default: 4 with a"
        " GPU, none on a CPU",
        None,
        optional=True,
    )
    preemption_mode: str = option(
        _one_of("auto", "swap", "recompute"),
        "what is done with a preempted request's keys and values: moved to the host, or computed again; `auto`: what"
        " takes less time, as measured when the model is loaded",
        "auto",
    )

    disk_cache_dir: str | None = option(
        _text,
        "directory where cached blocks are kept as files beyond the host's memory, for a server that starts again, too;"
        " needs `swap_space`",
        None,
        optional=True,
    )
    disk_cache_gib: float = option(_above_zero, "GiB that the files there may take, other models' included", 10)

    disable_log_stats: bool = option(
        _flag,
        "no metrics but Triton's own; the same as the parameter `REPORT_CUSTOM_METRICS` of config.pbtxt set to `false`",
        False,
    )
    enable_lora: bool = option(
        _flag, "serve LoRA adapters, which the file `multi_lora.json` beside this one lists: `{name: directory}`", False
    )
    max_loras: int = option(whole(1, 1024), "adapters on the device at the same time, and so in one step", 1)
    max_lora_rank: int = option(whole(1, 512), "the highest rank of an adapter; memory is taken for it", 16)
    max_cpu_loras: int | None = option(
        whole(1), "adapters that are kept in the host's memory; default: `max_loras`", None, optional=True
    )

    chat_template_timeout: float = option(
        _above_zero, "seconds that the chat template may take, while nobody else is let in", 2.0
    )
    tokenize_timeout: float = option(
        _above_zero, "seconds that a long prompt may take to be tokenized, beside those that are short", 10
    )
    structured_outputs_timeout: float = option(
        _above_zero, "seconds that it may take to compile a schema, an expression or a grammar", 10
    )
    disable_any_whitespace: bool = option(
        _flag, "JSON that a request asks for has no white space between its tokens, unless the request says so", False
    )

    session_ttl: float = option(_above_zero, "seconds without a turn after which a session is forgotten", 600)
    max_sessions: int = option(whole(1), "sessions that may be open at the same time", 1024)
    max_tenant_sessions: int = option(
        whole(0),
        "sessions of one `cache_salt` that may be open, those without one together; one more is refused at once, with"
        " `UNAVAILABLE`. 0: no limit",
        0,
    )
    max_sessions_mib: int = option(
        whole(1, 1 << 20),
        "MiB that all sessions may keep of what was said: messages as JSON, with all that they hold, or tokens of 4"
        " bytes. A turn for which there is no room is refused with `UNAVAILABLE`; one that ends its session has room",
        256,
    )
    session_memory: float = option(
        _fraction,
        "share of the pool that sessions may keep between their turns; past it the longest idle one lets go first",
        0.5,
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None and spec.metadata["optional"]:
                continue
            if limit := spec.metadata["check"](value):
                raise ConfigError(f"{spec.name}={json.dumps(value, default=str)}: {limit}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least"
                f" max_num_seqs={self.max_num_seqs}, so that every running sequence can decode in one step"
            )

        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min}: must be at most"
                f" prompt_lookup_max={self.prompt_lookup_max}"
            )
        if self.num_speculative_tokens and self.async_scheduling:
            raise ConfigError(
                f"async_scheduling=true: with num_speculative_tokens={self.num_speculative_tokens} a step depends on"
                " how many guesses of the one before are right, so they are planned in turn; leave one of them out"
            )
        if self.compile_level and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"compile_level={self.compile_level}: with tensor_parallel_size={self.tensor_parallel_size} layers run"
                " as transformers has them, which are not compiled; leave one of them out"
            )
        for name in ("compile_level", "tensor_parallel_size"):
            if self.quantization and getattr(self, name) > getattr(type(self), name):
                raise ConfigError(
                    f"quantization={json.dumps(self.quantization)}: cannot be had with {name}={getattr(self, name)};"
                    " leave one of them out"
                )
        if self.enable_lora and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"enable_lora=true: cannot be had with tensor_parallel_size={self.tensor_parallel_size}; leave one of"
                " them out"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras={self.max_cpu_loras}: must be at least max_loras={self.max_loras}")
        if self.speculative_model and not self.num_speculative_tokens:
            raise ConfigError(
                f"speculative_model={json.dumps(self.speculative_model)}: guesses nothing; give num_speculative_tokens"
            )
        if self.disk_cache_dir and not self.enable_prefix_caching:
            raise ConfigError(
                f"disk_cache_dir={json.dumps(self.disk_cache_dir)}: keeps what the prefix cache finds; needs"
                " enable_prefix_caching=true"
            )
        if self.disk_cache_dir and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"disk_cache_dir={json.dumps(self.disk_cache_dir)}: files hold whole blocks, and with"
                f" tensor_parallel_size={self.tensor_parallel_size} no process has one; leave one of them out"
            )

    @property
    def input_limits(self) -> InputLimits:
        return InputLimits(**{spec.name: getattr(self, spec.name) for spec in fields(InputLimits)})

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Raises ConfigError for an option that is unknown, missing, or has a bad value."""
        ours, given, unused = {spec.name: str(spec.type) for spec in fields(cls)}, {}, []
        for name, value in vllm_options.unfold(options).items():
            if name in ours:
                given[name] = value if ours[name].startswith("str") else vllm_options.plain(value)
            elif name not in vllm_options.ARGUMENTS:
                near = difflib.get_close_matches(str(name), [*ours, *vllm_options.ARGUMENTS], n=1)
                hint = f"did you mean {near[0]}?" if near else f"known options are {', '.join(ours)}"
                raise ConfigError(f"{name}: unknown engine option; {hint}")
            elif limit := vllm_options.refusal(name, value):
                raise ConfigError(f"{name}={json.dumps(value, default=str)}: {limit}")
            else:
                unused.append(name)
        given = {name: value for name, value in given.items() if value is not None}  # null asks for the default
        if "model" not in given:
            raise ConfigError("model: missing; give a Hugging Face model directory")
        if unused:
            log.info("%s: vLLM's, and nothing to this engine", ", ".join(unused))
        if isinstance(most := given.get("max_num_seqs"), int):
            given.setdefault("max_num_batched_tokens", max(most, cls.max_num_batched_tokens))
        return cls(**given)

    @classmethod
    def from_file(cls, path: Path) -> EngineConfig:
        """Read a `model.json`. Raises ConfigError naming the file."""
        try:
            options = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(options, dict):
            raise ConfigError(f"{path}: must hold one JSON object of engine options")
        try:
            return cls.from_options(options)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
