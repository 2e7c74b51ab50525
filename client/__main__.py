"""`python -m client`: the `paged` command line."""

from client.cli import run

run()
