"""The part of CANN's Python binding ``acl.rt`` that connectors hand on to compiled code: events of ``libascendcl``.

Signatures are pyACL's: an event is its address as an int, a return code of 0 is success.
"""

from __future__ import annotations

import ctypes
from functools import cache

from kvproof.hostrt import libraries


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(libraries.ACL.soname)
    library.aclrtCreateEvent.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
    library.aclrtRecordEvent.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.aclrtDestroyEvent.argtypes = (ctypes.c_void_p,)
    return library


def create_event() -> tuple[int, int]:
    """A new event and a return code."""
    event = ctypes.c_void_p()
    code = _library().aclrtCreateEvent(ctypes.byref(event))
    return event.value or 0, int(code)


def record_event(event: int, stream: int) -> int:
    """The event is reached when the work put on ``stream`` so far is done; a return code."""
    return int(_library().aclrtRecordEvent(event, stream))


def destroy_event(event: int) -> int:
    """A return code."""
    return int(_library().aclrtDestroyEvent(event))
