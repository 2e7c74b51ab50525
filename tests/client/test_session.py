"""Conversations at the terminal."""

import io
import json
import signal
import sys
from types import SimpleNamespace

from paged_client import session
from paged_client.cli import main
from paged_client.types import Completion
from tests.support.client_calls import SAY, sampling, standard_input
from tests.support.fake_servers import WAIT


def test_piped_input_is_a_single_turn(command_fake, monkeypatch, capsys):
    standard_input(monkeypatch, "What is it?\n")
    assert main(["chat", *command_fake.flags, "--system", "Be brief.", "-p", SAY]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    (request,) = command_fake.seen.requests
    assert json.loads(request["messages"]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
    ]
    assert "text_input" not in request


def converse(command_fake, monkeypatch, lines, *flags):
    """Enter `lines` at a terminal, then Ctrl-D. A line that is an exception is raised instead."""
    standard_input(monkeypatch, "", terminal=True)
    names = ("read_history_file", "set_history_length", "write_history_file")
    monkeypatch.setitem(sys.modules, "readline", SimpleNamespace(**{name: lambda _: None for name in names}))
    left = iter([*lines, EOFError()])

    def read(prompt):
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", *command_fake.flags, *flags]) == 0
    return [json.loads(request["messages"]) for request in command_fake.seen.requests]


def test_conversation_keeps_its_history(command_fake, monkeypatch):
    sent = converse(command_fake, monkeypatch, ["one", " ", KeyboardInterrupt(), "two"], "-p", SAY)
    first, second = sent
    assert [message["content"] for message in first] == ["one"]
    assert [(message["role"], message["content"]) for message in second] == [
        ("user", "one"),
        ("assistant", "Hello there"),
        ("user", "two"),
    ]


def test_failed_turn_is_not_in_the_history(command_fake, monkeypatch, capsys):
    sent = converse(command_fake, monkeypatch, ["one", "two"], "-p", "say=[]", "-p", "fail=UNAVAILABLE: full")
    assert [[message["content"] for message in messages] for messages in sent] == [["one"], ["two"]]
    assert capsys.readouterr().err == "paged: UNAVAILABLE: full\n" * 2


def test_ctrl_c_keeps_the_partial_reply(grpc_fake, monkeypatch, capsys):
    interrupted = []

    def print_deltas(self, stream, whole):
        """Be interrupted where a KeyboardInterrupt would leave gRPC's lock held."""
        next(stream)
        next(stream)
        if interrupted:
            return stream.cancel()
        signal.raise_signal(signal.SIGINT)
        interrupted.append(True)
        assert not list(stream)

    monkeypatch.setattr(session.TerminalSession, "_print_deltas", print_deltas)
    sent = converse(grpc_fake, monkeypatch, ["one", "two"], "-p", SAY, "-p", "hold=true")
    assert grpc_fake.seen.left.wait(WAIT)
    assert [message["content"] for message in sent[1]] == ["one", "Hello there", "two"]
    assert interrupted


def test_an_answer_is_limited_by_default_and_says_when_it_was_cut(command_fake, monkeypatch, capsys):
    standard_input(monkeypatch, "x")
    assert main(["chat", *command_fake.flags, "-p", SAY]) == 0
    assert capsys.readouterr().err == ""
    assert sampling(command_fake) == {"max_tokens": session.ANSWER_TOKENS}
    standard_input(monkeypatch, "x")
    assert main(["chat", *command_fake.flags, "-p", SAY, "-p", "reason=length"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello there\n"
    assert printed.err == "note: the answer was cut after 4 tokens; --max-tokens N allows more\n"


def test_a_conversation_says_when_an_answer_was_cut(command_fake, monkeypatch, capsys):
    sent = converse(command_fake, monkeypatch, ["one", "/set max_tokens 9", "two"], "-p", SAY, "-p", "reason=length")
    assert [message["content"] for message in sent[1]] == ["one", "Hello there", "two"], "the cut answer is kept"
    note = "note: the answer was cut after 4 tokens; /set max_tokens N allows more\n"
    assert capsys.readouterr().err == note * 2
    assert [sampling(command_fake, number)["max_tokens"] for number in (0, 1)] == [session.ANSWER_TOKENS, 9]


def test_an_answer_may_fill_a_short_context(command_fake, monkeypatch, capsys):
    """The server rejects more tokens than the context has room for."""
    own = command_fake.seen.script

    def script(inputs, request_id):
        scripted = own(inputs, request_id)
        limit = scripted["max_tokens"]
        error = f"INVALID_ARGUMENT: max_tokens={limit}: must be 1..9 after a prompt of 7 tokens (max_model_len is 16)"
        return {"say": ["a"], "reason": "length"} if limit is None else {"say": [], "fail": error}

    monkeypatch.setattr(command_fake.seen, "script", script)
    standard_input(monkeypatch, "x")
    assert main(["chat", *command_fake.flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == "a\n"
    why = "the model's max_new_tokens, context or KV cache allows no more"
    assert printed.err == f"note: the answer was cut after 2 tokens; {why}\n"
    standard_input(monkeypatch, "x")
    assert main(["chat", *command_fake.flags, "--max-tokens", "10"]) == 1
    assert "max_tokens=10: must be 1..9" in capsys.readouterr().err


def test_other_errors_of_an_answer_are_not_tried_again(command_fake, monkeypatch, capsys):
    standard_input(monkeypatch, "x")
    assert main(["chat", *command_fake.flags, "-p", "say=[]", "-p", "fail=INVALID_ARGUMENT: messages: no"]) == 1
    assert capsys.readouterr().err == "paged: INVALID_ARGUMENT: messages: no\n"
    assert len(command_fake.seen.requests) == 1


def test_no_stream_prints_once(grpc_fake, capsys, monkeypatch):
    printed = []
    monkeypatch.setattr("builtins.print", lambda *args, **kwargs: printed.append(args))
    assert main(["generate", "x", *grpc_fake.flags, "--no-stream", "-p", SAY]) == 0
    assert printed == [("Hello there",)]


def test_stats_are_printed_to_standard_error(grpc_fake, capsys):
    assert main(["generate", "x", *grpc_fake.flags, "--stats", "-p", SAY]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello there\n"
    assert captured.err.startswith("7 prompt tokens, 4 output tokens (stop); first text after ")
    assert "tokens/s" in captured.err


def test_stats_count_every_sample():
    others = (Completion("b", "length", 7, 5), Completion("c", "stop", 7, 1))
    report = session.Timing(0.0).report(Completion("a", "stop", 7, 4, others))
    assert report.startswith("7 prompt tokens, 10 output tokens (stop, length); ")


def test_stats_have_the_digests():
    completion = Completion("a", "stop", 7, 4, receipt={"cached_tokens": 2, "logits_digests": ["ab", "cd"]})
    report = session.Timing(0.0).report(completion)
    assert report.splitlines()[1:] == ["digest of the logits: ab", "digest of the logits: cd"]


def test_standard_input_must_be_utf8(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert main(["generate"]) == 2
    assert "standard input: not UTF-8" in capsys.readouterr().err
