"""The register of cuda-sim: everything that is not vLLM's own, and why the layout cannot notice."""

from __future__ import annotations

from kvproof.findings.model import Substitution
from kvproof.platforms import copies, graphs, triton_host

CAPABILITY = Substitution(
    "torch.cuda.get_device_capability",
    "P",
    "there is no driver to ask; the answer is the declared --cuda-capability",
    "NOT neutral: it selects attention backends and with them the layout; it is an input of the case, kept in evidence",
)

SUBSTITUTIONS: tuple[Substitution, ...] = (
    graphs.UNCAPTURED,
    CAPABILITY,
    Substitution(
        "libcuda.so.1",
        "P",
        "extension modules of the wheel link the driver's library; the stand-in answers 'no device', and every entry "
        "nobody wrote ends the process with its name",
        "it answers no question a size could come from",
    ),
    Substitution(
        "vllm.platforms.builtin_platform_plugins",
        "P",
        "NVML finds nothing, so vLLM would choose no platform",
        "selects vLLM's genuine CUDA platform class, which then answers for itself",
    ),
    Substitution(
        "torch.cuda.get_device_name, get_device_properties, mem_get_info; torch.accelerator.get_memory_info",
        "P",
        "there is no device to ask for its name, multiprocessors and memory",
        "`kvproof ablate` varies each and the layout stays: sizes are explicit, the block count is an override",
    ),
    Substitution(
        "torch.cuda, torch.accelerator: is_available, device_count, current_device, is_initialized, memory statistics",
        "P",
        "availability and counts of a device that is not there; vllm.platforms.cuda._cuda_device_count_stateless too",
        "one device, nothing allocated: no size derives from them with num_gpu_blocks_override",
    ),
    Substitution(
        "VLLM_HAS_FLASHINFER_CUBIN=1",
        "P",
        "on capability 10.x vLLM otherwise asks the network whether FlashInfer's kernels can be had",
        "NOT neutral: it lets vLLM select FlashInfer, as it does where the kernels can be had; set in every case",
    ),
    Substitution(
        "triton.backends.backends['nvidia']",
        "P",
        "without an active Triton driver vLLM falls back to model runner V1 with one log line; the stand-in names the "
        "declared target",
        "it launches nothing; kernels that do run are interpreted (below)",
    ),
    triton_host.RUNNER_V2_SUBSTITUTION,
    Substitution(
        "torch.cuda and torch.accelerator streams, events, synchronize, set_device, seeds; torch.Event, torch.Stream",
        "E",
        "they need a context; host work is done when it is submitted",
        "order only; no size or address derives from a stream or an event",
    ),
    Substitution(
        "device='cuda' in torch calls, Tensor.cuda, pin_memory, Tensor.record_stream",
        "M",
        "tensors of the device lie in host memory, and host memory needs no pinning",
        "placement: sizes, strides and dtypes of the call stay as they are",
    ),
    Substitution(
        "gpu_worker.Worker.init_device, determine_available_memory, compile_or_warm_up_model",
        "P",
        "NCCL, the memory snapshot, the profiling run and kernel warm-up need a device; gloo takes NCCL's place",
        "the runner, its specs and its tensors come afterwards, from production code; the block count is an override",
    ),
    Substitution(
        "vllm.utils.torch_utils.get_accelerator_view_from_cpu_tensor",
        "M",
        "the device's view of pinned host memory is that memory",
        "the same bytes",
    ),
    Substitution(
        "torch.cuda.cudart().cudaHostRegister, vllm.v1.kv_offload.cpu.gpu_worker.host_register",
        "M",
        "pinning host memory needs the driver",
        "pinning moves nothing",
    ),
    Substitution(
        "vllm.v1.kv_offload.cpu.gpu_worker.swap_blocks_batch (Triton)",
        "K",
        "the kernel that copies small blocks; replaced by memmove over the same lists",
        "sources, targets and sizes are computed by production code and executed as they are",
    ),
    Substitution(
        "_vllm_fa3_C::get_scheduler_metadata, deep_gemm::get_paged_mqa_logits_metadata, "
        "ComputeSWAIndicesAndLensKernel",
        "K",
        "how attention kernels would split their work, and which slots of a window they would read; none is "
        "launched, so these plans are filled with -1",
        "they are read by those kernels only; shape and dtype are production's",
    ),
    copies.ZERO_BLOCKS_SUBSTITUTION,
    copies.COPY_STATES_SUBSTITUTION,
    *copies.SUBSTITUTIONS,
)

RUNTIME_SUBSTITUTION = Substitution(
    "libcudart.so.12 (kvproof.hostrt)",
    "M",
    "the CUDA runtime of binary connectors: host memory behind allocation and copies, a thread behind each stream; "
    "launching a kernel ends the process with its name",
    "addresses and sizes are computed by the connector's own binaries and copied as they are; vLLM does not link it",
)
"""Where a connector from a binary wheel is installed."""
