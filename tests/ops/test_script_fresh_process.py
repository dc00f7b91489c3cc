"""A scripted module saved by one job runs in another: fresh processes, new group names, the same results."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from support.processes import ProcessTree
from support.ranks import run_on_ranks

LOADER = """
import sys
import torch, torch.distributed as dist
import weft
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
module = torch.jit.load(f"{folder}/module-{rank}.pt")
try:
    module(torch.ones(3, 8))
except Exception as error:
    assert "no process group of this process" in str(error), error
else:
    raise SystemExit("the group name of another job was accepted")
weft.nn.rebind_group(module, dist.new_group([0, 1]).group_name)
expected = torch.load(f"{folder}/expected-{rank}.pt")
assert torch.equal(module(torch.ones(3, 8)), expected)
dist.destroy_process_group()
print("same numbers", flush=True)
"""


def save_module(rank: int, folder: str) -> None:
    torch.manual_seed(rank)
    module = weft.nn.ColumnRowMLP(8, 10, group_name=dist.group.WORLD.group_name)
    torch.save(module(torch.ones(3, 8)), f"{folder}/expected-{rank}.pt")
    module.group_name = "a group of the saving job"
    torch.jit.save(torch.jit.script(module), f"{folder}/module-{rank}.pt")


def test_loads_in_fresh_processes(tmp_path: Path) -> None:
    run_on_ranks(2, save_module, folder=str(tmp_path))
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    with ExitStack() as stack:
        trees = [stack.enter_context(ProcessTree([sys.executable, script, tmp_path, str(rank)])) for rank in range(2)]
        results = [tree.wait(120) for tree in trees]
    for result in results:
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip().endswith("same numbers")
        assert "terminate called" not in result.stderr, result.stderr
