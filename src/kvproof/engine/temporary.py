"""A temporary directory for one child: an engine leaves sockets, rendezvous files and empty folders in its own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from kvproof.hostrt.build import user_cache

SOCKET_PATH = 107
"""Characters in the path of a unix socket, at most."""
SOCKET_NAME = 64
"""Characters of it for what an engine names in its temporary directory; vLLM's own names take 37."""


@contextlib.contextmanager
def own_directory() -> Iterator[dict[str, str]]:
    """Environment of a child whose temporary files are gone when the block ends.

    Where the usual place is too deep for the sockets an engine makes there, it is in /tmp; with neither, the child
    writes where everybody does.
    """
    name = "/kvproof-12345678"
    fit = [
        place
        for place in dict.fromkeys((tempfile.gettempdir(), "/tmp"))
        if len(place + name) + SOCKET_NAME <= SOCKET_PATH and os.access(place, os.W_OK | os.X_OK)
    ]
    if not fit:
        yield {}
        return
    # Compiled code is worth keeping: torch would put it into the temporary directory, too.
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(user_cache("torchinductor"))}
    with tempfile.TemporaryDirectory(prefix="kvproof-", dir=fit[0], ignore_cleanup_errors=True) as directory:
        yield {name: value for name, value in kept.items() if name not in os.environ} | {"TMPDIR": directory}
