"""Reports the progress of downloads from the hub and of loading weights, instead of the bars of these libraries."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from paged_backend.utils.startup import Progress

# The phases of bars that count tensors, by the beginning of their description.
WEIGHT_BARS = {"Loading weights": "loading weights", "Converting": "converting weights"}


def download_bar(name: str) -> type[tqdm]:
    """Return a `tqdm_class` for the download of a repository. Its bars show nothing but report the bytes of all files.

    Without `HF_HUB_DISABLE_XET`, one bar counts the bytes received and one those written; the larger number counts.
    """
    progress = Progress(f"downloading {name}", unit="B")
    received: dict[int, tuple[int, int]] = {}

    class Bar(tqdm):
        monitor_interval = 0  # no thread that watches over bars

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # an argument of the hub's own class
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            self._report()
            return shown

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            self._report()
            return True

        def _report(self) -> None:
            if self.unit == "B" and self.total:  # other bars count files
                received[id(self)] = (int(self.n), int(self.total))
                progress.update(*max(received.values()))

    return Bar


@contextmanager
def weights_reported() -> Iterator[None]:
    """Report the tensors that transformers loads on this thread."""
    set_hook = getattr(transformers_logging, "set_tqdm_hook", None)  # releases without it show their own bar
    if set_hook is None:
        yield
        return
    previous = set_hook(lambda factory, args, kwargs: make_bar(factory, *args, **kwargs))
    try:
        yield
    finally:
        set_hook(previous)


def make_bar(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `factory` makes. For a bar that counts tensors, return an iterator that reports them."""
    description = str(kwargs.get("desc"))
    phase = next((phase for begin, phase in WEIGHT_BARS.items() if description.startswith(begin)), None)
    if phase and args and hasattr(args[0], "__len__"):
        return _counted(phase, args[0])
    return factory(*args, **kwargs)


def _counted(phase: str, items: Collection[Any]) -> Iterator[Any]:
    progress = Progress(phase, len(items), "tensors")
    for item in items:
        yield item
        progress.advance()
