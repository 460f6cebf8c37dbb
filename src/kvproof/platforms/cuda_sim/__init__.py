"""vLLM's CUDA build as published, on a machine without a GPU and without a driver."""

from kvproof.platforms.cuda_sim.sim import CudaSim

__all__ = ["CudaSim"]
