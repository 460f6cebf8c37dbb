"""vllm-ascend and torch_npu as published, on a machine without an NPU and without CANN."""

from kvproof.platforms.ascend_sim.sim import AscendSim

__all__ = ["AscendSim"]
