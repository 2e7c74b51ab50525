"""Everything that a client may send has a limit, which is an option with a default, and which an error names."""

import ast
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from client.cli import build_parser
from paged_backend.api import errors
from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import SHOWN_CHARS, RequestError, invalid_argument
from paged_backend.api.limits import EngineLimits, InputLimits
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.server.wire.read import read_call
from paged_backend.trtllm.caps import RelayCaps
from tests.support.callers import Caller, serving
from tests.support.wire_requests import text

LIMITS = EngineLimits(64, 320, 256, 4, 8)
# What is one too much of each: sampling parameters that exceed a limit of 3.
SAMPLING = {
    "max_logprobs": {"logprobs": 4},
    "max_stop_strings": {"stop": ["a"] * 4},
    "max_stop_bytes": {"stop": "éé"},
    "max_stop_token_ids": {"stop_token_ids": [0, 1, 2, 3]},
    "max_bad_words": {"bad_words": ["a"] * 4},
    "max_biased_words": {"word_bias": dict.fromkeys("abcd", 1)},
    "max_word_bytes": {"bad_words": "abcd"},
    "max_token_words": {"bad_words_token_ids": [[1]] * 4},
    "max_token_word_ids": {"stop_words_token_ids": [[1, 2, 3, 4]]},
    "max_allowed_token_ids": {"allowed_token_ids": [0, 1, 2, 3]},
    "max_logit_biases": {"logit_bias": dict.fromkeys("0123", 1)},
    "max_structure_bytes": {"regex": "abcd"},
    "max_choices": {"choice": ["a"] * 4},
    "max_salt_bytes": {"cache_salt": "abcd"},
    "max_adapter_name_bytes": {"lora_name": "abcd"},
}
FUNCTION = {"function": {"name": "f"}}
TURN = {"role": "user", "content": "a"}
# Likewise of the rest, which is read before: (tensors, parameters).
CALLS = {
    "max_request_id_bytes": ({"text_input": "a"}, {"id": "abcd"}),
    "max_sequence_id_bytes": ({"text_input": "a"}, {"sequence_id": "abcd"}),
    "max_json_chars": ({"text_input": "a", "sampling_parameters": "    {}"}, {}),
    "max_messages": ({"messages": json.dumps([TURN] * 4)}, {}),
    "max_tools": ({"messages": json.dumps([TURN]), "tools": json.dumps([FUNCTION] * 4)}, {}),
    "max_tools_chars": ({"messages": json.dumps([TURN]), "tools": json.dumps([FUNCTION])}, {}),
    "max_tool_calls": ({"messages": json.dumps([TURN | {"tool_calls": [FUNCTION] * 4}])}, {}),
}


