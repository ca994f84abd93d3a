"""Where the program begins. From here on an interrupt or a termination ends it without a word, while it loads too."""

import os
import signal


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda got, _: os._exit(128 + got))
    from magicdec.cli import main as program

    program()


if __name__ == "__main__":
    main()
