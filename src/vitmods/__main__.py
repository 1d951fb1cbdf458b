"""`python -m vitmods` is the command `vitmods`."""

import sys

from vitmods.cli import main

sys.exit(main())
