"""Operators on NPU tensors: each computes on the host bytes or raises; what allocates is torch_npu's own."""

COMPUTES = """
import torch
x = torch.arange(12, dtype=torch.float32, device="npu:0").reshape(3, 4)
assert x.device.type == "npu"
column = x[:, 1]
column += 100
assert x.cpu().tolist() == [[0, 101, 2, 3], [4, 105, 6, 7], [8, 109, 10, 11]], x
assert (x @ x.T).cpu().allclose(x.cpu() @ x.cpu().T)
out = torch.empty(0, device="npu:0")
torch.add(x, x, out=out)
assert out.shape == x.shape and out.cpu().equal(x.cpu() * 2)
x.index_put_((torch.tensor([0], device="npu:0"),), torch.zeros(4, device="npu:0"))
assert x[0].sum().item() == 0
values, places = torch.topk(x[1], 2)
assert (values.tolist(), places.tolist(), values.device.type) == ([105, 7], [1, 3], "npu")
assert x.to(torch.float64).to("cpu").device.type == "cpu"
assert torch.zeros(2, 3, dtype=torch.int32, device="npu").cpu().tolist() == [[0, 0, 0], [0, 0, 0]]
torch._foreach_add_([x, column], 1)
print("fine")
"""

REFUSES = """
import torch, torch_npu
x = torch.ones(4, device="npu:0")
try:
    torch.ops.npu.npu_rms_norm(x, x)
except NotImplementedError as error:
    print(error)
"""

NONE_LEFT = """
import torch
from kvproof.platforms.ascend_sim import kernels
print(len(kernels.replaceable()), kernels.still_native(), kernels.install())
"""

HOST_VIEW = """
import torch
from kvproof.platforms.ascend_sim.hostview import host_view
x = torch.zeros(4, 6, dtype=torch.int16, device="npu:0")
part = torch.as_strided(x, (2, 3), (12, 2), 1)
view = host_view(part)
assert (view.device.type, view.shape, view.stride(), view.storage_offset()) == ("cpu", (2, 3), (12, 2), 1)
view[1, 2] = 7
assert part[1, 2].item() == 7 and x.flatten()[17].item() == 7
assert view.data_ptr() == part.data_ptr()
del x, part
assert view[1, 2].item() == 7  # the view keeps the bytes alive
print("fine")
"""


def test_operators_compute_on_the_bytes_they_are_given(interpreter):
    done = interpreter(COMPUTES)
    assert "fine" in done.stdout, done.stderr[-2000:]


def test_a_kernel_without_a_host_twin_raises_with_its_name(interpreter):
    assert "npu::npu_rms_norm is an NPU kernel and has no host twin" in interpreter(REFUSES).stdout


def test_no_kernel_of_torch_npu_is_left_that_could_succeed_in_silence(interpreter):
    count, native, again = interpreter(NONE_LEFT).stdout.splitlines()[-1].split()
    assert int(count) > 1000
    assert (native, again) == ("[]", "0")


def test_a_host_view_names_the_same_bytes(interpreter):
    done = interpreter(HOST_VIEW)
    assert "fine" in done.stdout, done.stderr[-2000:]


def test_an_interpreter_that_never_imports_torch_pays_nothing(interpreter):
    done = interpreter("import sys; print([m for m in ('torch', 'torch_npu', 'vllm', 'numpy') if m in sys.modules])")
    assert done.stdout.strip() == "[]"


def test_pinned_host_memory_is_made_by_torch_npu(interpreter):
    done = interpreter("import torch; x = torch.arange(5).pin_memory(); print(x.is_pinned(), x.to('npu').tolist())")
    assert done.stdout.splitlines()[-1] == "True [0, 1, 2, 3, 4]"
