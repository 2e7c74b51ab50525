"""`paged serve`: arguments and options."""

import json
from pathlib import Path

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import InputLimits
from paged_backend.files import start_checks
from paged_client.cli import main
from paged_client.serving import demo_model, launch
from paged_client.serving.supervisor import RestartPolicy


@pytest.fixture
def serve_calls(monkeypatch, tmp_path):
    """The calls of launch.serve, which is replaced."""
    calls = []
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(start_checks, "available_memory", lambda: 1 << 50)
    monkeypatch.setattr(launch, "serve", lambda *args, **kwargs: calls.append((args, kwargs)) or 7)
    return calls


def defaults(cache, port):
    """The arguments of launch.serve that are not given."""
    own = {"host": "127.0.0.1", "openai_port": None, "dynamo": False, "multi_lora": None}
    own |= {"verbose": False, "restart": None}
    return own | {"log_file": cache / "logs" / f"serve-{port}.log"}


def test_arguments_are_passed_to_the_launcher(serve_calls, tmp_path):
    options = [
        "-o",
        "dtype=float32",
        "-o",
        "max_num_seqs=8",
        "-o",
        "enable_prefix_caching=false",
        "-o",
        'tokenizer="a=b"',
    ]
    ports = ["--http-port", "1", "--grpc-port", "2", "--metrics-port", "65535"]
    assert main(["serve", "demo", *options, *ports, "--", "--log-verbose=1", "--", "-o"]) == 7
    expected = {"dtype": "float32", "max_num_seqs": 8, "enable_prefix_caching": False, "tokenizer": "a=b"}
    ports = {"http_port": 1, "grpc_port": 2, "metrics_port": 65535}
    flags = ["--log-verbose=1", "--", "-o"]
    assert serve_calls == [(("demo", expected), {**ports, "server_args": flags, **defaults(tmp_path, 1)})]


def test_invalid_option_is_rejected_before_the_server_starts(serve_calls, capsys):
    assert main(["serve", "demo", "-o", "max_num_seq=4"]) == 2
    assert "-o max_num_seq: unknown engine option; did you mean max_num_seqs?" in capsys.readouterr().err
    assert serve_calls == []


def test_engine_options_are_flags(serve_calls, capsys):
    assert main(["serve", "demo", "--max-model-len", "512", "--enforce-eager", "--name", "foo", "-o", "seed=3"]) == 7
    ((_, options),) = [call[0] for call in serve_calls]
    assert options == {"max_model_len": 512, "enforce_eager": True, "served_model_name": "foo", "seed": 3}
    assert main(["serve", "demo", "--dtype", "flot"]) == 2
    assert '--dtype="flot": must be "auto"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-model-le", "5"], "did you mean --max-model-len?"),
        (["--swap-space", "2GX"], '--swap-space="2GX": must be a number of at least 0, or with a unit like "500MB"'),
        (
            ["--quantization", "awq"],
            '--quantization="awq": must be "int8" or "int4"; a model whose weights are quantized needs no',
        ),
        (["--seed", "1", "-o", "seed=2"], "--seed: -o seed=… is given too"),
        (["--name", "a", "-o", "served_model_name=b"], "--name a: served_model_name=b is given too"),
        (["--name", "a/b"], "served_model_name='a/b': must be letters, digits"),
        (["--multi-lora", "missing.json"], "--multi-lora missing.json: no such file; create it with {} in it"),
        (["--enable-lora"], "--enable-lora: needs a list of adapters, --multi-lora FILE; {} in the file"),
        (["--", "--max-model-len", "512"], "--max-model-len: is an engine option, not one of tritonserver; put it"),
        (["--", "--log-verbose=1", "--no-enable-prefix-caching"], "--no-enable-prefix-caching: is an engine option"),
        (["--temperature", "0"], """set with --override-generation-config '{"temperature": 0}'\n"""),
        (["--max-tokens=9"], """set with --override-generation-config '{"max_new_tokens": 9}'\n"""),
        (["--top-p"], """set with --override-generation-config '{"top_p": VALUE}'\n"""),
        (["--wrong"], "--wrong: unknown option; see `paged serve --help` and"),
    ],
)
def test_invalid_flags_are_rejected(serve_calls, capsys, arguments, named):
    assert main(["serve", "demo", *arguments]) == 2
    assert named in capsys.readouterr().err
    assert serve_calls == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# Title", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", 'must have a JSON object of names and directories, like {"name": "directory"}'),
        ('{"a": 1}', "must have a JSON object of names and directories"),
        (None, "Is a directory"),
    ],
)
def test_list_of_adapters_is_checked_before_the_server_starts(serve_calls, capsys, tmp_path, text, problem):
    listing = tmp_path / "adapters"
    if text is None:
        listing.mkdir()
    else:
        listing.write_text(text)
    assert main(["serve", "demo", "--multi-lora", str(listing)]) == 2
    assert f"--multi-lora {listing}: {problem}" in capsys.readouterr().err
    assert serve_calls == []


