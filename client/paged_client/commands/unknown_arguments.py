"""Hints for arguments that a command does not have."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

from paged_backend.api.errors import closest_match
from paged_backend.api.other_engines import own_names

_SHOWN_CHARS = 60  # maximum characters of a value in a hint
Parsers = Mapping[str, argparse.ArgumentParser]


def unrecognized(argument: str, argv: Sequence[str], name: str, commands: Parsers) -> str:
    """Return the error for an argument that the command `name` does not have.

    Args:
        argument: the first unknown argument.
        argv: all arguments, in which a value may follow it.
        name: name of the command.
        commands: the parsers of all commands by name.
    """
    flag, _, value = argument.partition("=")
    if not value:
        value = next(iter(argv[argv.index(argument) + 1 :]), "")
    options = commands[name]._option_string_actions
    hint = None
    if flag.startswith("-"):
        hint = (
            _port_hint(flag, value, options)
            or _sampling_hint(flag, value, options)
            or _other_command_hint(flag, commands)
            or _near_hint(flag, options)
        )
    return f"{argument}: unknown argument; {hint or f'see {commands[name].prog} --help'}"


def misplaced(argv: Sequence[str], commands: Parsers) -> str:
    """Return the error for options before the command."""
    command = next((argument for argument in argv if argument in commands), "COMMAND")
    return f"unknown option; options come after the command: paged {command} … {argv[0]} …"


def _port_hint(flag: str, value: str, options: Mapping[str, object]) -> str | None:
    if flag != "--port" or "--url" not in options:
        return None
    return f"the address of the server is --url HOST:{value if value.isdecimal() else 'PORT'}"


def _sampling_hint(flag: str, value: str, options: Mapping[str, object]) -> str | None:
    """Return how to set a sampling parameter that has no option of its own, also under another engine's name."""
    if "--parameter" not in options:
        return None
    from paged_client.sampling_values import NAMES

    given = flag.lstrip("-").replace("-", "_")
    name = next((parameter for parameter in (*own_names(given), given) if parameter in NAMES), None)
    if name is None:
        return None
    own = f"--{name.replace('_', '-')}"
    if own in options:
        return f"did you mean {own}?"
    shown = shlex.quote(value) if 0 < len(value) <= _SHOWN_CHARS and not value.startswith("--") else "VALUE"
    return f"sampling parameters without an option of their own are set with -p: -p {name}={shown}"


def _other_command_hint(flag: str, commands: Parsers) -> str | None:
    others = [name for name, command in commands.items() if flag in command._option_string_actions]
    return f"it is an option of {' and '.join(f'paged {name}' for name in others)}" if others else None


def _near_hint(flag: str, options: Mapping[str, object]) -> str | None:
    near = closest_match(flag, options)
    return f"did you mean {near}?" if near else None
