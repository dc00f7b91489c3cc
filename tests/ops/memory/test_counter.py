"""The allocator counts the requested bytes, however torch manages its memory."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from ops.memory.counting import counted
from torch import nn

import weft
from support.processes import run_process
from support.ranks import on_ranks


@on_ranks(1)
def test_requested_bytes_are_counted(rank: int) -> None:
    with counted() as count:
        number = weft.memory.num_allocations()
        tensor = torch.empty(1000)
        assert (count.now(), weft.memory.num_allocations() - number) == (4000, 1)
        view, empty = tensor[10:20], torch.empty(0)
        assert (count.now(), empty.data_ptr(), weft.memory.num_allocations() - number) == (4000, 0, 1)
        other = tensor.clone()
        assert count.now() == 8000
        del tensor, other
        assert count.now() == 4000  # the view references the storage
        del view
        assert (count.now(), count.peak()) == (0, 8000)


@on_ranks(1)
def test_resized_and_moved_storages_are_counted(rank: int) -> None:
    with counted() as count:
        tensor = torch.arange(100, dtype=torch.float32)
        tensor.resize_(1000)
        assert (count.now(), tensor[:100].tolist()) == (4000, list(range(100)))
        tensor.untyped_storage().resize_(0)
        assert count.now() == 0
        tensor.untyped_storage().resize_(400)
        assert count.now() == 400
        other = torch.ones(7)
        tensor.data = other
        assert count.now() == 28
        tensor.share_memory_()  # its storage is in shared memory now
        assert count.now() == 0


@on_ranks(1)
def test_memory_from_outside_is_not_counted(rank: int) -> None:
    """docs/memory.md lists these tensors; the list must change if a version of torch counts one of them."""
    old = torch.ones(100)
    with counted() as count:
        kept = [copy.deepcopy(old), torch.from_numpy(np.ones(100)), torch.frombuffer(bytearray(400), dtype=torch.int8)]
        kept += [torch.empty(0).set_(torch.UntypedStorage(400)), torch.ones(7).share_memory_()]
        assert (len(kept), count.now()) == (5, 0)


def _conv() -> list[torch.Tensor]:
    layer = nn.Conv2d(3, 16, 3)
    layer(torch.randn(2, 3, 20, 20, requires_grad=True)).square().sum().backward()
    return [parameter.grad for parameter in layer.parameters()]


def _bfloat16_product() -> list[torch.Tensor]:
    a = torch.randn(65, 129, dtype=torch.bfloat16)
    return [a @ a.t()]


def _lstm() -> list[torch.Tensor]:
    layer = nn.LSTM(8, 16, num_layers=2)
    layer(torch.randn(5, 3, 8))[0].square().sum().backward()
    return [parameter.grad for parameter in layer.parameters()]


def _linear_bfloat16() -> list[torch.Tensor]:
    layer = nn.Linear(64, 33, dtype=torch.bfloat16)
    layer(torch.randn(7, 64, dtype=torch.bfloat16)).sum().backward()
    return [parameter.grad for parameter in layer.parameters()]


def _attention() -> list[torch.Tensor]:
    q = torch.randn(2, 4, 33, 16, requires_grad=True)
    nn.functional.scaled_dot_product_attention(q, q, q).square().sum().backward()
    return [q.grad]


def _copies() -> list[torch.Tensor]:
    a = torch.randn(50)
    lazy = torch._lazy_clone(a)
    lazy.add_(1)
    return [lazy, a]


@on_ranks(1)
@pytest.mark.parametrize("work", [_conv, _bfloat16_product, _lstm, _linear_bfloat16, _attention, _copies])
def test_library_allocations_through_torch_are_counted(rank: int, work: Callable[[], list[torch.Tensor]]) -> None:
    """oneDNN and others free the memory of storages with the allocator's raw deleter."""
    torch.manual_seed(1)
    expected = work()
    with counted() as count:
        torch.manual_seed(1)
        results = work()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        assert count.peak() > 0
        assert count.now() == sum(result.untyped_storage().nbytes() for result in results)
        del results
        assert count.now() == 0


@on_ranks(1)
def test_other_threads_are_counted(rank: int) -> None:
    kept: list[torch.Tensor] = []
    with counted() as count:
        threads = [threading.Thread(target=lambda: kept.append(torch.ones(1000))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert count.now() == 16000
        kept.clear()
        assert count.now() == 0


@on_ranks(1)
def test_tags_apply_to_peak(rank: int) -> None:
    with counted() as count:
        weights = torch.empty(100)
        temporary = torch.empty(50)
        del temporary
        later = torch.empty(10)
        weft.memory.tag([weights, None, later, torch.empty(0)], "parameters")
        assert count.now("parameters") == 440
        assert (count.peak("parameters"), count.peak("other"), count.peak()) == (400, 200, 600)
        with pytest.raises(ValueError, match=r"got the category 'weights'; pass one of weft\.memory\.CATEGORIES"):
            weft.memory.tag([weights], "weights")
        with pytest.raises(ValueError, match="got at='then'"):
            weft.memory.by_category(at="then")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="got the device meta"):
            weft.memory.peak("meta")
        assert weft.memory.reserved() == weft.memory.current()
        assert weft.memory.peak_reserved() == weft.memory.peak()


@pytest.mark.cuda
def test_cuda_memory_of_caching_allocator() -> None:
    held = weft.memory.current("cuda")
    weft.memory.reset_peak("cuda")
    tensor = torch.empty(1 << 20, device="cuda")
    del tensor
    assert weft.memory.current("cuda") == held
    assert weft.memory.peak("cuda") == held + (4 << 20)
    assert weft.memory.peak_reserved("cuda") >= weft.memory.peak("cuda")
    assert weft.memory.reserved("cuda") >= held


SCRIPT = """
import warnings, torch
before = torch.ones(1000) if {late} else None
known = torch.ones(300)
import weft
if {late}:
    with warnings.catch_warnings(record=True) as seen:
        weft.memory.track(known=[known, known[:3]])
        weft.memory.track()
    print(*[warning.message for warning in seen])
held = torch.ones(500)
if before is not None:
    before.resize_(4000)
print(weft.memory.is_tracking(), weft.memory.current(), weft.memory.peak())
model = torch.nn.Module()
model.first = model.tied = torch.nn.Parameter(known)
model.second = torch.nn.Parameter(held)
print(weft.memory.tag_parameters(model), weft.memory.by_category()["parameters"])
"""


@pytest.mark.parametrize("late", [False, True])
def test_environment_or_call_starts_tracking(late: bool) -> None:
    """WEFT_MEMORY=1 counts from the first tensor on; `track` counts new and `known` tensors, and warns of others."""
    environment = {"WEFT_MEMORY": "0" if late else "1"}
    result = run_process([sys.executable, "-c", SCRIPT.format(late=late)], env=environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    if late:
        assert "came after 1 tensors with 4000 bytes, which are not counted; call it before" in lines[0]
    assert lines[-2:] == ["True 2000 2000", "1200 2000"]


def test_tracking_is_off_by_default() -> None:
    code = "import weft; assert not weft.memory.is_tracking(); weft.memory.begin_phase('x'); weft.memory.current()"
    result = run_process([sys.executable, "-c", code], env={"WEFT_MEMORY": ""})
    assert "weft.memory counts nothing yet: set WEFT_MEMORY=1 before `import weft`" in result.stderr
    result = run_process([sys.executable, "-c", "import weft"], env={"WEFT_MEMORY": "yes"})
    assert "got WEFT_MEMORY=yes; set it to 1 to count memory, or to 0." in result.stderr
