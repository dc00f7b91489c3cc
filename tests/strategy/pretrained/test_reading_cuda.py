"""Pretrained weights on a CUDA device: a rank's shards have the right values and are on the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import cuda_runtime
from support.processes import run_process

PROGRAM = """
import sys, torch, weft, torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft.strategy import deferred_init
from weft.strategy.data_parallel import apply_fsdp

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

torch.cuda.set_device(0)
values = {name: torch.randn_like(value) for name, value in Model().state_dict().items()}
save_file(values, sys.argv[1])
dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
with deferred_init(min_bytes=0):
    model = Model()
    model.load_state_dict(load_file(sys.argv[1]))
weft.parallelize(model, mesh, {"up": "column", "down": "row"}, keeps_deferred=True)
apply_fsdp(model, mesh["data_parallel"])
for name, parameter in model.named_parameters():
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    shard = values[name] if dim is None else values[name].chunk(2, dim)[1]
    local = parameter._local_tensor
    assert local.device == torch.device("cuda", 0), (name, local.device)
    assert torch.equal(local.cpu(), shard.chunk(2)[1]), name
print("equal")
"""


@pytest.mark.cuda
def test_shards_are_on_the_device(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the machine of `make gpu` need not have it")
    environment = cuda_runtime.environment() if cuda_runtime.is_active() else {}
    command = [sys.executable, "-c", PROGRAM, tmp_path / "weights.safetensors"]
    result = run_process(command, env={"OMP_NUM_THREADS": "1", **environment}, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "equal\n"
