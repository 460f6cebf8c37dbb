"""Which runtime libraries are stood in for, and from which C sources."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """One shared library by its soname.

    ``sources`` are files of this package. ``symbols`` matches the names that belong to it among the undefined symbols
    of its users; ``version`` is the ELF version node its users ask for, empty where they ask for none. ``needs`` are
    the libraries it depends on: a symbol looked up in this one by name is found in those too.
    """

    soname: str
    sources: tuple[str, ...]
    symbols: str
    version: str = ""
    needs: tuple[Library, ...] = ()

    def owns(self, symbol: str) -> bool:
        return re.fullmatch(self.symbols, symbol) is not None


CUDA_DRIVER = Library("libcuda.so.1", ("cuda_driver.c",), r"cu[A-Z]\w*")
_DEVICE = ("streams.c", "copies.c")
"""What the runtime of any device is made of."""
_RECORDS = r"kvproof_(declare|collect)"
"""What Python calls (platforms/native_copies.py)."""
CUDA_RUNTIME_12 = Library(
    "libcudart.so.12", ("cuda_runtime.c", *_DEVICE), rf"(__)?cuda[A-Z]\w*|{_RECORDS}", "libcudart.so.12"
)

_ACL_COMPILER = r"aclopCompile\w*|acl[GS]etCompileopt\w*"
ACL = Library(
    "libascendcl.so", ("acl.c", *_DEVICE), rf"(?!{_ACL_COMPILER})acl[A-Z]?[a-z]\w*|Msprof\w*|{_RECORDS}"
)
ACL_COMPILER = Library("libacl_op_compiler.so", ("acl_op_compiler.c",), _ACL_COMPILER, needs=(ACL,))
HCCL = Library("libhccl.so", ("hccl.c",), r"H(ccl|com)\w*")
GRAPH_ENGINE_RUNNER = Library("libge_runner.so", (), r"rt(?!Ffts)[A-Z]\w*")
GRAPH_ENGINE = Library("libgraph.so", (), r"_ZNK?2ge\w*")
ACL_CHANNEL = Library("libacl_tdt_channel.so", (), r"acltdt\w*")
TRANSFORMER_KERNELS = Library("libatb.so", (), r"_ZNK?3atb\w*")
CANN = (ACL, ACL_COMPILER, HCCL, GRAPH_ENGINE_RUNNER, GRAPH_ENGINE, ACL_CHANNEL, TRANSFORMER_KERNELS)
"""What torch_npu links of CANN. Where no source is named nothing is ever reached: every entry there is a stub."""

RUNTIME = Library("libruntime.so", (), r"rtFfts\w*")
"""What UCM links beside ACL, for tasks that are kernels."""
