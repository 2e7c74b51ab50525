"""`python -m client`: the `paged` command line."""

import sys

from client.cli import main

sys.exit(main())
