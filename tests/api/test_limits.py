"""Every client input is bounded by an option, which the error names, and every such option is tested."""

import ast
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import RequestError
from paged_backend.api.limits import EngineLimits, InputLimits
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.trtllm.limits import RelayLimits
from paged_client.cli import build_parser
from tests.support.callers import Caller, serving
from tests.support.wire_requests import read, text

LIMITS = EngineLimits(64, 320, 256, 4, 8)
# Sampling parameters that exceed a limit of 3.
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
# Tensors and request parameters that exceed a limit of 3.
CALLS = {
    "max_request_id_bytes": ({"text_input": "a"}, {"id": "abcd"}),
    "max_sequence_id_bytes": ({"text_input": "a"}, {"sequence_id": "abcd"}),
    "max_json_chars": ({"messages": json.dumps([TURN])}, {}),
    "max_sampling_chars": ({"text_input": "a", "sampling_parameters": "    {}"}, {}),
    "max_messages": ({"messages": json.dumps([TURN] * 4)}, {}),
    "max_tools": ({"messages": json.dumps([TURN]), "tools": json.dumps([FUNCTION] * 4)}, {}),
    "max_tools_chars": ({"messages": json.dumps([TURN]), "tools": json.dumps([FUNCTION])}, {}),
    "max_tool_calls": ({"messages": json.dumps([TURN | {"tool_calls": [FUNCTION] * 4}])}, {}),
}


# The tests of other limits, whose errors name the limit.
TESTED_ELSEWHERE = {
    "max_queued_structures": "guided/test_compiler.test_full_compile_queue_rejects_requests",
    "max_remembered_structures": "guided/test_compiler.test_cache_is_lru_and_bounded",
    "max_remembered_structure_bytes": ("guided/test_compiler.test_cache_is_lru_and_bounded"),
    "max_frame_bytes": "utils/test_local_socket.test_an_oversized_frame_is_neither_sent_nor_read",
    "max_local_connections": "trtllm/test_links.test_a_refused_connection_reports_the_reason",
    "max_model_len": "server/wire/test_embedding.test_an_embedding_prompt_may_fill_the_context",
    "min_priority": "api/test_limits.test_min_priority_bounds_the_priority",
    "max_prompt_chars": "api/test_limits.test_limits_are_engine_options",
    "max_queue_size": "server/test_admission.test_a_full_queue_rejects_requests_until_a_place_is_free",
    "max_tenant_requests": "server/test_admission.test_the_open_request_limit_applies_per_tenant",
    "max_response_mib": "server/streams/test_responder.test_a_response_larger_than_max_response_mib_fails",
    "request_timeout": "integration/test_fault_injection.test_stuck_step_delays_neither_requests_nor_shutdown",
    "stop_timeout": "integration/test_fault_injection.test_stuck_step_delays_neither_requests_nor_shutdown",
    "stall_timeout": "server/test_service.test_a_stalled_step_makes_the_service_not_ready",
    "max_sessions": "server/prompts/test_sessions.test_sessions_beyond_max_sessions_are_rejected",
    "max_tenant_sessions": "server/prompts/test_sessions.test_max_tenant_sessions_applies_per_tenant",
    "max_sessions_mib": "server/prompts/test_sessions.test_max_sessions_mib_limits_all_sessions",
    "chat_template_timeout": "text/test_chat_templates.test_a_template_that_does_not_terminate_is_stopped",
    "tokenize_timeout": "server/prompts/test_encoder_process.test_a_prompt_that_takes_too_long_is_rejected",
    "structured_outputs_timeout": ("guided/test_sandbox.test_compile_timeout_does_not_block_other_grammars"),
    "max_open_rows": "trtllm/test_relay.test_rows_beyond_max_open_rows_are_rejected",
    "max_biases": "trtllm/test_requests.test_biases_beyond_max_biases_are_rejected",
    "(--max-open-requests)": "client/openai/test_server.test_max_open_requests",
    "(--max-open-bytes)": "client/openai/test_server.test_max_open_bytes",
    "(--max-request-bytes)": "client/openai/test_app.test_oversized_body_is_rejected",
    "(--max-prompts)": "client/openai/test_engine_calls.test_too_many_prompts_are_rejected",
    "(--max-inputs)": "client/openai/test_embeddings.test_invalid_requests_are_rejected",
    "(--body-timeout)": "client/openai/test_server.test_body_timeout_frees_the_slot",
    "(--chat-template-timeout)": "client/openai/test_chat_template.test_template_timeout",
}
# Options with such names that bound no client input.
NO_LIMITS = {
    "max_num_seqs", "max_num_batched_tokens", "max_loras", "max_cpu_loras", "max_lora_rank",
}  # fmt: skip
# Constants that bound no client input: files, batches of rows, pictures, error messages, simulated servers.
CONSTANTS = {
    "MAX_ALPHA", "MAX_ATTEMPTS", "MAX_BATCH_SIZE", "MAX_BYTES", "MAX_CHANGE", "MAX_CONCURRENT_INPUTS", "MAX_DIFFERENCE",
    "MAX_CONFIG_BYTES", "MAX_CONTAINERS", "MAX_EXPANDED_CONTEXT", "MAX_HEADER_BYTES",
    "MAX_HEAD_START", "MAX_LAYERS", "MAX_LENGTH",
    "MAX_PATTERN_CHARS", "MAX_POINTS", "MAX_POSITIONS", "MAX_PREFIX_BYTES", "MAX_PROMPT_ROWS", "MAX_QUEUED_BLOCKS",
    "MAX_KNOWN_BLOCKS", "MAX_KNOWN_KEYS", "MAX_LATENCY", "MAX_POLL_SECONDS", "MAX_PREFILL_STEPS", "MAX_RETRY_SECONDS",
    "MAX_CONTEXT", "MAX_LOAD", "MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS", "MAX_PROMPTS", "MAX_TURNS",
    "MAX_REASON_CHARS", "MAX_ROWS", "MAX_SAMPLED_ROWS", "MAX_SCORED", "MAX_SHARING_ROWS",
    "MAX_SHOWN_NAMES", "MAX_STRING", "MAX_TEMPLATE_CHARS", "MAX_TOKENS", "MAX_UNSENT_BYTES", "MAX_UNSTORED_BYTES",
    "MAX_DIMENSIONS", "MAX_MESSAGE_BYTES", "MAX_REPLAYS", "MAX_STRANGERS", "_MAX_SHOWN", "_MAX_WARNINGS",
}  # fmt: skip