def test_valid_list_of_adapters(serve_calls, tmp_path, capsys):
    """A directory may be filled later, so that a missing one gets a warning."""
    listing, directory = tmp_path / "adapters.json", tmp_path / "directory"
    listing.write_text('{"a": "directory"}')
    assert main(["serve", "demo", "--multi-lora", str(listing)]) == 7
    assert serve_calls[0][1]["multi_lora"] == listing
    missing = f"warning: --multi-lora {listing}: a: {directory / 'adapter_config.json'} does not exist\n"
    assert missing in capsys.readouterr().err
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    assert main(["serve", "demo", "--multi-lora", str(listing)]) == 7
    assert "does not exist" not in capsys.readouterr().err


def test_sizes_have_units(serve_calls):
    sizes = ["--kv-cache-memory-bytes", "25.3G", "--swap-space", "2GiB", "-o", "limits.max_structure_bytes=128KiB"]
    assert main(["serve", "demo", *sizes]) == 7
    ((_, options),) = [call[0] for call in serve_calls]
    assert EngineConfig.from_options({"model": "m", **options}) == EngineConfig(
        model="m",
        kv_cache_memory_bytes=int(25.3 * 2**30),
        swap_space=2.0,
        limits=InputLimits(max_structure_bytes=128 << 10),
    )


def test_model_may_be_given_as_an_option(serve_calls, tmp_path):
    assert main(["serve", "-o", "model=demo"]) == 7
    ports = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}
    assert serve_calls == [(("demo", {}), {**ports, "server_args": [], **defaults(tmp_path, 8000)})]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "MODEL or -o model="),
        (["a", "-o", "model=b"], "MODEL or -o model="),
        (["-o", "model=3"], "-o model=3"),
        (["a", "-o", "dtype"], "-o dtype: must be KEY=VALUE"),
        (["a", "-o", "=1"], "-o =1: must be KEY=VALUE"),
        (["a", "-o", "k=1", "-o", "k=2"], "-o k=2: k is given twice"),
    ],
)
def test_invalid_options_are_rejected(serve_calls, capsys, arguments, named):
    assert main(["serve", *arguments]) == 2
    assert named in capsys.readouterr().err
    assert serve_calls == []


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "²"])
def test_port_out_of_range_is_rejected(serve_calls, capsys, port):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "a", f"--http-port={port}"])
    assert "must be 1..65535" in capsys.readouterr().err


def test_restart_and_its_times(serve_calls, capsys):
    assert main(["serve", "demo", "--restart", "--probe-interval", "5"]) == 7
    assert serve_calls[-1][1]["restart"] == RestartPolicy(probe_interval=5)
    for flag in ("--probe-interval", "--probe-timeout"):
        assert main(["serve", "demo", flag, "5"]) == 2
        assert f"{flag}: has no effect without --restart" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "address"), [("0.0.0.0", "0.0.0.0"), ("[::1]", "::1")])
def test_host(serve_calls, given, address):
    assert main(["serve", "demo", "--host", given]) == 7
    assert serve_calls[-1][1]["host"] == address


def test_host_must_be_an_address(serve_calls, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "demo", "--host", "example"])
    assert "'example': must be an IP address of this machine, or 0.0.0.0 for all" in capsys.readouterr().err


def test_log_file_and_verbose(serve_calls, tmp_path):
    log = tmp_path / "new" / "serve.log"
    assert main(["serve", "demo", "--log-file", str(log), "--verbose"]) == 7
    ((_, arguments),) = serve_calls
    assert (arguments["log_file"], arguments["verbose"]) == (log, True)


def test_log_file_that_cannot_be_written(serve_calls, capsys, tmp_path, monkeypatch):
    assert main(["serve", "demo", "--log-file", str(tmp_path)]) == 2
    assert f"--log-file {tmp_path}: Is a directory" in capsys.readouterr().err
    assert serve_calls == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path / "file"))
    assert main(["serve", "demo"]) == 7
    assert "warning: the log is not kept: " in capsys.readouterr().err
    assert serve_calls[0][1]["log_file"] is None


def test_model_repository_is_printed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model, "prepare", lambda: tmp_path / "demo")
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["model-repository"]) == 0
    (printed,) = capsys.readouterr().out.splitlines()
    assert json.loads(Path(printed, "paged_llm/1/model.json").read_text())["model"] == str(tmp_path / "demo")
    own = ["model-repository", str(tmp_path), "--max-model-len", "512", "--name", "own"]
    assert main([*own, "--directory", str(tmp_path / "models")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/models\n"
    written = json.loads((tmp_path / "models/own/1/model.json").read_text())
    assert written.items() >= {"model": str(tmp_path), "max_model_len": 512, "served_model_name": "own"}.items()


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["/no/such/model"], 1, "paged model-repository: model='/no/such/model': must be 'demo', a directory"),
        (["a", "-o", "model=b"], 2, "the model is given twice"),
        (["--max-model-len", "-1"], 2, "--max-model-len=-1: must be"),
        (["--http-port", "1"], 2, "--http-port: unknown option; see `paged model-repository --help`"),
        (["--multi-lora", "missing.json"], 2, "--multi-lora missing.json: no such file"),
    ],
)
def test_invalid_arguments_of_model_repository(capsys, arguments, code, named):
    assert main(["model-repository", *arguments]) == code
    assert named in capsys.readouterr().err
