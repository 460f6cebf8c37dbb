"""What the tests of the stand-ins share."""

import subprocess
import sys

CALLED = ("cudaMalloc", "cudaMemcpyAsync", "cudaLaunchKernel", "cudaFrobnicate", "__cudaRegisterFunction")
"""What the user leaves undefined; the fourth exists nowhere."""


def in_child(library, code):
    """Run ``code`` with ``lib`` loaded; these calls end their process."""
    text = f"import ctypes; lib = ctypes.CDLL({str(library)!r}); {code}"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
