"""The digest of a request covers the logits of its returned tokens once, in order, however they were computed."""

import json
import random

import pytest
import torch

from paged_backend.sampling import fingerprints
from paged_backend.server.connections.replicas import ReplicaChoice
from tests.support.adapters import LORA, make_adapter, write_adapter_list
from tests.support.callers import serving
from tests.support.digests import digest_of_tokens, fingerprints_of_tokens
from tests.support.in_process import byte_tokenizer
from tests.support.service_calls import SingleCaller

PROMPT = random.Random(8).choices(range(3, 320), k=37)
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logits_digest": True}
RETURNED = {"return_receipt": True, "return_token_ids": True, "return_num_output_tokens": True}


def ask(service, prompt=PROMPT, **sampling):
    return service.call(
        input_ids=prompt,
        sampling_parameters=json.dumps(GREEDY | sampling),
        **RETURNED,
    )


def result(caller):
    """Return the tokens of each output and their digests."""
    outputs = caller.all()[-1]
    tokens, counts = iter(outputs["token_ids"]), outputs["num_output_tokens"]
    receipt = json.loads(outputs["receipt"][0])
    return [[next(tokens) for _ in range(count)] for count in counts], receipt["logits_digests"]


def digest(service, prompt=PROMPT, **sampling):
    ((_, (found,)),) = [result(ask(service, prompt, **sampling))]
    return found


@pytest.fixture(scope="module")
def service(tiny):
    with serving(tiny[0], num_gpu_blocks_override=128) as service:
        yield service


class TestOfTheBits:
    """Each request runs alone and without cache hits, so that its logits are the same every time."""

    def test_same_request_has_the_same_digest(self, service):
        first = digest(service, cache_salt="1")
        assert len(first) == 64 and first == digest(service, cache_salt="2")

    def test_other_prompts_and_lengths_have_others(self, service):
        found = {digest(service, prompt, cache_salt=str(index)) for index, prompt in enumerate((PROMPT, PROMPT[1:]))}
        found |= {digest(service, max_tokens=11, cache_salt="3"), digest(service, prompt_logprobs=0, cache_salt="4")}
        assert len(found) == 4

    def test_parameters_after_the_logits_do_not_change_it(self, service):
        """Penalties change neither the logits that are covered nor, here, the first token."""
        plain = digest(service, max_tokens=1, cache_salt="5")
        assert plain == digest(service, max_tokens=1, presence_penalty=1.5, cache_salt="6")
        assert plain == digest(service, max_tokens=1, temperature=1.0, logprobs=4, cache_salt="7")

    def test_adapter_changes_it(self, tiny, tmp_path):
        adapters = write_adapter_list(tmp_path, {"one": make_adapter(tiny[1], tmp_path / "one")})
        with serving(tiny[0], **LORA, adapters=adapters) as service:
            assert digest(service, max_tokens=1) != digest(service, max_tokens=1, lora_name="one")

    @pytest.mark.parametrize("token", [0, 2, 4, 5, 6])
    def test_one_changed_bit_changes_it(self, service, monkeypatch, token):
        """Of the logits of one prompt position, or of one output token."""
        scored = {"prompt_logprobs": 0, "cache_salt": f"bit {token}"}
        compute, seen = fingerprints.fingerprints, []

        def changed(logits):
            position = 8 * token - sum(seen)
            seen.append(len(logits))
            if 0 <= position < len(logits):
                logits = logits.clone()
                logits[position, 17].view(torch.int32).bitwise_xor_(1)
            return compute(logits)

        original = digest(service, **scored)
        monkeypatch.setattr(fingerprints, "fingerprints", changed)
        other = digest(service, **scored | {"cache_salt": f"{token} bit"})
        assert sum(seen) == len(PROMPT) - 1 + GREEDY["max_tokens"]
        assert (other == original) == (8 * token >= sum(seen))


CASES = {
    "greedy": {},
    "scored": {"prompt_logprobs": 2},
    "only scored": {"prompt_logprobs": 0, "max_tokens": 0},
    "samples": {"n": 3, "temperature": 1.0, "seed": 3},
    "scored samples": {"n": 3, "temperature": 1.0, "seed": 3, "prompt_logprobs": 0, "logprobs": 1},
    "best of": {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 3},
    "beams": {"beam_width": 3, "n": 2, "prompt_logprobs": 0},
    "stop token": {"temperature": 1.0, "seed": 5, "stop_token_ids": list(range(0, 320, 6))},
    "stop words": {"temperature": 1.0, "seed": 5, "stop_words_token_ids": [[one] for one in range(1, 320, 6)]},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
}
MODES = {
    "default": {},
    "one token a step": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "async": {"async_scheduling": True},
    "prompt lookup": {"num_speculative_tokens": 3, "prompt_lookup_max": 2},
}


