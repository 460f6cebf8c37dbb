"""What can be declared about an absent GPU."""

from __future__ import annotations

import pytest

from kvproof.platforms.cuda_sim.devices import DEVICES, SUPPORTED, device, require_supported


def test_a_capability_is_never_guessed():
    with pytest.raises(ValueError, match=r"^--platform cuda-sim needs --cuda-capability"):
        device("", {})


@pytest.mark.parametrize("capability", ["9", "9.1", "sm_90", "90", "7.5"])
def test_an_unknown_capability_is_refused_with_the_list(capability):
    with pytest.raises(ValueError, match=r"expected one of 8\.0, 8\.9, 9\.0, 10\.0, 12\.0"):
        device(capability, {})


def test_quantities_can_be_varied_one_at_a_time():
    assert device("9.0", {"cores": 7}).cores == 7
    assert device("9.0", {"cores": 7}).name == DEVICES["9.0"].name


@pytest.mark.parametrize("model_type", sorted(SUPPORTED))
def test_a_pair_without_kernels_is_refused(model_type):
    with pytest.raises(ValueError, match=rf"--cuda-capability 8\.0: {model_type} has no supported attention kernels"):
        require_supported(model_type, "8.0")
    require_supported(model_type, "9.0")
    require_supported("qwen3", "8.0")
