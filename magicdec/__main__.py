"""Entry point of the program. An interrupt or a termination ends it silently, even while it loads."""

import contextlib
import gc
import os
import signal
import sys

ALLOCATIONS_PER_COLLECTION = 500_000


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda got, _: os._exit(128 + got))
    # A plan makes some hundred thousand objects and keeps most of them: looking for cycles at
    # every seven hundred takes a tenth of its time.
    gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
    from magicdec.cli import main as program

    try:
        program()
    except SystemExit as ended:
        # The interpreter looks for cycles three times more as it ends: a tenth of a plan's time.
        gc.freeze()
        if ended.code not in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise
        with contextlib.suppress(OSError, ValueError):  # a reader that is gone
            sys.stdout.flush()
        # an orderly exit unloads torch, which takes seconds on a loaded machine
        os._exit(int(ended.code))


if __name__ == "__main__":
    main()
