"""Deprecated name of `paged_client`: `import client` keeps working in this release, with a warning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from paged_client import *  # noqa: F403


class _Alias(MetaPathFinder, Loader):
    """Imports `client.x` as `paged_client.x`, so that both names are the same module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_ours = name.startswith("client.") and name != "client.__main__"
        return ModuleSpec(name, self) if is_ours else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(f"paged_{module.__name__}")


warnings.warn("the package `client` is now `paged_client`; import that", DeprecationWarning, stacklevel=2)
sys.meta_path.insert(0, _Alias())
