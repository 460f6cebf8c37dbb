"""Work plans of attention kernels: how a kernel that is never launched would have split its work.

Attention metadata carries them beside block tables and slot mappings. Nothing but the kernel reads them, so each is a
tensor of the production shape filled with -1. They are registered as the CPU kernels of the wheel's own operators:
operators that are not listed here raise, as torch does for every operator without a CPU kernel. One plan is made by a
Triton kernel, a program for every token and group, which takes minutes in the interpreter: the slots of the window each
token attends to.
"""

from __future__ import annotations

from typing import Any

UNREAD = -1
_libraries: list[Any] = []


def install() -> None:
    """Register the plans of every extension, also of one that is loaded later. Needs vLLM imported; idempotent."""
    import torch

    if _libraries:
        return
    from wrapt import when_imported

    when_imported("vllm.v1.attention.backends.mla.sparse_swa")(_leave_windows_unread)
    for operator, plan in _PLANS.items():
        namespace, _, name = operator.partition("::")
        library = torch.library.Library(namespace, "IMPL")
        library.impl(name, plan, "CPU")
        _libraries.append(library)


def _flash_attention_3(batch_size: int, *rest: Any) -> Any:
    """int32 ``[1 + 4 * batch size rounded up to 4]``: tiles per sequence and a semaphore."""
    import torch

    del rest
    return torch.full((1 + (batch_size + 3) // 4 * 16,), UNREAD, dtype=torch.int32)


def _paged_index_logits(context_lens: Any, block_kv: int, slots: int, indices: Any = None) -> Any:
    """int32 ``[slots + 1, 2]``: where each of ``slots`` multiprocessors begins in the index keys of a batch."""
    import torch

    del context_lens, block_kv, indices
    return torch.full((slots + 1, 2), UNREAD, dtype=torch.int32)


def _leave_windows_unread(module: Any) -> None:
    """Both of the kernel's outputs: int32 ``[tokens, 1, width]``, slots of the window, and ``[tokens]``, how many."""

    def plan(self: Any, slots: Any, lengths: Any, *rest: Any, num_tokens: int, **options: Any) -> None:
        del self, rest, options
        slots[:num_tokens].fill_(UNREAD)
        lengths[:num_tokens].fill_(UNREAD)

    module.ComputeSWAIndicesAndLensKernel.__call__ = plan


_PLANS = {
    "_vllm_fa3_C::get_scheduler_metadata": _flash_attention_3,
    "deep_gemm::get_paged_mqa_logits_metadata": _paged_index_logits,
}
