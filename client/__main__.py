"""`python -m client`, the former name of `python -m paged_client`."""

from paged_client.cli import run

run()
