"""Everything ascend-sim substitutes, with the reason why the layout cannot notice."""

from __future__ import annotations

from kvproof.findings.model import Substitution

SUBSTITUTIONS = (
    Substitution(
        "vllm_ascend._build_info.__device_type__, aclrtGetSocName",
        "P",
        "no device names its SoC; --soc declares it, and production's own check of build against device runs",
        "NOT neutral: the SoC is a declared input of the layout, logged with the case",
    ),
    Substitution(
        "libascendcl, libacl_op_compiler, libhccl, libge_runner, libgraph, libacl_tdt_channel",
        "M",
        "CANN is not installed; device memory is host memory, streams and events are complete at once, every entry "
        "nobody wrote ends the process with its name",
        "allocation sizes and addresses come from torch_npu's own caching allocator",
    ),
    Substitution(
        "aten kernels on NPU tensors (PrivateUse1)",
        "K",
        "they would call CANN; each computes with the CPU kernel on the same bytes or raises with its name",
        "what allocates, views and resizes is torch_npu's own",
    ),
)
