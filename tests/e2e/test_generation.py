"""Generation through a real Triton server: correct tokens, whole characters, one final response, metrics."""

import json
import random
import re
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.triton import idle, metrics, post, raw_stream, raw_streams
from tests.support.waiting import until

TRT_KINDS = ("max", "used", "free", "tokens_per", "reused", "fraction")
GREEDY = {"temperature": 0}
COUNTED = {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True}


@pytest.fixture(scope="module")
def tokenizer(short_model):
    return AutoTokenizer.from_pretrained(short_model)


@pytest.fixture(scope="module")
def alone(short_model, tokenizer):
    """Return a function from prompt ids to the ids that transformers generates greedily in fp32."""
    model = AutoModelForCausalLM.from_pretrained(short_model, dtype=torch.float32).eval()

    def generate(ids, max_tokens):
        out = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)
        return out[0, len(ids) :].tolist()

    return generate


def test_32_concurrent_streams_match_32_sequential_calls(server, tokenizer, alone):
    """Prompts and outputs differ in length; afterwards every block is free."""
    words = "the river carried old songs past seven quiet towns where nobody counted rain or years".split()
    rnd = random.Random(4)
    prompts = [" ".join(rnd.choices(words, k=rnd.randint(1, 16))) for _ in range(32)]
    lengths = [rnd.randint(2, 5) for _ in prompts]
    with raw_streams(server, len(prompts)) as streams:
        for stream, prompt, length in zip(streams, prompts, lengths, strict=True):
            sampling = GREEDY | {"max_tokens": length}
            stream.send(text_input=prompt, stream=True, sampling_parameters=sampling, **COUNTED)
        answers = [stream.all() for stream in streams]
    for prompt, length, answer in zip(prompts, lengths, answers, strict=True):
        ids = tokenizer.encode(prompt)
        expected = alone(ids, length)
        assert "".join(part.text for part in answer) == tokenizer.decode(expected, skip_special_tokens=True)
        assert sum(part.outputs["num_output_tokens"][0] for part in answer) == len(expected)
        assert answer[-1].outputs["num_input_tokens"] == [len(ids)]
    idle(server)


def test_the_final_flag_is_sent_once_with_the_last_data(server):
    with raw_stream(server) as stream:
        stream.send(text_input="One, two,", stream=True, sampling_parameters=GREEDY | {"max_tokens": 5}, **COUNTED)
        stream.send(text_input="One, two,", stream=False, sampling_parameters=GREEDY | {"max_tokens": 5}, **COUNTED)
        answers = [stream.next()]
        while sum(answer.final for answer in answers) < 2:
            answers.append(stream.next())
        stream.client.stop_stream()  # returns once the server has closed the stream, so no response follows
        assert stream.responses.empty()
    finals = [answer for answer in answers if answer.final]
    assert [answer.outputs["finish_reason"] for answer in finals] == [[b"length"], [b"length"]]
    others = [answer for answer in answers if not answer.final]
    assert all(answer.outputs["finish_reason"] == [b"None"] for answer in others)
    assert "One, two," + "".join(answer.text for answer in answers if answer is not finals[1]) == finals[1].text


def test_http_generate_echoes_the_prompt_unless_excluded(server, tokenizer, alone):
    said = tokenizer.decode(alone(tokenizer.encode("The capital of France is"), 3))
    body = {"text_input": "The capital of France is", "parameters": GREEDY | {"max_tokens": 3}}
    status, text = post(server, body)
    assert status == 200
    assert json.loads(text)["text_output"] == "The capital of France is" + said
    status, text = post(server, body | {"exclude_input_in_output": True})
    assert json.loads(text)["text_output"] == said


def test_http_generate_stream_sends_text_deltas(server, tokenizer, alone):
    said = tokenizer.decode(alone(tokenizer.encode("The capital of France is"), 6))
    body = {"text_input": "The capital of France is", "stream": True, "temperature": 0, "max_tokens": 6}
    status, text = post(server, body, "generate_stream")
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == said


