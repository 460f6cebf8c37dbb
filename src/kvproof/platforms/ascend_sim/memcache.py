"""MemCache, the pool behind AscendStoreConnector: its package is stood in for, the threads that use it are waited for.

Nothing is imported here that an interpreter without a pool would pay for.
"""

from __future__ import annotations

import importlib.machinery
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGE = "memcache_hybrid"


class _Finder:
    """Answers to the package's name."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        return importlib.machinery.ModuleSpec(fullname, _Finder()) if fullname == PACKAGE else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        from kvproof.platforms.ascend_sim.memcache_store import DistributedObjectStore

        module = ModuleType(spec.name)
        module.DistributedObjectStore = DistributedObjectStore  # type: ignore[attr-defined]
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        del module


def announce() -> None:
    """Let the package be imported in this interpreter, also where its binaries are installed: they need a driver."""
    sys.meta_path.insert(0, _Finder())


def wait_for_threads(kv_transfer: Any) -> None:
    """The connector's threads copy before the caller goes on, so that two runs are identical."""

    def until_done(thread: Any) -> None:
        while thread.request_queue.unfinished_tasks and thread.is_alive():
            time.sleep(0.0005)

    sending, receiving = kv_transfer.KVCacheStoreSendingThread, kv_transfer.KVCacheStoreRecvingThread
    add_save_batch, add_request = sending.add_save_batch, receiving.add_request

    def save(self: Any, requests: Any) -> Any:
        batch = add_save_batch(self, requests)
        until_done(self)
        return batch

    def load(self: Any, request: Any) -> None:
        add_request(self, request)
        until_done(self)

    sending.add_save_batch, receiving.add_request = save, load
