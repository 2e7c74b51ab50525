"""Tests of the `paged` command line: arguments, errors, output and exit codes."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from client import session
from client.cli import main
from client.commands import generate
from client.commands.arguments import parse_pairs
from client.serving import launch
from client.types import Completion, PagedError
from tests.support.fake_servers import SERVERS, WAIT

ROOT = Path(__file__).parents[2]

SAY = 'say=["Hello", " there"]'


@pytest.fixture(params=SERVERS)
def fake(request):
    """A fake server; `.flags` select it."""
    with SERVERS[request.param]() as seen:
        yield SimpleNamespace(seen=seen, flags=["--protocol", request.param, "--url", seen.url])


@pytest.fixture
def grpc_fake():
    with SERVERS["grpc"]() as seen:
        yield SimpleNamespace(seen=seen, flags=["--url", seen.url])


@pytest.fixture
def serve_calls(monkeypatch):
    """The calls of launch.serve, which is replaced."""
    calls = []
    monkeypatch.setattr(launch, "serve", lambda *args, **kwargs: calls.append((args, kwargs)) or 7)
    return calls


def standard_input(monkeypatch, text, *, terminal=False):
    stream = io.StringIO(text)
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stream)


def sampling(fake, number=0):
    """Return the sampling parameters of a request, without those that control the fake server."""
    sent = json.loads(fake.seen.requests[number]["sampling_parameters"])
    return {key: value for key, value in sent.items() if key not in ("say", "hold", "fail")}


class TestServe:
    def test_arguments_are_passed_to_the_launcher(self, serve_calls):
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
        assert serve_calls == [(("demo", expected), {**ports, "server_args": flags, "multi_lora": None})]

    def test_invalid_option_is_rejected_before_the_server_starts(self, serve_calls, capsys):
        assert main(["serve", "demo", "-o", "max_num_seq=4"]) == 2
        assert "-o max_num_seq: unknown engine option; did you mean max_num_seqs?" in capsys.readouterr().err
        assert serve_calls == []

    def test_installed_package_without_a_model_repository(self, serve_calls, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr("client.serving.repository.REPOSITORY_ROOT", tmp_path)
        assert main(["serve", "/models/x"]) == 2
        assert "needs a checkout of the repository" in capsys.readouterr().err
        assert not serve_calls

    def test_model_may_be_given_as_an_option(self, serve_calls):
        assert main(["serve", "-o", "model=/m"]) == 7
        ports = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}
        assert serve_calls == [(("/m", {}), {**ports, "server_args": [], "multi_lora": None})]

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
    def test_invalid_options_are_rejected(self, serve_calls, capsys, arguments, named):
        assert main(["serve", *arguments]) == 2
        assert named in capsys.readouterr().err
        assert serve_calls == []

    @pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "²"])
    def test_port_out_of_range_is_rejected(self, serve_calls, capsys, port):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "a", f"--http-port={port}"])
        assert "must be 1..65535" in capsys.readouterr().err


def test_pairs_are_parsed_as_json_or_text():
    pairs = parse_pairs("-p", ["a=1", "b=1.5", "c=true", "d=null", 'e=["x"]', 'f="1"', "g=x y", "h=", "i=[1"])
    assert pairs == {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": None,
        "e": ["x"],
        "f": "1",
        "g": "x y",
        "h": "",
        "i": "[1",
    }


class TestProbe:
    def test_probe_has_highest_priority_and_its_own_cache_salt(self, fake):
        salts = set()
        for _ in range(2):
            assert main(["probe", *fake.flags]) == 0
            asked = sampling(fake)
            fake.seen.requests.clear()
            salts.add(asked.pop("cache_salt"))
            assert asked == {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "priority": -(2**31)}
        assert len(salts) == 2

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (PagedError("UNAVAILABLE", "the waiting queue is full: 9 requests wait (max_queue_size); retry later"), 0),
            (PagedError("UNAVAILABLE", "the engine has stopped; reload the model"), 1),
            (PagedError("DEADLINE_EXCEEDED", "no answer within 10 s"), 1),
        ],
        ids=str,
    )
    def test_full_queue_counts_as_healthy(self, error, code, monkeypatch):
        def fails(*args, **kwargs):
            raise error

        monkeypatch.setattr(generate.Client, "generate", fails)
        assert main(["probe"]) == code


class TestGenerate:
    def test_output_is_printed_and_flags_are_sent(self, fake, capsys):
        flags = [
            "--max-tokens",
            "5",
            "--temperature",
            "0",
            "--top-p",
            "0.5",
            "--top-k",
            "3",
            "--min-p",
            "0.1",
        ]
        flags += ["--seed", "0", "--stop", "a", "--stop", "b", "-p", "ignore_eos=true"]
        assert main(["generate", "Say hello", *fake.flags, *flags, "-p", SAY]) == 0
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("Hello there\n", "")
        assert fake.seen.requests[0]["text_input"] == "Say hello"
        assert sampling(fake) == {
            "max_tokens": 5,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "seed": 0,
            "stop": ["a", "b"],
            "ignore_eos": True,
        }

    def test_default_sampling_parameters(self, grpc_fake, capsys):
        assert main(["generate", "x", *grpc_fake.flags, "-p", SAY]) == 0
        assert sampling(grpc_fake) == {"max_tokens": 256}

    @pytest.mark.parametrize("argument", [[], ["-"]])
    def test_prompt_from_standard_input(self, grpc_fake, monkeypatch, argument):
        standard_input(monkeypatch, "two\nlines\n")
        assert main(["generate", *argument, *grpc_fake.flags, "-p", SAY]) == 0
        assert grpc_fake.seen.requests[0]["text_input"] == "two\nlines"

    def test_no_stream_prints_once(self, grpc_fake, capsys, monkeypatch):
        printed = []
        monkeypatch.setattr("builtins.print", lambda *args, **kwargs: printed.append(args))
        assert main(["generate", "x", *grpc_fake.flags, "--no-stream", "-p", SAY]) == 0
        assert printed == [("Hello there",)]

    def test_stats_are_printed_to_standard_error(self, grpc_fake, capsys):
        assert main(["generate", "x", *grpc_fake.flags, "--stats", "-p", SAY]) == 0
        captured = capsys.readouterr()
        assert captured.out == "Hello there\n"
        assert captured.err.startswith("7 prompt tokens, 4 output tokens (stop); first text after ")
        assert "tokens/s" in captured.err

    def test_stats_count_every_sample(self):
        others = (Completion("b", "length", 7, 5), Completion("c", "stop", 7, 1))
        report = session.Timing(0.0).report(Completion("a", "stop", 7, 4, others))
        assert report.startswith("7 prompt tokens, 10 output tokens (stop, length); ")

    def test_error_after_partial_output(self, fake, capsys):
        fail = "fail=INVALID_ARGUMENT: top_p=2: no"
        assert main(["generate", "x", *fake.flags, "-p", SAY, "-p", fail]) == 1
        captured = capsys.readouterr()
        assert captured.out == "Hello there\n"
        assert captured.err == "paged: INVALID_ARGUMENT: top_p=2: no\n"

    @pytest.mark.parametrize("protocol", SERVERS)
    def test_no_server(self, capsys, protocol):
        assert main(["generate", "x", "--protocol", protocol, "--url", "localhost:1"]) == 1
        assert capsys.readouterr().err.startswith("paged: UNAVAILABLE: ")

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (["-p", "top_k"], "-p top_k: must be KEY=VALUE"),
            (["-p", "a=1", "-p", "a=2"], "-p a=2: a is given twice"),
            (["-p", "top_k=1", "--top-k", "2"], "--top-k is given too"),
            (["-p", "timeout=1"], "-p timeout=…: is not a sampling parameter"),
            (["--timeout", "0"], "timeout=0.0"),
            (["--url", "http://localhost:8001"], "url='http://localhost:8001'"),
        ],
    )
    def test_usage_errors(self, capsys, flags, named):
        assert main(["generate", "x", *flags]) == 2
        assert named in capsys.readouterr().err

    def test_standard_input_must_be_utf8(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
        assert main(["generate"]) == 2
        assert "standard input: not UTF-8" in capsys.readouterr().err

    def test_ctrl_c_cancels_the_request(self, fake):
        """Runs in a subprocess, to test the signal, the exit code and the cancellation on the server."""
        # The background jobs of a shell ignore SIGINT, and so would our child.
        code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        code += "from client.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "generate", "x", *fake.flags, "-p", SAY, "-p", "hold=true"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout.read(11) == b"Hello there"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT)
        assert (process.returncode, out, err) == (130, b"", b"")
        assert fake.seen.left.wait(WAIT)

    def test_closed_output_pipe_has_no_traceback(self, grpc_fake):
        command = [sys.executable, "-m", "client", "generate", "x", *grpc_fake.flags]
        # More than the buffer of a pipe, so that the command is still writing when its reader closes it.
        many = json.dumps(["x" * 1000] * 100)
        with subprocess.Popen(
            [*command, "-p", f"say={many}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            process.stdout.read(5)
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 1


class TestChat:
    def test_piped_input_is_a_single_turn(self, fake, monkeypatch, capsys):
        standard_input(monkeypatch, "What is it?\n")
        assert main(["chat", *fake.flags, "--system", "Be brief.", "-p", SAY]) == 0
        assert capsys.readouterr().out == "Hello there\n"
        (request,) = fake.seen.requests
        assert json.loads(request["messages"]) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is it?"},
        ]
        assert "text_input" not in request

    def converse(self, fake, monkeypatch, lines, *flags):
        """Enter `lines` at a terminal, then Ctrl-D. A line that is an exception is raised instead."""
        standard_input(monkeypatch, "", terminal=True)
        monkeypatch.setitem(sys.modules, "readline", SimpleNamespace())
        left = iter([*lines, EOFError()])

        def read(prompt):
            line = next(left)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        assert main(["chat", *fake.flags, *flags]) == 0
        return [json.loads(request["messages"]) for request in fake.seen.requests]

    def test_conversation_keeps_its_history(self, fake, monkeypatch):
        sent = self.converse(fake, monkeypatch, ["one", " ", KeyboardInterrupt(), "two"], "-p", SAY)
        first, second = sent
        assert [message["content"] for message in first] == ["one"]
        assert [(message["role"], message["content"]) for message in second] == [
            ("user", "one"),
            ("assistant", "Hello there"),
            ("user", "two"),
        ]

    def test_failed_turn_is_not_in_the_history(self, fake, monkeypatch, capsys):
        sent = self.converse(fake, monkeypatch, ["one", "two"], "-p", "say=[]", "-p", "fail=UNAVAILABLE: full")
        assert [[message["content"] for message in messages] for messages in sent] == [["one"], ["two"]]
        assert capsys.readouterr().err == "paged: UNAVAILABLE: full\n" * 2

    def test_ctrl_c_keeps_the_partial_reply(self, grpc_fake, monkeypatch, capsys):
        interrupted = iter([True])

        def print_deltas(self, stream, whole):
            next(stream)
            next(stream)
            if next(interrupted, False):
                raise KeyboardInterrupt
            stream.cancel()

        monkeypatch.setattr(session.TerminalSession, "_print_deltas", print_deltas)
        sent = self.converse(grpc_fake, monkeypatch, ["one", "two"], "-p", SAY, "-p", "hold=true")
        assert grpc_fake.seen.left.wait(WAIT)
        assert [message["content"] for message in sent[1]] == ["one", "Hello there", "two"]


class TestBench:
    @pytest.fixture(autouse=True)
    def package(self, tmp_path, monkeypatch):
        """A package with a benchmark and a private helper module."""
        bench = tmp_path / "paged_bench"
        bench.mkdir()
        (bench / "__init__.py").touch()
        (bench / "_helper.py").touch()
        (bench / "on_gpu.py").touch()
        (bench / "throughput.py").write_text("def main(argv):\n    print(argv)\n    return 3\n")
        monkeypatch.syspath_prepend(tmp_path)
        for name in [name for name in sys.modules if name.startswith("paged_bench")]:
            monkeypatch.delitem(sys.modules, name)
        yield
        for name in [name for name in sys.modules if name.startswith("paged_bench")]:
            del sys.modules[name]

    def test_bench_passes_all_arguments_on(self, capsys):
        assert main(["bench", "throughput", "--url", "x", "--", "-h"]) == 3
        assert capsys.readouterr().out == "['--url', 'x', '--', '-h']\n"

    @pytest.mark.parametrize("arguments", [[], ["nope"], ["_helper"], ["on_gpu"]])
    def test_unknown_benchmark_lists_available_ones(self, capsys, arguments):
        assert main(["bench", *arguments]) == 2
        message = capsys.readouterr().err
        assert "\n  throughput" in message
        assert "  _helper" not in message
        assert "  on_gpu" not in message


@pytest.mark.parametrize("arguments", [[], ["nope"], ["generate", "--top-k", "x"]])
def test_argparse_errors(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: paged" in capsys.readouterr().err