def test_messages_use_the_chat_template(server, tokenizer, alone):
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    template = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(template, add_special_tokens=False)
    expected = alone(ids, 24)
    with raw_stream(server) as stream:
        stream.send(messages=messages, stream=True, sampling_parameters=GREEDY | {"max_tokens": 24}, **COUNTED)
        answer = stream.all()
    assert "".join(part.text for part in answer) == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer[-1].outputs["finish_reason"] == [b"stop" if len(expected) < 24 else b"length"]
    assert answer[-1].outputs["num_input_tokens"] == [len(ids)]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_token_boundaries(server, include):
    prompt = "The capital of France is"
    whole = json.loads(post(server, {"text_input": prompt, "temperature": 0, "max_tokens": 16})[1])["text_output"]
    whole = whole.removeprefix(prompt)
    stop = whole[2:9]  # begins and ends inside tokens
    sampling = GREEDY | {"max_tokens": 16, "stop": [stop], "include_stop_str_in_output": include}
    with raw_stream(server) as stream:
        stream.send(text_input=prompt, stream=True, sampling_parameters=sampling, **COUNTED)
        answer = stream.all()
    end = whole.index(stop) + (len(stop) if include else 0)
    assert "".join(part.text for part in answer) == whole[:end]
    assert answer[-1].outputs["finish_reason"] == [b"stop"]
    idle(server)


def test_streamed_text_is_never_cut_inside_a_character(server):
    """A high temperature and penalties produce rare characters whose bytes are separate tokens."""
    sampling = {"temperature": 1.5, "seed": 3, "max_tokens": 48, "ignore_eos": True, "repetition_penalty": 1.2}
    prompt = "翻译成日语和阿拉伯语，并加上表情符号：你好，世界 🌍🚀🧬"
    with raw_stream(server) as stream:
        stream.send(text_input=prompt, stream=True, sampling_parameters=sampling)
        streamed = "".join(part.text for part in stream.all())
    body = {"text_input": prompt, "exclude_input_in_output": True, "sampling_parameters": json.dumps(sampling)}
    assert json.loads(post(server, body)[1])["text_output"] == streamed
    assert any(ord(char) > 127 for char in streamed)


def test_a_seed_reproduces_output_in_any_batch(server):
    request = {"text_input": "Once upon a time", "temperature": 1.0, "top_p": 0.95, "max_tokens": 12}
    first = post(server, request | {"seed": 7})[1]
    with raw_streams(server, 6) as streams:
        for stream in streams:
            stream.send(text_input="Meanwhile, in the hills", stream=True, sampling_parameters={"max_tokens": 24})
        assert post(server, request | {"seed": 7})[1] == first
        for stream in streams:
            stream.all()
    assert post(server, request | {"seed": 8})[1] != first


def test_metrics_count_requests_and_tokens(server):
    idle(server)
    before = metrics(server)
    post(server, {"text_input": "One two three", "temperature": 0, "max_tokens": 5, "ignore_eos": True})
    idle(server)
    after = metrics(server)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["paged_requests_finished_total{length}"] == 1
    assert grown["paged_generation_tokens_total"] == 5
    assert grown["paged_prompt_tokens_total"] == 3
    for name in ("time_to_first_token", "time_per_output_token", "request_latency"):
        assert grown[f"paged_{name}_seconds_count"] == 1
        assert grown[f"paged_{name}_seconds_sum"] > 0
    assert after["paged_kv_blocks{total}"] == 640


@pytest.mark.parametrize("streaming", [True, False])
def test_parallel_samples_match_their_seeds(server, streaming):
    sampling = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "seed": 40}
    with raw_stream(server) as stream:
        alone = []
        for seed in (40, 41, 42):
            ask = {"exclude_input_in_output": True, "sampling_parameters": sampling | {"seed": seed}}
            stream.send(text_input="Once upon a time", **ask)
            alone.append("".join(part.text for part in stream.all()))
        ask = {"exclude_input_in_output": True, "sampling_parameters": sampling | {"n": 3}}
        stream.send(text_input="Once upon a time", stream=streaming, **ask, **COUNTED)
        parts = stream.all()
    texts = [part.outputs["text_output"] for part in parts]
    assert all(len(elements) == 3 for elements in texts)
    assert [b"".join(pieces).decode() for pieces in zip(*texts, strict=True)] == alone
    assert parts[-1].outputs["finish_reason"] == [b"length"] * 3
    assert [sum(counts) for counts in zip(*(part.outputs["num_output_tokens"] for part in parts), strict=True)] == [
        12
    ] * 3
    idle(server)


