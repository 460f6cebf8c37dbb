"""Steps of a device that would replay a captured graph run the code it would have been captured from."""

from __future__ import annotations

from typing import Any

from kvproof.findings.model import Substitution

UNCAPTURED = Substitution(
    "CUDAGraphWrapper.__call__, ACLGraphWrapper.__call__",
    "K",
    "a graph holds kernels, and none was captured; where one would be replayed, the code it is captured from runs",
    "graphs are captured after the KV cache was placed; --cudagraph-mode itself stays an input of the layout",
)
WRAPPERS = {
    "vllm.compilation.cuda_graph": "CUDAGraphWrapper",
    "vllm_ascend.compilation.acl_graph": "ACLGraphWrapper",
}


def run_uncaptured() -> None:
    """For every graph wrapper of this process, whenever its module is imported."""
    from wrapt import when_imported

    for module, name in WRAPPERS.items():
        when_imported(module)(lambda loaded, name=name: _run_what_is_wrapped(getattr(loaded, name)))


def _run_what_is_wrapped(wrapper: Any) -> None:
    wrapper.__call__ = lambda self, *args, **kwargs: self.runnable(*args, **kwargs)
