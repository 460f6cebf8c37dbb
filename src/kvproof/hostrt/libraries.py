"""Which runtime libraries are stood in for, and from which C sources."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """One shared library by its soname.

    ``sources`` are files of this package. ``symbols`` matches the names that belong to it among the undefined symbols
    of its users; ``version`` is the ELF version node its users ask for, empty where they ask for none.
    """

    soname: str
    sources: tuple[str, ...]
    symbols: str
    version: str = ""

    def owns(self, symbol: str) -> bool:
        return re.fullmatch(self.symbols, symbol) is not None


CUDA_DRIVER = Library("libcuda.so.1", ("cuda_driver.c",), r"cu[A-Z]\w*")
CUDA_RUNTIME_12 = Library("libcudart.so.12", ("cuda_runtime.c",), r"(__)?cuda[A-Z]\w*", "libcudart.so.12")