class TestOfTheTokens:
    """The fingerprint of a row is its most likely token."""

    @pytest.fixture(autouse=True)
    def by_token(self, monkeypatch):
        monkeypatch.setattr(fingerprints, "fingerprints", fingerprints_of_tokens)

    def check(self, tiny, caller, prompt=PROMPT, **sampling):
        tokens, digests = result(caller)
        scored = "prompt_logprobs" in sampling
        assert digests == [digest_of_tokens(tiny[1], prompt, one, scored=scored) for one in tokens]
        return tokens

    @pytest.mark.parametrize("mode", MODES)
    def test_outputs_are_covered_once(self, tiny, mode):
        """Each request alone, then again with cache hits in a batch with the others."""
        cases = list(CASES.values())
        if MODES[mode].get("max_num_seqs") == 1:
            cases = [case for case in cases if "n" not in case]
        with serving(tiny[0], num_gpu_blocks_override=256, **MODES[mode]) as service:
            for case in cases:
                self.check(tiny, ask(service, **case), **case)
            for caller, case in [(ask(service, **case), case) for case in cases]:
                self.check(tiny, caller, **case)

    def test_draft_model(self, tiny, draft):
        with serving(tiny[0], num_speculative_tokens=3, speculative_model=str(draft)) as service:
            for case in CASES.values():
                self.check(tiny, ask(service, **case), **case)

    @pytest.mark.parametrize("mode", ["swap", "recompute"])
    def test_preemption_covers_no_token_twice(self, tiny, mode):
        rng = random.Random(1)
        prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in (17, 31, 48, 64, 90)]
        small = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 24, "swap_space": 0.01}
        with serving(tiny[0], **small, preemption_mode=mode) as service:
            asked = [(prompt, case) for prompt in prompts for case in (CASES["greedy"], CASES["scored"])]
            callers = [ask(service, prompt, **case) for prompt, case in asked]
            for caller, (prompt, case) in zip(callers, asked, strict=True):
                self.check(tiny, caller, prompt, **case)
            assert service.service._assembly.scheduler.stats.preemptions > 0

    def test_stop_string_ends_what_is_covered(self, service, tiny):
        """The token that completes the stop string is covered; those that the step computed after it are not."""
        text = byte_tokenizer().decode(result(ask(service, max_tokens=24))[0][0])
        tokens = self.check(tiny, ask(service, max_tokens=24, stop=[text[3:5]]), stop=[text[3:5]])
        assert 0 < len(tokens[0]) < 24

    def test_session(self, tiny):
        """The second turn covers its own tokens, after a prompt that is mostly in the cache."""
        with serving(tiny[0]) as service:
            prompt = []
            for turn, text in enumerate(("abcd", "efg")):
                own = {"correlation_id": 5, "flags": 1 - turn}
                caller = SingleCaller(
                    service.service, own, text_input=text, sampling_parameters=json.dumps(GREEDY), **RETURNED
                )
                prompt += byte_tokenizer().encode(text)
                prompt += self.check(tiny, caller, prompt)[0]


@pytest.mark.nightly
def test_replica_returns_the_digest(tiny, service, monkeypatch):
    monkeypatch.setattr(ReplicaChoice, "choose", lambda *args: 1)
    case = {"n": 2, "temperature": 1.0, "seed": 2, "prompt_logprobs": 0, "cache_salt": "8"}
    with serving(tiny[0], num_gpu_blocks_override=128, data_parallel_size=2) as replicas:
        assert result(ask(replicas, **case)) == result(ask(service, **case))
        assert replicas.service._assembly.scheduler.stats.steps == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_digest_does_not_depend_on_the_batch(tiny, dtype):
    """Alone and without a cache, then twice in a batch, of which the second time finds the prompts in the cache."""
    prompts = [PROMPT[:length] for length in (1, 20, 37)]
    cases = [(prompt, case) for prompt in prompts for case in CASES.values()]
    options = {"batch_invariant": True, "dtype": dtype, "num_gpu_blocks_override": 256}
    with serving(tiny[0], **options, enable_prefix_caching=False) as service:
        alone = [result(ask(service, prompt, **case)) for prompt, case in cases]
    with serving(tiny[0], **options) as service:
        for _ in range(2):
            callers = [ask(service, prompt, **case) for prompt, case in cases]
            assert [result(caller) for caller in callers] == alone
        assert service.service._assembly.scheduler.stats.cached_tokens > 0


def test_no_row_is_read_without_a_digest(service, monkeypatch):
    computed = []
    monkeypatch.setattr("paged_backend.sampling.fingerprints.fingerprints", lambda *args: computed.append(args))
    outputs = service.ask(input_ids=PROMPT, sampling_parameters='{"prompt_logprobs": 1}', return_receipt=True)
    assert not computed and "logits_digests" not in json.loads(outputs["receipt"][0])


@pytest.mark.parametrize(
    ("sampling", "receipt", "error"),
    [
        ({"max_tokens": 0, "echo": True}, True, "logits_digest=true: must be false with max_tokens=0"),
        ({}, False, "logits_digest=true: needs return_receipt"),
    ],
)
def test_request_without_a_digest_is_rejected(service, sampling, receipt, error):
    caller = service.call(
        input_ids=PROMPT,
        sampling_parameters=json.dumps({"logits_digest": True} | sampling),
        return_receipt=receipt,
    )
    assert error in caller.rejection()
