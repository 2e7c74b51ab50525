"""Engine options as flags of `paged serve`."""

import pytest

from paged_client.commands.engine_flags import split_engine_flags
from paged_client.session import UsageError

OWN = {"-o", "--option", "--http-port", "--name"}


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--max-model-len", "512"], {"max_model_len": 512}),
        (["--max-model-len=512"], {"max_model_len": 512}),
        (["--max_model_len", "512"], {"max_model_len": 512}),
        (["--dtype", "float32"], {"dtype": "float32"}),
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--enforce-eager", "false"], {"enforce_eager": False}),
        (["--enforce-eager=false"], {"enforce_eager": False}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--async-scheduling"], {"async_scheduling": True}),
        (["--disable-log-requests"], {"disable_log_requests": True}),  # of vLLM
        (["--cpu-offload-gb", "0"], {"cpu_offload_gb": 0}),
        (["--max-tools", "3", "--limits", '{"max_words": 4}'], {"max_tools": 3, "limits": {"max_words": 4}}),
    ],
)
@pytest.mark.parametrize("others", [[], ["-o", "seed=1", "--http-port", "1", "--name=x"]])
def test_flags_are_engine_options(flags, options, others):
    for argv in (["demo", *others, *flags], [*flags, *others, "demo"]):
        rest, found = split_engine_flags(argv, OWN)
        assert found == options
        assert rest in (["demo", *others], [*others, "demo"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-model-le", "5"], "--max-model-le: unknown option; did you mean --max-model-len?"),
        (["--http-prt", "5"], "did you mean --http-port?"),
        (["--log-verbose=1"], r"To pass it to tritonserver: paged serve MODEL -- --log-verbose=…"),
        (["--max-model-len"], "--max-model-len: needs a value"),
        (["--max-model-len", "--enforce-eager"], "--max-model-len: needs a value"),
        (["--seed", "1", "--seed", "1"], "--seed: given twice"),
        (["--no-max-model-len"], "--no-max-model-len: unknown option"),
    ],
)
def test_invalid_flags_are_rejected(flags, message):
    with pytest.raises(UsageError, match=message):
        split_engine_flags(["demo", *flags], OWN)
