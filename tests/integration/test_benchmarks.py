"""Invalid arguments and errors of all benchmarks."""

import pytest

from paged_client.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--rounds", "0"], "'0': must be a whole number of at least 1"),
        (["engine", "--rate", "0"], "'0': must be a number above 0"),
        (["server", "--null", "--tokens", "-3"], "'-3': must be a whole number of at least 1"),
        (["kernels", "--json", "{missing}/x.json"], "there is no directory '{missing}'"),
        (["memory", "--requests", "99"], "'99': must be at least 100, so that some wait for blocks"),
        (["kernels", "--only", "nothing"], "argument --only: 'nothing': matches none of"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_run(capsys, tmp_path, arguments, message):
    missing = tmp_path / "missing"
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *(one.format(missing=missing) for one in arguments)])
    assert message.format(missing=missing) in capsys.readouterr().err


def test_unknown_option_is_reported(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "engine", "--fast"])
    assert "--fast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--model", "{missing}"], "paged bench: model='{missing}': must be 'demo'"),
        (["speculation", "--draft", "{missing}"], 'paged bench: speculative_model="{missing}": '),
    ],
)
def test_engine_errors_are_reported_in_one_line(tiny, tmp_path, arguments, message, capsys):
    missing = tmp_path / "missing"
    name, *rest = (one.format(missing=missing) for one in arguments)
    assert main(["bench", name, "--quick", "--model", str(tiny[0]), *rest]) == 2
    assert message.format(missing=missing) in capsys.readouterr().err
