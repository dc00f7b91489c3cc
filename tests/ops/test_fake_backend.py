"""Every operator runs under torch's fake process group, in which one process simulates a rank of a job."""

from __future__ import annotations

import os
import sys

import pytest

from support.processes import run_process

PROGRAM = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import weft
from ops.operators import DYNAMIC_SHAPES, sample_calls

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
torch.manual_seed(0)
name = dist.group.WORLD.group_name
for device in DEVICES:
    for call in sample_calls(name):
        integer_device = "cpu" if call.name == "dropout" else device  # dropout reads its seed on the CPU
        args = [arg.detach().to(device if arg.is_floating_point() else integer_device).requires_grad_(arg.requires_grad)
                if isinstance(arg, torch.Tensor) else arg for arg in call.args]
        y = call.op(*args, **call.kwargs)
        results = [y] if isinstance(y, torch.Tensor) else list(y)
        if call.name not in DYNAMIC_SHAPES:
            meta = [arg.detach().to("meta") if isinstance(arg, torch.Tensor) else arg for arg in call.args]
            expected = call.op(*meta, **call.kwargs)
            for result, like in zip(results, [expected] if isinstance(y, torch.Tensor) else expected, strict=True):
                assert result.shape == like.shape, call.name
        assert results[0].device.type == device, call.name
        sum(result.sum() for result in results if result.requires_grad).backward()
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                # Fake collectives exchange no data, so the values are undefined.
                assert arg.grad.shape == arg.shape and arg.grad.dtype == arg.dtype, call.name
    x = torch.ones(3, 4, device=device, requires_grad=True)
    token = weft.ops.pipeline_send([x], 2, 0, name)
    [back] = weft.ops.pipeline_wait(weft.ops.pipeline_recv([x], 0, 0, name))
    assert back.shape == x.shape and back.device.type == device
    weft.ops.join(back.sum(), [token]).backward()
    assert x.grad.shape == x.shape
    assert not weft.ops.pipeline_wait(weft.ops.pipeline_send([x.detach()], 2, 0, name))
    weft.ops.pipeline_flush(name)
    print(device, "ok")
"""


def _run(device: str) -> None:
    program = PROGRAM.replace("DEVICES", repr([device]))
    path = os.pathsep.join(filter(None, ("tests", os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    warm_processes = 1 if device == "cpu" else 0
    command = [sys.executable, "-c", program]
    result = run_process(command, env=environment, timeout=200, warm_processes=warm_processes)
    assert result.returncode == 0, result.stderr
    assert f"{device} ok" in result.stdout


def test_operators_run_on_cpu() -> None:
    _run("cpu")


@pytest.mark.cuda
def test_operators_run_on_cuda() -> None:
    _run("cuda")
