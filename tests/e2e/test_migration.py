"""Streams continue in the new instance when Triton loads the model again: every token is compared."""

import asyncio
import json
import shutil
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from tests.support import faults
from tests.support.replacements import distinct_requests, replace_under_load, tie_check, unexplained
from tests.support.stress.models import Models
from tests.support.stress.server import ROOMY, engine_alone, save_printable
from tests.support.triton import idle, metrics, plain_server
from tests.support.trtllm_streams import ASKED, opened
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
GONE = "UNAVAILABLE: the engine's model, paged_llm, is not loaded"
RELAYED = ASKED | {"text_input": [["The/sea"]]}
FLAGS = ("--model-control-mode=explicit", "--load-model=paged_llm")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("streams", "replacements", "output"),
    [
        pytest.param(3, 1, (60, 90), id="few"),
        pytest.param(1_000, 10, (300, 900), id="many"),
    ],
)
def test_streams_continue_when_the_model_is_replaced(tmp_path, streams, replacements, output, print_line, figures):
    save_printable(tmp_path / "model", positions=1024)
    repository = engine_alone(tmp_path / "repository")
    shutil.copytree(ROOT / "model_repository" / "ensemble", repository / "ensemble")
    if streams < 100:
        faults.inject_into_repository(repository, {"slow_steps": 20})
    options = ROOMY | {
        "enable_prefix_caching": True,
        "max_num_seqs": 2 * streams,
        "num_gpu_blocks_override": 300 * streams,
        "model": str(tmp_path / "model"),
    }
    (repository / "paged_llm" / "1" / "model.json").write_text(json.dumps(options))
    requests = distinct_requests(streams, output=output, seed=3)
    with (
        plain_server(repository, *FLAGS, "--load-model=ensemble") as server,
        closing(Models(server, repository)) as models,
    ):
        report = asyncio.run(
            replace_under_load(server.grpc_url, requests, models.replace, replacements=replacements, say=print_line)
        )
        found = metrics(server)
        moved = found["paged_migrated_requests_total"]
        reused = found["paged_prefix_cache_hit_tokens_total"]
        idle(server)
        unload_with_an_open_stream(server, models)
        log = "".join(server.log)
        models.close()
    figures(f"{report}; moved {moved:.0f} requests; {reused:.0f} tokens found in the prefix cache")
    assert report.interrupted == []
    assert unexplained(tmp_path / "model", requests, report) == []
    assert report.replaced == replacements and report.streams >= streams
    assert moved >= streams
    assert reused
    assert "Traceback" not in log


def unload_with_an_open_stream(server, models):
    """A request that another model forwards to the engine ends first. After that the other model says why it fails."""
    expected = _relayed(server)
    with opened(server, "ensemble") as stream:
        stream.send(**RELAYED)
        first, _ = stream.next()
        models.start_unloading()
        assert _text([first, *stream.all()]) == expected
    until(lambda: _relayed(server) == GONE, "an engine that is gone, some time after the server says so")


def _relayed(server):
    with opened(server, "ensemble") as stream:
        stream.send(**RELAYED)
        try:
            return _text(stream.all())
        except InferenceServerException as error:
            return error.message()


@pytest.mark.nightly
def test_outputs_that_differ_by_rounding_are_told_from_wrong_ones(tmp_path):
    """Of a million sampled tokens one is so close to another that it depends on how the tokens before were computed."""
    save_printable(tmp_path / "model", positions=1024)
    request = distinct_requests(1_000, output=(300, 900), seed=3)[310]
    with tie_check(tmp_path / "model") as check:
        tokens: list[int] = []
        while len(tokens) < 201:
            tokens.append(check._next(request, 0, tokens, biased=0))
        found = {token: check.is_tie(request, 0, [*tokens[:200], token], [*tokens[:200], 1]) for token in (2, 3, 93)}
    assert found == {2: False, 3: False, 93: True}


@pytest.mark.nightly
def test_streams_through_other_models_continue(tiny, tmp_path):
    """Triton ends the old instance at once, since it has no requests of its own. It stays longer than stop_timeout,
    because the other model's streams go through it."""
    repository = engine_alone(tmp_path)
    shutil.copytree(ROOT / "model_repository" / "ensemble", tmp_path / "ensemble")
    faults.inject_into_repository(repository, {"slow_steps": 60})
    options = {"model": str(tiny[0]), "dtype": "float32", "num_gpu_blocks_override": 1024, "stop_timeout": 1}
    (repository / "paged_llm" / "1" / "model.json").write_text(json.dumps(options))
    asked = ASKED | {"max_tokens": [[200]]}
    with (
        plain_server(repository, *FLAGS, "--load-model=ensemble") as server,
        closing(Models(server, repository)) as models,
        ExitStack() as stack,
    ):

        def begin():
            stream = stack.enter_context(opened(server, "ensemble"))
            stream.send(**asked)
            return stream

        expected = _text(begin().all())
        replacing, streams = threading.Thread(target=models.replace), []
        replacing.start()
        while replacing.is_alive():  # so that some are open when the new instance is ready, however long it takes
            streams.append(begin())
            replacing.join(2)
        assert {_text(stream.all()) for stream in streams} == {expected}
        assert metrics(server)["paged_migrated_requests_total"] > 0
        models.close()


def _text(responses):
    return b"".join(one["text_output"].item() for one in responses if "text_output" in one)
