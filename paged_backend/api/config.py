"""Engine options: one frozen dataclass, and the rules between options.

Names follow vLLM's engine arguments where both engines have the option, so that a `model.json` of Triton's vLLM backend
works here. An option that is unknown, has the wrong type or is out of range fails the load with a message that names
it. To add an option, declare a field of EngineConfig and run `make reference`, which writes its description to
docs/reference/options.md and its name to the schema of the Helm chart.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from paged_backend.api.errors import ConfigError, hint
from paged_backend.api.limits import LIMIT_NAMES, LIMITS_EXAMPLE, InputLimits, nest_limits
from paged_backend.api.options import (
    any_text,
    count,
    flag,
    group,
    host,
    http_url,
    in_bytes,
    in_gib,
    in_mib,
    integer,
    invalid_option,
    layer_names,
    number,
    one_of,
    option,
    parse_fields,
    text,
    two_tokens,
)
from paged_backend.api.other_engines import VLLM_OPTIONS, flatten_vllm_options, vllm_option_problem
from paged_backend.api.redis_address import redis_url
from paged_backend.api.sampling_params import default_overrides

log = logging.getLogger("paged_llm")

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # owner/model
DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}
_NEEDS_NO_OPTION = "; a model whose weights are quantized needs no option, because config.json names their format"
AUTO = "auto"
BLOCK_SIZES = tuple(1 << power for power in range(9))
AUTO_BLOCK_SIZES = (8, 16, 32, 64, 128)  # candidates of `block_size=auto`
DEFAULT_BLOCK_SIZE = 16
KV_CACHE_DTYPES = {
    "auto": "auto", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8", "int4": "uint4",
}  # fmt: skip
INT4_BLOCK_SIZE = 32  # tokens of a block in `kv_cache_dtype=int4`


@dataclass(frozen=True)
class KvEventsConfig:
    """The option `kv_events_config`: publishing changes of the prefix cache. Its fields are vLLM's."""

    enable_kv_cache_events: bool = option(flag, "Publish an event for every block that is cached or evicted.", False)
    publisher: str = option(one_of("zmq", "null"), "`zmq`, or `null`: publish nothing.", "zmq")
    endpoint: str = option(
        text,
        "ZeroMQ endpoint that the PUB socket binds. Events have the tokens of prompts, so only this machine can read"
        " them by default; vLLM's default is `tcp://*:5557`.",
        "tcp://127.0.0.1:5557",
    )
    replay_endpoint: str | None = option(
        text, "ZeroMQ endpoint of the ROUTER socket that sends past batches again. `null`: none.", None
    )
    buffer_steps: int = option(integer(1), "Batches kept for `replay_endpoint`.", 10_000)
    hwm: int = option(
        integer(0), "Batches queued for a slow subscriber, after which it loses some. 0: no limit.", 100_000
    )
    max_queue_size: int = option(
        integer(1), "Batches queued before they are sent. Further ones are dropped, with a warning in the log.", 100_000
    )
    topic: str = option(any_text, "Topic of the messages.", "")

    def __post_init__(self) -> None:
        parse_fields(self)

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of `model_repository/*/1/model.json` and of `paged serve -o`."""

    model: str = option(
        text,
        "Hugging Face model directory, GGUF file, or name on the Hugging Face hub. A relative path is looked up in the"
        " directory of this project, then in the server's working directory.",
        section="Model",
    )
    served_model_name: str | None = option(
        text,
        "Name under which clients request the model; also `paged serve --name`. In a model repository it must be the"
        " name of the model's directory, because Triton serves the model under that name.",
        None,
    )
    tokenizer: str | None = option(text, "Tokenizer directory or name on the hub. Default: the model's.", None)
    chat_template: str | None = option(
        text,
        "Jinja template for `messages`, or the path of a file with one, instead of the tokenizer's. For a model that"
        " ranks documents, it also gets the query and the document, as messages with these roles.",
        None,
    )
    special_tokens_in_messages: bool = option(
        flag,
        "How to read the text of a special token, such as `<|im_end|>`, in `messages`, `tools` and"
        " `chat_template_kwargs`. `false`: as ordinary text. `true`: as the token, which lets users forge a system"
        " message. In `text_input` it is always the token.",
        False,
    )
    classifier_from_token: Sequence[str] | None = option(
        two_tokens,
        'Classify with the logits of two tokens, such as `["no", "yes"]`: the score of a prompt is the probability of'
        " the second one to follow it.",
        None,
    )
    revision: str | None = option(text, "Branch, tag or commit of a model on the hub. Default: its main branch.", None)
    tokenizer_revision: str | None = option(
        text, "Branch, tag or commit of a `tokenizer` on the hub. Default: its main branch.", None
    )
    download_dir: str | None = option(
        text, "Directory for files downloaded from the hub. Default: the hub's own cache.", None
    )
    trust_remote_code: bool = option(flag, "Run Python code found in the model directory.", False)
    skip_verification: bool = option(
        flag,
        "Load the model without comparing its logits with those of transformers. Wrong outputs are then not detected:"
        " set it only for a model that you have verified yourself.",
        False,
    )
    reuse_verification: bool = option(
        flag,
        "Do not repeat the comparison if an earlier start made it with the same model files (by content), code,"
        " libraries, options and processor. It is always repeated with several ranks. See"
        " [verification](../guides/add_a_model.md#verification-at-load).",
        True,
    )
    load_format: str = option(
        one_of("auto", "safetensors", "dummy"),
        "`dummy` fills the weights with random values and needs only `config.json`.",
        "auto",
    )
    generation_config: str = option(
        text,
        "Defaults of sampling parameters that a request does not set. `auto`: those in `generation_config.json` in the"
        " model's directory, if there is this file. `vllm`: the engine's own. Otherwise a directory with such a file."
        " See [requests](../guides/requests.md#defaults-of-sampling-parameters).",
        "auto",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        default_overrides,
        'Defaults of sampling parameters that replace those of `generation_config`, like `{"temperature": 0.5}`. Keys:'
        " `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`, `max_new_tokens`.",
        None,
    )
    dtype: str = option(
        one_of(*DTYPES),
        "Data type of weights and activations. `auto` on a GPU: the model's own. `auto` on a CPU: bfloat16 if the CPU"
        " has AVX512-BF16 or AMX, otherwise float32.",
        "auto",
        section="Computation",
    )
    quantization: str | None = option(
        one_of("int8", "int4", note=_NEEDS_NO_OPTION),
        "`int8` rounds the weights of linear layers to 8 bits while loading, `int4` to 4 bits, except for the output"
        " layer and the smallest layers (up to an eighth of the elements), which have 8. Compared to 16 bits, this"
        " takes a half or a third of their memory and is faster for small batches.",
        None,
        device="cpu",
    )
    quantization_group_size: int | None = option(
        one_of(32, 64, 128),
        "Number of consecutive inputs of a linear layer that share a scale in a quantized weight. Smaller groups are"
        " more accurate and take more memory. Default: 32 for `int4`, all inputs for `int8`.",
        None,
        device="cpu",
    )
    quantized_activations: str = option(
        one_of("auto", "none", "int8"),
        "`int8` rounds the inputs of linear layers with quantized weights to 8 bits, in groups of up to 32 that share a"
        " scale, and multiplies integers, which is faster; not for weights in FP8. `auto`: `int8` if `dtype` has 16"
        " bits, otherwise `none`. [Effect on outputs](../../paged_bench/README.md#quantized-weights).",
        "auto",
        device="cpu",
    )
    device: str = option(one_of("auto", "cpu", "cuda"), "`auto` selects a GPU if there is one.", "auto")
    tensor_parallel_size: int = option(
        integer(1, 64),
        "Number of GPUs, on all machines together, that share the model. Each runs in its own process and holds a part"
        " of every layer and of the KV cache.",
        1,
    )
    pipeline_parallel_size: int = option(
        integer(1, 64),
        "Number of stages of a pipeline, each with an equal part of the layers and their KV cache. A stage has"
        " `tensor_parallel_size` GPUs. As many steps are in flight as there are stages, each with other requests.",
        1,
    )
    data_parallel_size: int = option(
        integer(1, 64),
        "Number of engines behind one Triton model, each with the whole model, its own KV cache and its own GPUs of"
        " this machine. A request runs in the engine that has computed most of its"
        " prompt's beginning, unless this engine has more than its share of the requests.",
        1,
    )
    nnodes: int | None = option(
        integer(1, 64),
        "Number of machines that share the model, each with as many GPUs. `paged worker` runs on all but this one."
        " Default: the environment variable `NNODES`, or 1.",
        None,
    )
    master_addr: str | None = option(
        host,
        "Address of this machine for the others. Default: the environment variable `MASTER_ADDR`.",
        None,
    )
    master_port: int | None = option(
        integer(1, 65535),
        "Port of this machine for the others. Default: the environment variable `MASTER_PORT`, or 29500.",
        None,
    )
    seed: int = option(
        integer(0, 2**63 - 1), "Seed of dummy weights and of requests that do not have a seed of their own.", 0
    )
    enforce_eager: bool = option(
        flag, "Launch the kernels of each step instead of replaying CUDA graphs.", False, device="cuda"
    )
    batch_invariant: bool = option(
        flag,
        "Compute the same logits, bit for bit, for the same tokens in every batch: whichever requests share a step,"
        " and however their prompts are split, cached or preempted. Set it instead of vLLM's environment variable"
        " `VLLM_BATCH_INVARIANT`. [What it covers and costs](../guides/tune.md#reproducible-results).",
        False,
    )
    max_model_len: int | None = option(
        count(integer(2)),
        "Maximum length of prompt plus output. Default and maximum: the model's context length. For the rope types"
        " `dynamic` and `longrope` it is the length before scaling, because scaling would change the cached keys.",
        None,
        section="Scheduling",
    )
    max_num_seqs: int = option(integer(1, 65536), "Maximum number of sequences in one step.", 64)
    max_num_batched_tokens: int = option(
        count(integer(1)),
        "Maximum number of tokens in one step; longer prompts are prefilled in chunks, or rejected if the"
        " model is an encoder. Default: 512, or `max_num_seqs` if that is larger.",
        None,
    )
    target_step_ms: float | None = option(
        number(0, above=True),
        "Target duration of a step in milliseconds while sequences decode (or twice the duration of a decode-only"
        " step, if that is longer). Prefill chunks are sized to meet it, which costs some throughput; a large value"
        " turns this off. Default: 100 on a CPU; on a GPU 2.5 times the duration of a decode-only step, which is"
        " measured.",
        None,
    )
    async_scheduling: bool | None = option(
        flag,
        "Schedule a step while the previous one runs, so that the device does not wait. Default: true on a GPU, false"
        " on a CPU, where scheduling and computation share the cores.",
        None,
    )
    fair_tenants: bool = option(
        flag,
        "Among waiting requests of equal priority, admit the one whose `cache_salt` has used the fewest tokens"
        " (prefilled and generated) instead of the oldest, so that one tenant's long queue does not delay the others."
        " Use it only where tenants cannot choose their salt, because a new salt is served first.",
        False,
    )
    max_queue_size: int = option(
        integer(0),
        "Maximum number of waiting requests. Further ones are rejected at once with `UNAVAILABLE`. 0: no limit. Raise"
        " it only if clients tolerate minutes of queueing.",
        4096,
        section="Admission and timeouts",
    )
    max_tenant_requests: int = option(
        integer(0),
        "Maximum number of open requests per `cache_salt`; requests without a salt count as one tenant. Further ones"
        " are rejected at once with `UNAVAILABLE`. 0: no limit.",
        0,
    )
    first_response_ms: int = option(
        integer(-1),
        "A streaming request without a token after this many milliseconds gets an empty response, because Triton"
        " notices a closed HTTP connection only after the first response. -1: never, for clients that take the first"
        " response for the first token.",
        1000,
    )
    max_response_mib: int = option(
        in_mib(integer(1, 1 << 20)),
        "Maximum MiB of all responses to one request; Triton keeps in memory what a client has not read. A longer"
        " output ends the request with `UNAVAILABLE`.",
        64,
    )
    request_timeout: int = option(
        integer(0),
        "Maximum duration of a request in seconds, also if it sets a longer timeout; it then ends with the finish"
        " reason `timeout`. 0: no limit; a server that is stopped then cuts open requests after its"
        " `--exit-timeout-secs`.",
        0,
    )
    stop_timeout: int = option(
        integer(1),
        "Maximum seconds to stop after the model's own requests have ended. The time is for requests from other"
        " models, the current step, and writing cached blocks to disk. Must be less than the server's"
        " `--exit-timeout-secs`.",
        25,
    )
    stall_timeout: int = option(
        integer(1),
        "The model reports not ready if one step, or sending a response to the server, takes more than this many"
        " seconds. When a step takes longer, open requests fail.",
        60,
    )
    chat_template_timeout: float = option(
        number(0, above=True), "Maximum seconds for rendering a chat template, which delays other requests.", 2.0
    )
    tokenize_timeout: float = option(
        number(0, above=True), "Maximum seconds for parsing and tokenizing a long prompt, in a separate process.", 10
    )
    structured_outputs_timeout: float = option(
        number(0, above=True), "Maximum seconds for compiling a JSON schema, a regular expression or a grammar.", 10
    )
    disable_any_whitespace: bool = option(
        flag, "Generate JSON without white space between its tokens, unless the request sets this itself.", False
    )
    block_size: int = option(
        one_of(AUTO, *BLOCK_SIZES),
        "Tokens per block of the KV cache, in all kinds of layers. `auto`: the size with the least product of step time"
        " and memory, from measured times; the log says why. See [tune](../guides/tune.md#block-size).",
        DEFAULT_BLOCK_SIZE,
        section="KV cache",
    )
    gpu_memory_utilization: float = option(
        number(0, 1, above=True), "Fraction of the GPU's memory for weights and KV cache.", 0.9, device="cuda"
    )
    kv_cache_memory_bytes: int | None = option(
        in_bytes(integer(1)),
        "Bytes of the KV cache on each GPU, with the states of recurrent layers. Default: on a GPU what"
        " `gpu_memory_utilization` leaves, on a CPU half of the available memory but at most 4 GiB.",
        None,
    )
    num_gpu_blocks_override: int | None = option(
        integer(1),
        "Number of blocks of the KV cache, regardless of the memory. With several kinds of layers, or `int4`, a block"
        " has several pages. States of recurrent layers take some of them; without attention, a block is a state.",
        None,
    )
    enable_prefix_caching: bool = option(
        flag, "Keep the blocks of finished requests for later requests with the same prefix.", True
    )
    kv_cache_dtype: str = option(
        one_of(*KV_CACHE_DTYPES),
        "Data type of keys and values in the cache. `auto`: as `dtype`. `fp8` (also `fp8_e4m3`) and `int8`: one byte"
        " each, with a scale per token and head. `int4`: four bits, with scales per channel of keys and token of"
        " values, and `int8` in the first and the newest block of a sequence. It needs a `block_size` of 32 or `auto`,"
        " heads of a multiple of 32 elements, and no latents or pipeline parallelism.",
        "auto",
    )
    kv_cache_dtype_skip_layers: Sequence[int | str] | None = option(
        layer_names,
        "Layers whose keys and values stay in the type of the activations although `kv_cache_dtype` is another one:"
        " their numbers, from 0 on, or `sliding_window` for all layers with a window.",
        None,
    )
    swap_space: float | None = option(
        in_gib(number(0)),
        "GiB of host memory for preempted requests and for cached blocks evicted from the device. Default: 4 with a"
        " GPU, 0 on a CPU.",
        None,
    )
    preemption_mode: str = option(
        one_of("auto", "swap", "recompute"),
        "What happens to the KV cache of a preempted request: `swap` copies it to host memory, `recompute` discards it."
        " `auto` takes the faster one, as measured at load.",
        "auto",
    )
    disk_cache_dir: str | None = option(
        text,
        "Directory for cached blocks evicted from host memory, which survive a restart. Needs `swap_space`.",
        None,
    )
    disk_cache_gib: float = option(
        in_gib(number(0, above=True)),
        "Maximum GiB in `disk_cache_dir`. Counts files that existed at the start, also those of other models, and files"
        " that this server writes. It does not count what other servers write meanwhile.",
        10,
    )
    remote_cache_url: str | None = option(
        redis_url,
        "Redis server for cached blocks, which other servers of the same model read: `redis://host:6379/0`, or"
        " `rediss://host:6379/0` for TLS, with `?ssl_ca_certs=FILE`, and `ssl_certfile` and `ssl_keyfile` for a client"
        " certificate. Set the password as the environment variable `PAGED_REMOTE_CACHE_PASSWORD`, or a file that"
        " holds it as `PAGED_REMOTE_CACHE_PASSWORD_FILE`. With `PAGED_REMOTE_CACHE_SECRET` (or"
        " `PAGED_REMOTE_CACHE_SECRET_FILE`), at least 16 bytes, blocks are authenticated. Needs `swap_space`."
        " See [secure](../guides/secure.md#remote-cache).",
        None,
        shown=False,
    )
    remote_cache_gib: float = option(
        in_gib(number(0, above=True)),
        "Maximum GiB that this server keeps in the remote store, counted from its start. Above it, the"
        " server deletes its least recently used"
        " blocks. `maxmemory` of the Redis server limits the blocks of all servers together.",
        10,
    )
    remote_cache_ttl: int = option(
        integer(1, 2**31 - 1),
        "Seconds after their last use by any server after which blocks in the remote store expire.",
        86400,
    )
    remote_cache_timeout_ms: int = option(
        integer(1, 60_000),
        "If a call of the remote store takes more milliseconds, the store is not used for a while.",
        500,
    )
    tier_read_mode: str = option(
        one_of("auto", "always"),
        "When to read cached blocks that are neither on the device nor in host memory. `auto`: if reading a block takes"
        " less time than computing its tokens, as measured. `always`: also if it takes longer, which leaves the device"
        " to other requests.",
        "auto",
    )
    num_speculative_tokens: int = option(
        integer(0, 32),
        "Draft tokens per sequence that one step verifies; the output does not change. 0: no speculative decoding."
        " Steps are not scheduled asynchronously then.",
        0,
        section="Speculative decoding",
    )
    speculative_model: str | None = option(
        text,
        "Smaller model with the same vocabulary that proposes draft tokens. Default: prompt lookup (n-gram), which"
        " proposes tokens from the request's own text.",
        None,
    )
    prompt_lookup_min: int = option(integer(1, 32), "Shortest n-gram that prompt lookup matches.", 2)
    prompt_lookup_max: int = option(integer(1, 32), "Longest n-gram that prompt lookup matches.", 4)
    enable_lora: bool = option(
        flag,
        "Serve the LoRA adapters listed in `multi_lora.json`, in the directory of `model.json`: `{name: directory}`.",
        False,
        section="LoRA adapters",
    )
    max_loras: int = option(integer(1, 1024), "Maximum number of adapters on the device, and so in one step.", 1)
    max_lora_rank: int = option(integer(1, 512), "Maximum rank of an adapter. Memory is reserved for it.", 16)
    max_cpu_loras: int | None = option(integer(1), "Adapters kept in host memory. Default: `max_loras`.", None)
    cache_salt_from: str = option(
        one_of("sampling_parameters", "parameter"),
        "Where requests have their `cache_salt`; a salt in another place is rejected. `sampling_parameters`: in that"
        " input, which may have any text. `parameter`: in a request parameter, which over HTTP is a field of the body."
        " Use `parameter` if a proxy sets the salt, because clients cannot override it then. The proxy must set the"
        " value, not only check it, because Triton cuts request parameters at a NUL character. The models of"
        " tensorrtllm_backend require `parameter`.",
        "sampling_parameters",
        section="Tenants",
    )
    session_ttl: float = option(
        number(0, above=True), "Seconds without a turn after which a session is removed.", 600, section="Sessions"
    )
    max_sessions: int = option(
        integer(1),
        "Maximum number of open sessions. When this limit or `max_sessions_mib` is reached, the oldest idle session of"
        " the tenant (`cache_salt`) with the most sessions is removed for a tenant with fewer.",
        1024,
    )
    max_tenant_sessions: int = option(
        integer(0),
        "Maximum number of open sessions per `cache_salt`; sessions without a salt count as one tenant. Further ones"
        " are rejected at once with `UNAVAILABLE`. 0: no limit.",
        0,
    )
    max_sessions_mib: int = option(
        in_mib(integer(1, 1 << 20)),
        "MiB of conversation that all sessions may store: messages as JSON, or tokens of 4 bytes. A turn that does not"
        " fit is rejected with `UNAVAILABLE`, unless it ends its session.",
        256,
    )
    session_memory: float = option(
        number(0, 1, above=True),
        "Fraction of the KV cache that sessions may hold between turns. Above it the session idle for longest releases"
        " its blocks.",
        0.5,
    )
    disable_log_stats: bool = option(
        flag,
        "Report no metrics of the engine. The parameter `REPORT_CUSTOM_METRICS` of config.pbtxt, set to `false`, does"
        " the same.",
        False,
        section="Metrics and traces",
    )
    otlp_traces_endpoint: str | None = option(
        http_url,
        "URL that takes OpenTelemetry traces as OTLP over HTTP, such as `http://localhost:4318/v1/traces`. `null`: no"
        " traces.",
        None,
    )
    trace_sample_ratio: float = option(
        number(0, 1),
        "Share of requests to trace, 0 to 1. A request with a `traceparent` is traced if its parent is.",
        1.0,
    )
    kv_events_config: KvEventsConfig = option(
        group(KvEventsConfig, '{"enable_kv_cache_events": true}'),
        "Publish changes of the prefix cache over ZeroMQ, in vLLM's format, for routers. An object with the fields"
        ' below, such as `{"enable_kv_cache_events": true}`.',
        KvEventsConfig(),
        section="KV cache events",
    )
    limits: InputLimits = option(
        group(InputLimits, LIMITS_EXAMPLE),
        "Limits for the inputs of a request, an object with the fields below.",
        InputLimits(),
        section="Limits",
    )

    @property
    def num_ranks(self) -> int:
        """The number of processes on all machines that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """The number of processes on this machine that share the model."""
        return self.num_ranks // (self.nnodes or 1)

    @property
    def packs_blocks(self) -> bool:
        """Whether the KV cache stores blocks in four bits."""
        return self.kv_cache_dtype == "int4"

    @property
    def chooses_block_size(self) -> bool:
        """Whether `block_size` still is `auto`. The engine replaces it by a number before it reads the option."""
        return str(self.block_size) == AUTO

    def __post_init__(self) -> None:
        parse_fields(self)
        if not self.max_num_batched_tokens:  # None, as it is not given
            object.__setattr__(self, "max_num_batched_tokens", max(512, self.max_num_seqs))
        for rule in RULES:
            if rule.violated(self):
                raise invalid_option(rule.option, getattr(self, rule.option), rule.problem.format(config=self))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build the configuration from JSON values by name. Options that are null have their defaults.

        Options of vLLM that this engine does not have are accepted if their value changes nothing here. Raises
        ConfigError for an option that is unknown, missing or invalid.
        """
        known = [spec.name for spec in fields(cls)]
        values: dict[str, Any] = {}
        for name, value in nest_limits(flatten_vllm_options(options)).items():
            if name in known:
                values |= {} if value is None else {name: value}
            elif name not in VLLM_OPTIONS:
                meant = hint(str(name), [*known, *LIMIT_NAMES], VLLM_OPTIONS)
                raise ConfigError(f"{name}: unknown engine option; {meant}")
            elif problem := vllm_option_problem(name, value):
                raise invalid_option(name, value, problem)
        if "model" not in values:
            raise ConfigError("model: missing; give a Hugging Face model directory")
        return cls(**values)

    def reject(self, names: Sequence[str], problem: str) -> None:
        """Raise ConfigError for the first of these options that differs from its default."""
        defaults = {spec.name: spec.default for spec in fields(self)}
        for name in names:
            if (value := getattr(self, name)) != defaults[name]:
                raise invalid_option(name, value, problem)

    @classmethod
    def from_file(cls, path: Path) -> EngineConfig:
        """Read a `model.json`, and log which of its options are ignored. Raises ConfigError, which names the file."""
        try:
            options = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(options, dict):
            raise ConfigError(f"{path}: must hold one JSON object of engine options")
        try:
            config = cls.from_options(options)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if ignored := [name for name in flatten_vllm_options(options) if name in VLLM_OPTIONS]:
            log.warning("ignoring vLLM options that change nothing here: %s", ", ".join(ignored))
        return config


class Rule(NamedTuple):
    """A combination of options that is rejected."""

    option: str  # the option that the error names
    violated: Callable[[EngineConfig], Any]
    problem: str  # format string over `config`


# Options that have no effect unless another one is set.
NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "enable_lora": ("max_loras", "max_lora_rank", "max_cpu_loras"),
    "num_speculative_tokens": ("prompt_lookup_min", "prompt_lookup_max"),
    "disk_cache_dir": ("disk_cache_gib",),
    "remote_cache_url": ("remote_cache_gib", "remote_cache_ttl", "remote_cache_timeout_ms"),
}


def _is_set(config: EngineConfig, option: str) -> bool:
    value = getattr(config, option)
    return bool(value) and value != EngineConfig.__dataclass_fields__[option].default


def _excludes(option: str, other: str, problem: str = "not supported with {other}") -> Rule:
    """Return the rule that two options cannot both be set."""
    return Rule(
        option,
        lambda config: _is_set(config, option) and _is_set(config, other),
        problem.format(other=f"{other}={{config.{other}}}") + "; leave one of them out",
    )


def _needs(option: str, other: str) -> Rule:
    """Return the rule that an option has no effect without another one."""
    return Rule(
        option,
        lambda config: _is_set(config, option) and not getattr(config, other),
        f"has no effect without {other}; set both",
    )


STORES = ("disk_cache_dir", "remote_cache_url")  # options that turn on stores of cached blocks
RULES = (
    Rule(
        "max_num_batched_tokens",
        lambda config: config.max_num_batched_tokens < config.max_num_seqs,
        "must be at least max_num_seqs={config.max_num_seqs}, so that every running sequence can decode in one step",
    ),
    Rule(
        "prompt_lookup_min",
        lambda config: config.prompt_lookup_min > config.prompt_lookup_max,
        "must be at most prompt_lookup_max={config.prompt_lookup_max}",
    ),
    Rule(
        "max_cpu_loras",
        lambda config: config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras,
        "must be at least max_loras={config.max_loras}",
    ),
    Rule(
        "data_parallel_size",
        lambda config: config.data_parallel_size > 1 and (config.nnodes or 1) > 1,
        "not supported with nnodes={config.nnodes}; run a server on each machine",
    ),
    Rule(
        "data_parallel_size",
        lambda config: config.data_parallel_size > 1 and config.kv_events_config.is_enabled,
        "not supported with kv_events_config: the events of several engines cannot be told apart",
    ),
    _excludes(
        "data_parallel_size",
        "disk_cache_dir",
        "not supported with {other}, which one engine has for itself (remote_cache_url is shared)",
    ),
    _excludes(
        "async_scheduling",
        "num_speculative_tokens",
        "cannot be combined with {other}: the next step depends on how many draft tokens were accepted",
    ),
    _excludes(
        "async_scheduling",
        "pipeline_parallel_size",
        "has no effect with {other}, which has a step of other requests in flight for each stage",
    ),
    _excludes(
        "batch_invariant",
        "tensor_parallel_size",
        "not supported with {other}: the order in which GPUs add their parts depends on the batch",
    ),
    _excludes("quantization", "tensor_parallel_size"),
    _excludes("speculative_model", "pipeline_parallel_size"),
    _excludes("enable_lora", "tensor_parallel_size"),
    _excludes("enable_lora", "pipeline_parallel_size"),
    _needs("quantization_group_size", "quantization"),
    _needs("speculative_model", "num_speculative_tokens"),
    Rule(
        "kv_cache_dtype_skip_layers",
        lambda config: config.kv_cache_dtype_skip_layers and KV_CACHE_DTYPES[config.kv_cache_dtype] == "auto",
        'has no effect with kv_cache_dtype="{config.kv_cache_dtype}"; set it to int8, fp8 or int4',
    ),
    _excludes("kv_cache_dtype_skip_layers", "pipeline_parallel_size"),
    Rule(
        "kv_cache_dtype",
        lambda config: config.packs_blocks and config.pipeline_parallel_size > 1,
        "not supported with pipeline_parallel_size={config.pipeline_parallel_size}; use int8 or fp8",
    ),
    Rule(
        "block_size",
        lambda config: config.packs_blocks and config.block_size not in (AUTO, INT4_BLOCK_SIZE),
        'must be 32 with kv_cache_dtype="int4", or auto',
    ),
    *(_needs(store, "enable_prefix_caching") for store in STORES),
    *(
        _excludes(store, parallel, "stores whole blocks, and with {other} each process has only a part of every block")
        for store in STORES
        for parallel in ("tensor_parallel_size", "pipeline_parallel_size")
    ),
    Rule(
        "nnodes",
        lambda config: config.nnodes is not None and config.num_ranks % config.nnodes != 0,
        "must divide the product of tensor_parallel_size={config.tensor_parallel_size} and"
        " pipeline_parallel_size={config.pipeline_parallel_size}",
    ),
)