def test_every_limit_is_tested():
    engines = {spec.name for spec in fields(EngineConfig) if re.match("max_|.*_timeout$", spec.name)} - NO_LIMITS
    relays = {spec.name for spec in fields(RelayLimits)}
    flags = {
        f"({name})"
        for action in build_parser()[1]["openai"]._actions
        for name in action.option_strings
        if re.match("--max-|.*-timeout$", name)
    }
    assert (
        set(SAMPLING) | set(CALLS) | set(TESTED_ELSEWHERE)
        == {spec.name for spec in fields(InputLimits)} | engines | relays | flags
    )


def test_min_priority_bounds_the_priority():
    limits = replace(LIMITS, input_limits=InputLimits(min_priority=0))
    assert SamplingParams.parse({"priority": 0}, limits).priority == 0
    with pytest.raises(RequestError, match=r"priority=-1: must be 0\.\.2147483647 \(min_priority\)"):
        SamplingParams.parse({"priority": -1}, limits)


@pytest.mark.parametrize("name", TESTED_ELSEWHERE)
def test_the_test_of_a_limit_names_it(name):
    module, _, test = TESTED_ELSEWHERE[name].partition(".")
    tree = ast.parse((Path(__file__).parents[1] / f"{module}.py").read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == test]
    texts = [node.value for node in ast.walk(found) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert any(name in text.replace("\\", "") for text in texts)


def test_no_limit_of_a_client_input_is_a_constant():
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
def test_a_sampling_parameter_above_its_limit_is_rejected_by_name(name):
    def parse(most):
        return SamplingParams.parse(SAMPLING[name], replace(LIMITS, input_limits=InputLimits(**{name: most})))

    parse(4)
    with pytest.raises(RequestError) as caught:
        parse(3)
    (field,) = SAMPLING[name]
    assert str(caught.value).startswith(f"INVALID_ARGUMENT: {field}=")
    assert name in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_an_input_above_its_limit_is_rejected_by_name(name):
    tensors, parameters = CALLS[name]
    tensors = {key: text(value) for key, value in tensors.items()}
    with pytest.raises(RequestError, match=rf"must be at most 3 \w+ \({name}\)"):
        read(parameters, input_limits=InputLimits(**{name: 3}), **tensors)
    read(parameters, **tensors)


def test_limits_are_engine_options(tiny):
    limits = {"max_stop_strings": 1, "max_request_id_bytes": 4, "max_prompt_chars": 8, "max_logit_biases": 2}
    with serving(tiny[0], limits=limits) as server:
        for inputs, sampling, limit in (
            ({"text_input": "abcd"}, {"stop": ["a", "b"]}, "(max_stop_strings)"),
            ({"text_input": "abcdefghi"}, {}, "must be at most 8 (max_prompt_chars"),
            ({"text_input": "abcd"}, {"word_bias": {"abc": 1}}, "(max_logit_biases)"),
        ):
            rejection = server.call(**inputs, sampling_parameters=json.dumps(sampling)).rejection()
            assert limit in rejection
        assert server.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1, "stop": "a"}')


def test_max_prompt_chars_applies_to_the_rendered_conversation(tiny):
    """Checked before tokenization, which is slow for a long text."""
    with serving(tiny[0], max_prompt_chars=8) as server:
        tokenizer, messages = (
            server.service._assembly.loaded.tokenizer,
            json.dumps([{"role": "user", "content": "abcd"}]),
        )
        once = {"messages": messages, "sampling_parameters": '{"max_tokens": 1}'}
        tokenizer.chat_template = "{{ messages[0].content * 3 }}"
        assert "messages: 12 characters; must be at most 8 (max_prompt_chars" in server.call(**once).rejection()
        tokenizer.chat_template = "{{ messages[0].content * 2 }}"
        assert server.ask(**once)


def test_parameters_that_are_not_utf8_are_rejected(tiny):
    """The server passes names from HTTP on without checking them."""

    def parameters():
        return b'{"\xff": 1}'.decode()

    with serving(tiny[0]) as server:
        caller = Caller(text_input="abcd")
        caller.parameters = parameters
        server.service.submit(caller)
        assert "INVALID_ARGUMENT: the request's parameters or id: byte 2 is not valid UTF-8" in caller.rejection()
