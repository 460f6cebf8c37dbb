"""``python -m mirrored CASE.json RESULT.pickle``: the child of the command line, its KV memory as far away as a card's.

The tensors are the CPU build's, but the harness sees copies of them, as on a real device. ``MIRROR=deaf`` never fetches
what a connector wrote, ``MIRROR=mute`` never sends what the harness wrote.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from kvproof.platforms import registry
from kvproof.platforms.cpu import Cpu
from kvproof.platforms.device_memory import DeviceMemory, Memory


class Deaf(DeviceMemory):
    def pull(self, ranges: Any = None) -> None:
        del ranges


class Mute(DeviceMemory):
    def push(self, ranges: Any = None) -> None:
        del ranges


class MirroredCpu(Cpu):
    """The CPU platform, its storages apart from what the harness reads and writes."""

    def memory(self, storages: Sequence[Any]) -> Memory:
        return {"": DeviceMemory, "deaf": Deaf, "mute": Mute}[os.environ.get("MIRROR", "")](storages)


if __name__ == "__main__":
    # Under its own name, so that the class registered is the one of this module.
    registry._PLACES["cpu"] = "mirrored:MirroredCpu"
    sys.argv[0] = "kvproof.scenarios"
    import kvproof.scenarios.__main__  # noqa: F401  does not return
