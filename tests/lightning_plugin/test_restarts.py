"""A job that is killed and started again ends with the weights of an undisturbed one, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning_plugin.scripts.plugin_models import assert_same_weights
from torch import Tensor

from support.processes import ProcessTree, assert_nothing_left

SCRIPT = Path(__file__).parent / "scripts" / "restarted.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[1])}
NUM_STEPS = 15


def _run(folder: Path, *kills: str, launcher: tuple[str, ...] = (sys.executable,)) -> int:
    """Run the job; return its exit status."""
    is_torchrun = len(launcher) > 1
    num_starts = 3 if is_torchrun else 1
    warm_processes = 2 * num_starts + is_torchrun
    command = [*launcher, SCRIPT, folder, str(NUM_STEPS), *kills]
    with ProcessTree(command, env=ENVIRONMENT, warm_processes=warm_processes) as tree:
        result = tree.wait(120.0)
        assert_nothing_left(tree.pgid, within=5.0)
        assert result.stdout.count("READY") == 2 * num_starts, result.stderr
        return result.returncode


def _weights(folder: Path) -> dict[str, Tensor]:
    result: dict[str, Tensor] = torch.load(folder / "weights.pt")
    return result


def test_killed_jobs_go_on_as_if_undisturbed(tmp_path: Path) -> None:
    """Started again by a loop around the script, and by torchrun; killed in the first and in the third epoch.

    Under torchrun also killed in a save, whose reports stay in torchrun's store.
    """
    assert _run(tmp_path / "undisturbed") == 0
    for kill in ("1:3", "0:13"):
        assert _run(tmp_path / "loop", kill) != 0
        assert not (tmp_path / "loop" / "weights.pt").exists()
    assert _run(tmp_path / "loop") == 0
    elastic = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    assert _run(tmp_path / "elastic", "0:8", "save", launcher=elastic) == 0
    for name in ("loop", "elastic"):
        assert_same_weights(_weights(tmp_path / name), _weights(tmp_path / "undisturbed"), rtol=0.0)
