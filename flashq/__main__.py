"""`python -m flashq`."""

import sys

from flashq.cli.main import main

sys.exit(main())
