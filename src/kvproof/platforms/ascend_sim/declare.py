"""What every interpreter of a run is told about the absent NPU, before torch or vLLM are imported.

Everything waits for the module it concerns, so that an interpreter that never imports torch pays nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from kvproof.platforms.ascend_sim import absent, memcache, triton_npu
from kvproof.platforms.ascend_sim.engine import without_profile_and_warm_up
from kvproof.platforms.ascend_sim.soc import BUILD_MODULE, Soc
from kvproof.platforms.ascend_sim.weights import without_engram_tables
from kvproof.platforms.platform import PlatformResolvedError

COPY_BACKEND = "vllm_ascend.distributed.kv_transfer.kv_pool.kv_offload.simple.copy_backend"
POOL_THREADS = "vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.kv_transfer"


def declare(soc: Soc) -> None:
    """Arrange that torch_npu and vllm-ascend find ``soc``. PlatformResolvedError if one of them is imported already."""
    from wrapt import when_imported

    early = [name for name in ("torch", "torch_npu", "vllm", "vllm_ascend") if name in sys.modules]
    if early:
        raise PlatformResolvedError(f"{early[0]} was imported before the SoC could be declared")
    absent.announce()
    memcache.announce()
    when_imported(BUILD_MODULE)(lambda module: _declare_build(module, soc))
    when_imported("triton.backends")(lambda module: triton_npu.register(module, soc))
    when_imported("vllm.triton_utils.importing")(triton_npu.has_triton)
    when_imported("triton.runtime.interpreter")(triton_npu.on_host_bytes)
    when_imported("torch_npu")(_replace_kernels)
    when_imported(COPY_BACKEND)(_copy_at_once)
    when_imported(POOL_THREADS)(memcache.wait_for_threads)
    when_imported("vllm_ascend.worker.worker")(without_profile_and_warm_up)
    when_imported("vllm_ascend.models.deepseek_v41.engram.embedding")(without_engram_tables)


def _declare_build(module: Any, soc: Soc) -> None:
    module.__device_type__ = soc.build


def _replace_kernels(module: Any) -> None:
    del module
    from kvproof.platforms.ascend_sim import kernels

    kernels.install()


def _copy_at_once(module: Any) -> None:
    from kvproof.platforms.ascend_sim import transfers

    transfers.copy_at_once(module)