# Of the others, the test whose error names it.
ELSEWHERE = {
    "max_queued_structures": "guided/test_grammars.test_more_than_may_wait_are_refused_at_once",
    "max_remembered_structures": "guided/test_grammars.test_what_was_compiled_is_remembered_as_far_as_there_is_room",
    "max_remembered_structure_bytes": (
        "guided/test_grammars.test_what_was_compiled_is_remembered_as_far_as_there_is_room"
    ),
    "max_frame_bytes": "server/test_local_socket.test_an_oversized_frame_is_neither_sent_nor_read",
    "max_local_connections": "server/test_local_socket.test_a_refused_connection_reports_the_reason",
    "max_model_len": "server/test_embedding.test_an_embedding_prompt_may_fill_the_context",
    "min_priority": "api/test_limits.test_a_priority_may_be_no_lower_than_the_operator_lets_it",
    "max_prompt_chars": "api/test_limits.test_the_limits_are_options",
    "max_queue_size": "server/test_admission.test_a_full_queue_rejects_requests_until_a_place_is_free",
    "max_tenant_requests": "server/test_admission.test_the_open_request_limit_applies_per_tenant",
    "max_response_mib": "server/test_admission.test_a_response_larger_than_max_response_mib_fails",
    "request_timeout": "server/test_faults.test_stuck_step_delays_neither_requests_nor_shutdown",
    "stop_timeout": "server/test_faults.test_stuck_step_delays_neither_requests_nor_shutdown",
    "stall_timeout": "server/test_admission.test_a_stalled_step_makes_the_service_not_ready",
    "max_sessions": "server/test_sessions.test_sessions_beyond_max_sessions_are_rejected",
    "max_tenant_sessions": "server/test_sessions.test_max_tenant_sessions_applies_per_tenant",
    "max_sessions_mib": "server/test_sessions.test_max_sessions_mib_limits_all_sessions",
    "chat_template_timeout": "text/test_conversation.test_a_template_that_does_not_terminate_is_stopped",
    "tokenize_timeout": "text/test_tokenizing.test_slow_tokenization_times_out_and_never_runs_twice",
    "structured_outputs_timeout": (
        "guided/test_grammars.test_a_compilation_that_takes_too_long_is_ended_and_holds_up_no_other"
    ),
    "max_open_rows": "server/test_local_socket.test_rows_beyond_max_open_rows_are_rejected",
    "max_biases": "trtllm/test_relay.test_biases_beyond_max_biases_are_rejected",
    "(--max-open-requests)": "client/test_openai_operators.test_more_requests_than_may_be_open_are_refused_unread",
    "(--max-request-bytes)": "client/test_openai.test_a_body_over_the_limit_is_refused",
    "(--max-prompts)": "client/test_openai.test_more_prompts_than_may_be_are_refused",
    "(--max-inputs)": "client/test_openai_embeddings.test_what_is_refused",
    "(--body-timeout)": "client/test_openai_operators.test_a_body_that_does_not_come_in_time_gives_its_place_back",
    "(--chat-template-timeout)": "client/test_openai.test_a_template_that_does_not_end_is_ended",
}
# Options of such names that refuse no request: they size what runs at once, or judge files of the operator's.
NO_CAPS = {"max_num_seqs", "max_num_batched_tokens", "max_loras", "max_cpu_loras", "max_lora_rank"}
# What is no option: limits of what the operator gives, of a picture, and of a batch (config.pbtxt has it).
CONSTANTS = {
    "MAX_BYTES", "MAX_LAYERS", "MAX_POSITIONS", "MAX_TEMPLATE_CHARS", "MAX_CONFIG_BYTES", "MAX_HEADER_BYTES",
    "MAX_POINTS", "MAX_BATCH_SIZE", "MAX_TOKENS", "MAX_PREFIX_BYTES", "MAX_PATTERN_CHARS", "MAX_ALPHA",
}  # fmt: skip


def test_each_limit_is_tried():
    engines = {spec.name for spec in fields(EngineConfig) if re.match("max_|.*_timeout$", spec.name)} - NO_CAPS
    relays = {spec.name for spec in fields(RelayCaps)}
    flags = {
        f"({name})"
        for action in build_parser()._subparsers._group_actions[0].choices["openai"]._actions
        for name in action.option_strings
        if re.match("--max-|.*-timeout$", name)
    }
    assert (
        set(SAMPLING) | set(CALLS) | set(ELSEWHERE)
        == {spec.name for spec in fields(InputLimits)} | engines | relays | flags
    )


