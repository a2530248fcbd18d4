"""A device that does not compute is refused."""

import pytest
import torch

from collate_npu import CollateError
from collate_npu.tools.kernels import check_device


@pytest.mark.parametrize("device", ["cuda:x", "nonsense", "cuda:99", "npu", "meta", ""])
def test_a_device_that_does_not_compute_is_refused(device):
    with pytest.raises(CollateError, match=r"Name a device of this machine|Run on a real device"):
        check_device(device, torch.float32)
