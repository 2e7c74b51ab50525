"""A pytest plugin for test files of vLLM and of Triton's OpenAI frontend: what they import of these projects, and
their server, which is a gateway here.

They run in a process of their own (upstream_suites.py), with the variables below.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import openai
import pytest
import requests

from tests.support.gateway import gateway

SERVER, MODEL, TOKENIZER = "UPSTREAM_SERVER", "UPSTREAM_MODEL", "UPSTREAM_TOKENIZER"
_FLAGS = ("--root-path",)  # options of vLLM's server that the gateway has, too
SECONDS = 60  # for a request, and for an asynchronous test
_loop = asyncio.new_event_loop()


class RemoteOpenAIServer:
    """Takes the place of vLLM's class: a gateway of the server that runs already. Other options have no effect."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, arguments: list[str], *, env_dict: dict[str, str] | None = None, **others: Any):
        self._flags = [
            part for flag in _FLAGS if flag in arguments for part in (flag, arguments[arguments.index(flag) + 1])
        ]
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            self._flags += ["--api-key", key]
        self._open = ExitStack()

    def __enter__(self) -> RemoteOpenAIServer:
        self.url_root = self._open.enter_context(gateway(os.environ[SERVER], *self._flags)).url
        return self

    def __exit__(self, *reason: object) -> None:
        self._open.close()

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        own = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": SECONDS}
        return own | options


class ModelConfig:
    """Takes the place of vLLM's class."""

    def __init__(self, *arguments: Any, **options: Any):
        from transformers import AutoConfig

        self._config = AutoConfig.from_pretrained(os.environ[TOKENIZER])

    def get_vocab_size(self) -> int:
        return int(self._config.vocab_size)


def get_tokenizer(*arguments: Any, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ[TOKENIZER])


# Of Triton's frontend: its conftest.py and utils.py. Tests that make an application of their own give it a tokenizer.


def setup_server(*arguments: Any, **options: Any) -> Any:
    return SimpleNamespace(stop=lambda: None)


def setup_fastapi_app(*, tokenizer: str = "", **options: Any) -> list[str]:
    return ["--tokenizer", tokenizer] if tokenizer else []


class _Session(requests.Session):
    """Takes the place of FastAPI's client: URLs are relative to the gateway's."""

    base = ""

    def request(self, method: str, url: str, **options: Any) -> requests.Response:  # type: ignore[override]
        return super().request(method, self.base + url, timeout=SECONDS, **options)


@contextmanager
def open_client(flags: list[str]) -> Iterator[_Session]:
    with gateway(os.environ[SERVER], *flags) as front, _Session() as client:
        client.base = front.url
        yield client


@pytest.fixture(scope="class")
def fastapi_client_class_scope() -> Iterator[_Session]:
    with open_client([]) as client:
        yield client


@pytest.fixture(scope="module")
def server() -> Iterator[RemoteOpenAIServer]:
    with RemoteOpenAIServer("", []) as started:
        yield started


@pytest.fixture(scope="session")
def backend() -> str:
    return "vllm"


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ[MODEL]


@pytest.fixture(scope="session")
def model_repository() -> str:
    return os.devnull


@pytest.fixture(scope="session")
def tokenizer_model() -> str:
    return os.environ[TOKENIZER]


@pytest.fixture(scope="session")
def prompt() -> str:
    return "What is machine learning?"


@pytest.fixture(scope="session")
def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _fixture(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a fixture, like pytest_asyncio.fixture, of an asynchronous generator."""
    if function is None:
        return lambda one: _fixture(one, **options)

    def run(*arguments: Any, **values: Any) -> Iterator[Any]:
        generator = function(*arguments, **values)
        yield _loop.run_until_complete(anext(generator))
        _loop.run_until_complete(anext(generator, None))

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    run.__name__ = function.__name__
    return pytest.fixture(run, **options)


def _module(name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members, __path__=[])
    sys.modules[name] = module


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "asyncio: an asynchronous test")
    config.addinivalue_line("markers", "skip_global_cleanup: of vLLM")
    config.addinivalue_line("markers", "openai: of Triton")
    huggingface_hub.snapshot_download = lambda *arguments, **options: os.devnull  # adapters, which are not served here
    _module("pytest_asyncio", fixture=_fixture)
    _module("fastapi")
    _module("fastapi.testclient", TestClient=open_client)
    _module("tritonserver", Server=None)
    _module("vllm")
    _module("vllm.config", ModelConfig=ModelConfig)
    _module("vllm.tokenizers", get_tokenizer=get_tokenizer)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    _loop.run_until_complete(asyncio.wait_for(test, SECONDS))
    return True
