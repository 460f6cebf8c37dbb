"""UCM (distributions ``uc-manager-*``): its wheels link a device's runtime, which is stood in for where they are."""

from __future__ import annotations

import sysconfig
from pathlib import Path

ENVIRONMENT = {
    # Its start-up hook runs in every interpreter and would write a folder of logs where the process happens to start.
    "UCM_LOG_TO_FILE": "0",
    "UCM_CAPTURE_VLLM_LOG": "0",
}


def shared_objects() -> list[Path]:
    """UCM's shared objects in this environment; empty where UCM is not installed."""
    return sorted(Path(sysconfig.get_paths()["platlib"], "ucm").rglob("*.so"))
