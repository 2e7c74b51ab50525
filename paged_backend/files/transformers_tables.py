"""What the installed transformers supports, from the tables in its source files.

Importing transformers takes seconds, and the modules with these tables import torch. A table of a version that keeps it
elsewhere is empty.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_CONFIGS = "models/auto/auto_mappings.py", "models/auto/configuration_auto.py"
_MODELS = "models/auto/modeling_auto.py"
_QUANTIZERS = "quantizers/auto.py"


def config_classes() -> Mapping[str, str]:
    """Return the name of the configuration's class by `model_type`."""
    return _table("CONFIG_MAPPING_NAMES", *_CONFIGS)


def decoder_types() -> Collection[str]:
    """Return the types of decoders of text."""
    return _types("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


def masked_types() -> Collection[str]:
    """Return the types of models that predict masked tokens: encoders, and some encoder-decoder models."""
    return _types("MODEL_FOR_MASKED_LM_MAPPING_NAMES")


def translating_types() -> Collection[str]:
    """Return the types of models that compute text from other text or speech, which most encoder-decoder models do."""
    return _types("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")


def quantization_methods() -> Collection[str]:
    """Return the values of `quant_method`."""
    return _table("AUTO_QUANTIZATION_CONFIG_MAPPING", _QUANTIZERS).keys()


def activations() -> Collection[str]:
    """Return the names of activation functions."""
    values = (
        getattr(statement, "value", None)
        for statement in _statements("activations.py")
        if _target(statement) == "ACT2CLS"
    )
    return [_text(key) for value in values if isinstance(value, ast.Dict) for key in value.keys]


@cache
def _types(name: str) -> Collection[str]:
    """Return the types of a table of models. Those that share a configuration's class are all of the same kind."""
    classes, named = config_classes(), _table(name, _MODELS)
    with_model = {classes.get(model_type) for model_type in named}
    return named.keys() | {model_type for model_type, kind in classes.items() if kind in with_model}


@cache
def _table(name: str, *files: str) -> Mapping[str, str]:
    """Return the pairs of strings in the statements that assign to a name or update it. A value that is not a string
    becomes an empty one."""
    return dict(
        pair
        for file in files
        for statement in _statements(file)
        if _target(statement) == name
        for pair in _pairs(statement)
    )


@cache
def _statements(file: str) -> Sequence[ast.stmt]:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return ()
    try:
        return ast.parse(Path(spec.origin).parent.joinpath(file).read_bytes()).body
    except (OSError, SyntaxError):
        return ()


def _target(statement: ast.stmt) -> str | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update"))):
            return name
    return None


def _pairs(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    for node in ast.walk(statement):
        match node:
            case ast.Dict(keys=keys, values=values):
                pairs = [*zip(keys, values, strict=True)]
            case ast.Tuple(elts=[key, value]):
                pairs = [(key, value)]
            case _:
                continue
        yield from ((_text(key), _text(value)) for key, value in pairs if _text(key))


def _text(value: ast.expr | None) -> str:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
