"""What the tests of the stand-ins share."""

import subprocess
import sys

import numpy as np
import pytest

from kvproof.hostrt import build

CALLED = ("cudaMalloc", "cudaMemcpyAsync", "cudaLaunchKernel", "cudaFrobnicate", "__cudaRegisterFunction")
"""What the user leaves undefined; the fourth exists nowhere."""
ACL_CALLED = ("aclrtMalloc", "aclrtMemcpyAsync", "aclrtFrobnicate")
"""The same for a user of ACL; the last exists nowhere."""

PAGE = 4096
_DECLARED = []


def declared_pages(copies):
    """Two pages of device memory that the library did not allocate, declared to it. They stay so for good, so nobody
    else may ever get these addresses."""
    memory = np.full(2 * PAGE, 255, np.uint8)
    _DECLARED.append(memory)
    copies.declare(memory.ctypes.data, memory.nbytes)
    copies.collect()
    return memory


def user_of(names, folder):
    """A shared object, compiled in ``folder``, that calls every one of ``names``."""
    source, target = folder / "user.c", folder / "libuser.so"
    declared = "".join(f"void {name}(void);" for name in names)
    source.write_text(f"{declared} void use(void) {{ {''.join(f'{name}();' for name in names)} }}")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    return target


def built_for(library, names, tmp_path_factory):
    """``library`` built for a user of ``names``, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return build.build(library, [user_of(names, tmp_path_factory.mktemp("user"))])


def in_child(library, code):
    """Run ``code`` with ``lib`` loaded; these calls end their process."""
    text = f"import ctypes; lib = ctypes.CDLL({str(library)!r}); {code}"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
