"""What holds for both folders of tests. pytest reads this file first."""

from __future__ import annotations

import os
import sys

# pytest compiles the modules of tests and those of its plugins, Hypothesis among them, because it rewrites their
# assertions. That takes seconds. PYTHONDONTWRITEBYTECODE would have each process of each run do it again. A mutant's
# bytecode must not be kept: its source changes within the second (CONTRIBUTING.md#mutants).
if os.environ.get("REKNIT_PROFILE") != "mutation":
    sys.dont_write_bytecode = False
