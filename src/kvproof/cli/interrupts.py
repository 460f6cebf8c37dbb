"""How a run is ended from outside: everything that runs below it ends with it, and its folders are removed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHELL = 128
"""What a shell adds to the number of the signal that ended a command."""
INTERRUPTED = SHELL + signal.SIGINT


class EndedError(BaseException):
    """A signal asked this process to end. No Exception: nobody on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        self.exit_code = SHELL + number
        super().__init__(f"ended by {signal.Signals(number).name}")


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Inside the block SIGINT raises KeyboardInterrupt, SIGTERM and SIGHUP raise :class:`EndedError`.

    So it is whatever a start-up hook of the environment made of them: UCM's swallows the interrupt. What is ignored
    stays so (``nohup``, a shell's background). Once one was raised, none disturbs the clearing up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    mine = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def end(number: int, frame: Any) -> None:
        del frame
        for each in mine:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else EndedError(number)

    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)
