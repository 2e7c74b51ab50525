"""The `paged` command line without a command."""

import pytest

from client.cli import main


@pytest.mark.parametrize("arguments", [[], ["nope"], ["generate", "--top-k", "x"]])
def test_argparse_errors(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: paged" in capsys.readouterr().err
