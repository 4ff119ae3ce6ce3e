"""What all tests here rely on."""

from __future__ import annotations

import signal

# A shell gives its background jobs these ignored, reknit keeps ignored what it finds ignored, and the tests send them.
for signum, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, handler)
