"""`python -m reknit` is the `reknit` command."""

import sys

from reknit.app.cli.main import main

sys.exit(main())
