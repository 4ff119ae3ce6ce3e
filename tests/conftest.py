"""What all tests here rely on."""

from __future__ import annotations

import signal

# A shell gives its background jobs the first two ignored, nohup the third. reknit keeps ignored what it finds ignored,
# and the tests send them.
_HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
for signum, handler in _HANDLERS.items():
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, handler)
