"""`python -m reknit` is the `reknit` command."""

import sys

from .app.cli import main

sys.exit(main())
