"""UCM (distributions ``uc-manager-*``): its wheels link a device's runtime, which is stood in for where they are.

Its logger takes signals for itself wherever one of its libraries is loaded, its start-up hook being the first: the
handlers only log and return. A fault then repeats for ever, and an interrupt does nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import sysconfig
import threading
from pathlib import Path

ENVIRONMENT = {
    # Its start-up hook runs in every interpreter and would write a folder of logs where the process happens to start.
    "UCM_LOG_TO_FILE": "0",
    "UCM_CAPTURE_VLLM_LOG": "0",
}
PACKAGE = "ucm"
FATAL = (signal.SIGILL, signal.SIGABRT, signal.SIGFPE, signal.SIGSEGV)
"""What UCM's logger takes beside SIGINT."""
SHARED_MEMORY = Path("/dev/shm")
"""Where UCM's workers tell its scheduler something, in files named by the id of the engine's process or its parent."""


def shared_objects() -> list[Path]:
    """UCM's shared objects in this environment; empty where UCM is not installed."""
    return sorted(Path(sysconfig.get_paths()["platlib"], "ucm").rglob("*.so"))


def release_signals() -> None:
    """Take back the signals that UCM took: a fault ends this process at once, by its signal, and an interrupt is
    Python's again.

    Called again wherever another of its libraries may have been loaded. Nothing happens without UCM, or outside of the
    main thread.
    """
    if PACKAGE not in sys.modules or threading.current_thread() is not threading.main_thread():
        return
    # faulthandler keeps what it replaced and gives it the signal after its own words: it must begin with the default.
    reports = faulthandler.is_enabled()
    faulthandler.disable()
    for number in FATAL:
        signal.signal(number, signal.SIG_DFL)
    if reports:
        faulthandler.enable(2)
    # What Python knows about: its own handler, or that the interrupt is ignored in the background of a shell.
    if (known := signal.getsignal(signal.SIGINT)) is not None:
        signal.signal(signal.SIGINT, known)


def remove_published(*pids: int) -> None:
    """Remove what engines with these process ids left in shared memory, the store's buffer of a gibibyte and more among
    it; what belongs to others stays."""
    for pid in pids:
        identity = SHARED_MEMORY / f"ucm_uniqueid_{pid}"
        with contextlib.suppress(FileNotFoundError):
            if (name := identity.read_text(encoding="ascii", errors="replace").strip()).isalnum():
                (SHARED_MEMORY / f"uc_shm_cache_{name}").unlink(missing_ok=True)
        # The last one is written first and moved into place: a process that was killed in between leaves it.
        for pattern in (identity.name, f"ucm_blocksize_{pid}", f"ucm_blocksize_{pid}_*", f"ucm_*.tmp.{pid}"):
            for path in SHARED_MEMORY.glob(pattern):
                path.unlink(missing_ok=True)
