"""`python -m paged_client`: the `paged` command line."""

from paged_client.cli import run

run()
