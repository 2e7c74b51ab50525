"""Rules between engine options: bounds that depend on another option, and options that exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from paged_backend.api.options import invalid_option


class Rule(NamedTuple):
    """A combination of options that is rejected."""

    option: str  # the option that the error names
    violated: Callable[[Any], bool]  # takes the EngineConfig
    problem: str  # format string over `config`


# Options that turn on stores of cached blocks, and what each keeps blocks in.
STORES = {"disk_cache_dir": "files", "remote_cache_url": "values"}


def _store_rules(option: str, stored: str) -> tuple[Rule, ...]:
    """Return the rules of a store of cached blocks."""
    return (
        Rule(
            option,
            lambda config: getattr(config, option) and not config.enable_prefix_caching,
            "stores blocks of the prefix cache; needs enable_prefix_caching=true",
        ),
        Rule(
            option,
            lambda config: getattr(config, option) and config.tensor_parallel_size > 1,
            f"{stored} hold whole blocks, and with tensor_parallel_size={{config.tensor_parallel_size}} each process"
            " has only a part of every block; leave one of them out",
        ),
        Rule(
            option,
            lambda config: getattr(config, option) and config.pipeline_parallel_size > 1,
            f"{stored} hold whole blocks, and with pipeline_parallel_size={{config.pipeline_parallel_size}} each"
            " process has only the layers of its stage; leave one of them out",
        ),
    )


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
        "async_scheduling",
        lambda config: config.async_scheduling and config.num_speculative_tokens,
        "cannot be combined with num_speculative_tokens={config.num_speculative_tokens}: the next step depends on how"
        " many draft tokens were accepted; leave one of them out",
    ),
    Rule(
        "async_scheduling",
        lambda config: config.async_scheduling and config.pipeline_parallel_size > 1,
        "has no effect with pipeline_parallel_size={config.pipeline_parallel_size}, which has a step of other requests"
        " in flight for each stage; leave one of them out",
    ),
    Rule(
        "speculative_model",
        lambda config: config.speculative_model and config.pipeline_parallel_size > 1,
        "not supported with pipeline_parallel_size={config.pipeline_parallel_size}; leave one of them out",
    ),
    Rule(
        "quantization",
        lambda config: config.quantization and config.tensor_parallel_size > 1,
        "not supported with tensor_parallel_size={config.tensor_parallel_size}; leave one of them out",
    ),
    Rule(
        "quantization_group_size",
        lambda config: config.quantization_group_size and not config.quantization,
        "has no effect without quantization; set both",
    ),
    Rule(
        "data_parallel_size",
        lambda config: config.data_parallel_size > 1 and (config.nnodes or 1) > 1,
        "not supported with nnodes={config.nnodes}; run a server on each machine",
    ),
    Rule(
        "data_parallel_size",
        lambda config: config.data_parallel_size > 1 and config.disk_cache_dir,
        "not supported with disk_cache_dir, which one engine has for itself; remote_cache_url is shared",
    ),
    Rule(
        "data_parallel_size",
        lambda config: config.data_parallel_size > 1 and config.kv_events_config.is_enabled,
        "not supported with kv_events_config: the events of several engines cannot be told apart",
    ),
    Rule(
        "batch_invariant",
        lambda config: config.batch_invariant and config.tensor_parallel_size > 1,
        "not supported with tensor_parallel_size={config.tensor_parallel_size}: the order in which GPUs add their parts"
        " depends on the batch; leave one of them out",
    ),
    Rule(
        "max_state_checkpoints",
        lambda config: config.max_state_checkpoints and not config.enable_prefix_caching,
        "has no effect with enable_prefix_caching=false; leave one of them out",
    ),
    Rule(
        "enable_lora",
        lambda config: config.enable_lora and config.tensor_parallel_size > 1,
        "not supported with tensor_parallel_size={config.tensor_parallel_size}; leave one of them out",
    ),
    Rule(
        "enable_lora",
        lambda config: config.enable_lora and config.pipeline_parallel_size > 1,
        "not supported with pipeline_parallel_size={config.pipeline_parallel_size}; leave one of them out",
    ),
    Rule(
        "speculative_model",
        lambda config: config.speculative_model and not config.num_speculative_tokens,
        "has no effect without num_speculative_tokens; set both",
    ),
    *(rule for option, stored in STORES.items() for rule in _store_rules(option, stored)),
)


def check_rules(config: Any) -> None:
    """Raise ConfigError for the first rule that an EngineConfig violates."""
    for rule in RULES:
        if rule.violated(config):
            raise invalid_option(rule.option, getattr(config, rule.option), rule.problem.format(config=config))
