"""`python -m cloister` is the command `cloister`."""

import sys

from cloister.cli import main

sys.exit(main())
