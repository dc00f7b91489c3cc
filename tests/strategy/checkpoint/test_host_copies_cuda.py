"""Copies of CUDA tensors in CPU memory that CUDA pins."""

from __future__ import annotations

import pytest
import torch

from weft.strategy.checkpoint.host_copies import HostCopies


@pytest.mark.cuda
def test_copies_of_cuda_tensors_are_pinned_and_complete() -> None:
    copies = HostCopies()
    first = torch.arange(1000, dtype=torch.float32, device="cuda")
    tensors = [first, torch.ones(3, 5, dtype=torch.bfloat16, device="cuda").t(), torch.tensor(7)]
    made = copies.copy(tensors)
    first.add_(1.0)  # a later step
    assert made[0].tolist() == list(range(1000))
    assert torch.equal(made[1], torch.ones(5, 3, dtype=torch.bfloat16)) and made[2].item() == 7
    assert all(each.is_pinned() and each.device.type == "cpu" for each in made)
    address = made[0].data_ptr()
    assert copies.copy([first])[0].data_ptr() == address
    assert copies.copy([first, first])[1].tolist() == list(range(1, 1001))  # the buffer grows
    assert copies.copy([first])[0].is_pinned()
    copies.free()
    assert copies.num_bytes == 0