def test_a_stopped_sample_does_not_stop_the_others(server):
    """Greedy samples are identical; of sampled ones, one is stopped by a word that only it generates."""
    sampling = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": 7, "n": 3}
    with raw_stream(server) as stream:
        stream.send(text_input="Once upon a time", exclude_input_in_output=True, sampling_parameters=sampling)
        whole = [text.decode() for text in stream.all()[-1].outputs["text_output"]]
        word = next(word for word in whole[1].split() if not any(word in other for other in (whole[0], whole[2])))
        stream.send(
            text_input="Once upon a time",
            exclude_input_in_output=True,
            sampling_parameters=sampling | {"stop": word},
            **COUNTED,
        )
        outputs = stream.all()[-1].outputs
    assert outputs["finish_reason"] == [b"length", b"stop", b"length"]
    stopped = whole[1][: whole[1].index(word)]
    assert [text.decode() for text in outputs["text_output"]] == [whole[0], stopped, whole[2]]
    idle(server)


def test_a_repeated_prompt_hits_the_prefix_cache_and_generates_the_same(server, tokenizer, alone):
    """A prompt of over 100 tokens misses, then hits the cache, and misses again with another salt."""
    prompt = "The old lighthouse keeper climbed the stairs and counted them. " * 8
    hits = []
    with raw_stream(server) as stream:
        for salt in ("one", "one", "another", "another"):
            before = metrics(server)["paged_prefix_cache_hit_tokens_total"]
            stream.send(
                text_input=prompt, stream=True, sampling_parameters=GREEDY | {"max_tokens": 8, "cache_salt": salt}
            )
            text = "".join(part.text for part in stream.all())
            assert text == tokenizer.decode(alone(tokenizer.encode(prompt), 8), skip_special_tokens=True)
            idle(server)
            hits.append(metrics(server)["paged_prefix_cache_hit_tokens_total"] - before)
    most = len(tokenizer.encode(prompt)) - 1
    assert hits == [0, most, 0, most]


def test_metrics_count_the_end_token_and_rejections(server):
    body = {"text_input": "One two three", "temperature": 0, "max_tokens": 20, "return_num_output_tokens": True}
    first = json.loads(post(server, body | {"max_tokens": 1, "exclude_input_in_output": True})[1])["text_output"]
    idle(server)
    before = metrics(server)
    answer = json.loads(post(server, body | {"stop": first.strip()})[1])
    assert post(server, body | {"max_tokens": 0})[0] == 400
    refused = "paged_requests_finished_total{refused}"
    until(lambda: metrics(server)[refused] > before[refused], "the count of what was refused")
    grown = {name: value - before[name] for name, value in metrics(server).items()}
    assert grown["paged_generation_tokens_total"] == answer["num_output_tokens"] == 1
    assert grown["paged_requests_finished_total{refused}"] == 1
    assert grown["paged_requests_finished_total{stop}"] == 1


def test_a_running_request_is_in_the_metrics_of_vllm_and_tensorrt_llm(server):
    """Under their names, with the values of this project's own; afterwards all are 0 again."""

    def read():
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        found = re.findall(r"^((?:vllm:|nv_trt_llm_)\w+)\{(.*?)\} (\S+)$", text, re.M)
        values = {}
        for name, labels, value in found:
            kinds = re.findall(r'(?:kv_cache_block_type|request_type)="(\w+)"', labels)
            values[(name, *kinds)] = float(value)
        blocks = {kind: values["nv_trt_llm_kv_cache_block_metrics", kind] for kind in TRT_KINDS}
        requests = {kind: values["nv_trt_llm_request_metrics", kind] for kind in ("active", "waiting")}
        return blocks, requests, {name: value for (name, *_), value in values.items() if name.startswith("vllm:")}

    idle(server)
    before = read()
    with raw_stream(server) as stream:
        sampling = GREEDY | {"max_tokens": 4000, "ignore_eos": True}
        stream.send(text_input="One two three", stream=True, sampling_parameters=sampling)
        until(lambda: read()[0]["used"] > 0, "the blocks of the request")
        blocks, requests, vllm = read()
        stream.cancel()
    assert (blocks["max"], blocks["tokens_per"], blocks["used"] + blocks["free"]) == (640, 16, 640)
    assert blocks["fraction"] == vllm["vllm:kv_cache_usage_perc"] == pytest.approx(blocks["used"] / 640)
    assert requests == {"active": 1, "waiting": 0}
    assert (vllm["vllm:num_requests_running"], vllm["vllm:num_requests_waiting"]) == (1, 0)
    idle(server)
    blocks, requests, vllm = read()
    assert (blocks["used"], blocks["free"], blocks["fraction"], requests["active"]) == (0, 640, 0, 0)
    assert vllm["vllm:num_requests_running"] == vllm["vllm:kv_cache_usage_perc"] == 0
    assert vllm["vllm:prompt_tokens_total"] == before[2]["vllm:prompt_tokens_total"] + 3
