"""Engine options as flags of `paged serve` and `paged model-repository`, in vLLM's spelling.

`--max-model-len 512` is `-o max_model_len=512`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import cache

from paged_client.commands.arguments import json_or_text
from paged_client.session import UsageError

_FALSE_PREFIX = "no-"  # --no-enable-prefix-caching


def split_engine_flags(
    argv: Sequence[str], own_flags: Collection[str], command: str = "serve"
) -> tuple[list[str], dict[str, object]]:
    """Split the arguments of a command into its own arguments, and engine options by name.

    A flag of a boolean option has no value, or `true` or `false` as its value. Raises UsageError for an unknown flag,
    a repeated one, and one without its value.
    """
    rest: list[str] = []
    options: dict[str, object] = {}
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        flag, _, _ = token.partition("=")
        if not token.startswith("--") or flag in own_flags:
            rest.append(token)
            continue
        name, value = _parse(token, tokens, own_flags, command)
        if name in options:
            raise UsageError(f"{flag}: given twice")
        options[name] = value
    return rest, options


def _parse(token: str, following: list[str], own_flags: Collection[str], command: str) -> tuple[str, object]:
    """Return name and value of the option in `token`. Removes its value from `following` if it is there."""
    flag, equals, text = token.partition("=")
    known = _known()
    name = flag[2:].replace("-", "_")
    positive = flag[2:].removeprefix(_FALSE_PREFIX).replace("-", "_")
    if name not in known and flag[2:].startswith(_FALSE_PREFIX) and known.get(positive) and not equals:
        return positive, False
    if name not in known:
        value = text or next((argument for argument in following[:1] if not argument.startswith("--")), None)
        raise UsageError(_sampling_default(flag, value) or _unknown(flag, own_flags, known, command))
    if equals:
        return name, json_or_text(text)
    if known[name]:
        given = bool(following) and following[0] in ("true", "false")
        return name, following.pop(0) == "true" if given else True
    if not following or following[0].startswith("--"):
        raise UsageError(f"{flag}: needs a value")
    return name, json_or_text(following.pop(0))


@cache
def _known() -> dict[str, bool]:
    """Return the names of all engine options, limits, and options of vLLM, and whether each is a boolean."""
    from paged_backend.api.config import EngineConfig
    from paged_backend.api.limits import LIMIT_NAMES
    from paged_backend.api.options import flag
    from paged_backend.api.other_engines import VLLM_OPTIONS

    known = dict.fromkeys(LIMIT_NAMES, False)
    known |= {name: any(value is False for value in option.accepted) for name, option in VLLM_OPTIONS.items()}
    return known | {spec.name: spec.metadata["kind"] is flag for spec in fields(EngineConfig)}


def is_engine_flag(argument: str) -> bool:
    """Return whether an argument is the flag of an engine option, with or without its value."""
    name = argument.partition("=")[0][2:].replace("-", "_")
    return argument.startswith("--") and not _known().keys().isdisjoint((name, name.removeprefix("no_")))


def _sampling_default(flag: str, value: str | None) -> str | None:
    """Return the error for a flag that is a sampling parameter which `override_generation_config` can set, or None."""
    from paged_backend.api.sampling_params import DEFAULT_KEYS, MAX_TOKENS

    name = flag[2:].replace("-", "_")
    key = MAX_TOKENS if name == "max_tokens" else name
    if key not in DEFAULT_KEYS:
        return None
    shown = "VALUE" if value is None else json.dumps(json_or_text(value))
    setting = shlex.quote(f'{{"{key}": {shown}}}')
    return f"{flag}: unknown option; a default for requests is set with --override-generation-config {setting}"


def _unknown(flag: str, own_flags: Collection[str], known: Collection[str], command: str) -> str:
    from paged_backend.api.errors import closest_match

    flags = [*own_flags, *("--" + name.replace("_", "-") for name in known)]
    near = closest_match(flag, flags, cutoff=0.7)
    hint = f"did you mean {near}? See" if near else "see"
    passed_on = f" To pass it to tritonserver: paged serve MODEL -- {flag}=…" if command == "serve" else ""
    return f"{flag}: unknown option; {hint} `paged {command} --help` and docs/reference/options.md.{passed_on}"