def test_a_priority_may_be_no_lower_than_the_operator_lets_it():
    limits = replace(LIMITS, input_limits=InputLimits(min_priority=0))
    assert SamplingParams.parse({"priority": 0}, limits).priority == 0
    with pytest.raises(RequestError, match=r"priority=-1: must be 0\.\.2147483647 \(min_priority\)"):
        SamplingParams.parse({"priority": -1}, limits)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_said_to_try_a_limit_names_it(name):
    module, _, test = ELSEWHERE[name].partition(".")
    tree = ast.parse((Path(__file__).parents[1] / f"{module}.py").read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == test]
    texts = [node.value for node in ast.walk(found) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert any(name in text.replace("\\", "") for text in texts)


def test_no_limit_is_a_constant():
    root = Path(__file__).parents[2]
    found = {
        target.id
        for folder in ("paged_backend", "client", "paged_bench")
        for file in (root / folder).rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and re.match("_?MAX_", target.id)
    }
    assert found == CONSTANTS


@pytest.mark.parametrize("name", SAMPLING)
def test_one_too_much_is_refused_with_the_name_of_the_limit(name):
    def parse(most):
        return SamplingParams.parse(SAMPLING[name], replace(LIMITS, input_limits=InputLimits(**{name: most})))

    parse(4)
    with pytest.raises(RequestError) as caught:
        parse(3)
    (field,) = SAMPLING[name]
    assert str(caught.value).startswith(f"INVALID_ARGUMENT: {field}=")
    assert name in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_one_too_much_of_a_call_is_refused_with_the_name_of_the_limit(name):
    tensors, parameters = CALLS[name]
    tensors = {key: text(value) for key, value in tensors.items()}
    with pytest.raises(RequestError, match=rf"must be at most 3 \w+ \({name}\)"):
        read_call(tensors, parameters, input_limits=InputLimits(**{name: 3}))
    read_call(tensors, parameters)


def test_the_limits_are_options(tiny):
    options = {"max_stop_strings": 1, "max_request_id_bytes": 4, "max_prompt_chars": 8, "max_logit_biases": 2}
    with serving(tiny[0], **options) as server:
        for inputs, sampling, limit in (
            ({"text_input": "abcd"}, {"stop": ["a", "b"]}, "(max_stop_strings)"),
            ({"text_input": "abcdefghi"}, {}, "must be at most 8 (max_prompt_chars"),
            ({"text_input": "abcd"}, {"word_bias": {"abc": 1}}, "(max_logit_biases)"),
        ):
            refusal = server.call(**inputs, sampling_parameters=json.dumps(sampling)).refusal()
            assert limit in refusal
        assert server.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1, "stop": "a"}')


def test_a_conversation_is_measured_as_its_template_writes_it(tiny):
    """Before it is tokenized, which takes long for a long text."""
    with serving(tiny[0], max_prompt_chars=8) as server:
        tokenizer, messages = (
            server.service._assembly.loaded.tokenizer,
            json.dumps([{"role": "user", "content": "abcd"}]),
        )
        once = {"messages": messages, "sampling_parameters": '{"max_tokens": 1}'}
        tokenizer.chat_template = "{{ messages[0].content * 3 }}"
        assert "messages: 12 characters; must be at most 8 (max_prompt_chars" in server.call(**once).refusal()
        tokenizer.chat_template = "{{ messages[0].content * 2 }}"
        assert server.ask(**once)


def test_what_an_error_shows_of_a_long_name_or_value_is_its_beginning():
    """However long, and whatever it holds."""
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for name, value in (("a" * 10**6, 1), ("a", "b" * 10**6), ("a", nested), ("a", 10**5000)):
        assert len(str(invalid_argument(name, value, "no"))) < 2 * SHOWN_CHARS + 40


@pytest.mark.parametrize("name", ["z" * 10**6, "max_token" * 10**5])
def test_a_name_of_megabytes_is_not_compared_whole(name, monkeypatch):
    """With all the names there are, character by character."""
    compared, compare = [], errors.difflib.get_close_matches
    monkeypatch.setattr(
        errors.difflib, "get_close_matches", lambda word, *others: compared.append(word) or compare(word, *others)
    )
    with pytest.raises(RequestError, match="unknown"):
        read_call({"text_input": text("a")}, {name: 1})
    with pytest.raises(RequestError, match="unknown"):
        SamplingParams.parse({name: 1}, LIMITS)
    assert [len(word) for word in compared] == [SHOWN_CHARS] * 2


def test_parameters_that_are_no_text_are_the_client_s_fault(tiny):
    """As the server hands them on from HTTP: it looks at no byte of a name."""

    def parameters():
        return b'{"\xff": 1}'.decode()

    with serving(tiny[0]) as server:
        caller = Caller(text_input="abcd")
        caller.parameters = parameters
        server.service.submit(caller)
        assert "INVALID_ARGUMENT: the request's parameters or id: byte 2 is not valid UTF-8" in caller.refusal()
