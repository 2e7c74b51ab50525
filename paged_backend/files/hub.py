"""Fetch files from the Hugging Face hub. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError
from tqdm import tqdm

from paged_backend.api.errors import ConfigError


class Silent(tqdm):
    """A progress bar that shows nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)  # an argument of the hub's own class
        super().__init__(*args, **kwargs | {"disable": True})


def fetch(
    name: str,
    patterns: list[str],
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    option: str = "model",
    bar: type[tqdm] = Silent,
) -> Path:
    """Return a directory with the files of a repository that match, from the cache or the hub.

    option: the engine option that names the repository. bar: shows the progress. Raises ConfigError.
    """
    try:
        path = snapshot_download(
            name, revision=revision, cache_dir=download_dir, allow_patterns=patterns, tqdm_class=bar
        )
        return Path(path)
    except Exception as error:  # e.g. no network, unknown name, no permission; the types differ
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, RepositoryNotFoundError):
            problem = "neither a directory nor on the hub, or private"
        elif isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError):
            problem = "not a directory, not in the cache of the hub, and the hub cannot be reached"
        else:
            problem = "not a directory, and not downloaded from the hub"
        raise ConfigError(f"{option}={json.dumps(name)}: {problem}: {reason}") from error
