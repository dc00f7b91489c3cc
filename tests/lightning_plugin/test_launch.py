"""Process trees of Lightning's own launcher, of torchrun and of one device: clean exits and clean stderr."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from support.processes import ProcessResult, run_process, run_script

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
# Words that c10d, gloo or a failing interpreter print; Lightning's strategy causes "unwaited collective calls".
UNEXPECTED_STDERR = (
    "ProcessGroup",
    "c10d",
    "Traceback",
    "unwaited",
    "TCPStore",
    "destroy_process_group",
    "Exception",
    "leaked",
)


def _run(launcher: list[str], devices: int, folder: Path, namespace: str) -> ProcessResult:
    command = [*launcher, str(SCRIPTS / "train.py"), namespace, str(devices), str(folder)]
    # torchrun starts new interpreters; Lightning's launcher does in test_shutdown.py.
    warm_processes = devices if len(launcher) == 1 else 0
    return run_process(command, timeout=120, env=ENVIRONMENT, warm_processes=warm_processes)


def _results(result: ProcessResult) -> list[dict]:
    assert result.returncode == 0, result.stderr
    unexpected = [line for line in result.stderr.splitlines() if any(word in line for word in UNEXPECTED_STDERR)]
    assert not unexpected, result.stderr
    lines = [line.removeprefix("RESULT ") for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    return sorted(map(json.loads, lines), key=lambda r: r["rank"])


def test_launchers_match_one_device(tmp_path: Path) -> None:
    python = [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    trees = {
        "one": (python, 1, "lightning.pytorch"),
        "launched": (python, 2, "lightning.pytorch"),
        "other namespace": (python, 2, "pytorch_lightning"),
        "torchrun": (torchrun, 2, "lightning.pytorch"),
    }
    results = {}
    for name, (launcher, devices, namespace) in trees.items():
        results[name] = _results(_run(launcher, devices, tmp_path / name.replace(" ", "-"), namespace))
        assert [r["rank"] for r in results[name]] == list(range(devices)), name
        for result in results[name]:
            assert result["world_size"] == devices
            assert result["steps"] == 12
            assert result["group_alive"]
            assert result["local_shape"] == [12 // devices, 8]
            if devices == 2:
                assert "run the script once for each number of devices" in result["other_count"]
    for results_of_tree in results.values():
        for result in results_of_tree:
            for key in ("tested", "predicted", "weight"):
                assert result[key] == pytest.approx(results["one"][0][key], rel=1e-5)
    assert (tmp_path / "launched" / "after.ckpt" / "manifest.json").is_file()
    assert list((tmp_path / "launched").rglob("metrics.csv"))


def test_invalid_sizes_raise_before_launch() -> None:
    source = "\n".join(
        [
            "import weft.lightning, lightning as L, torch.distributed as dist, subprocess",
            "subprocess.Popen = None  # launching a process would raise another error",
            "strategy = weft.lightning.WeftModelParallelStrategy(plan='auto', tensor_parallel_size=3)",
            "L.Trainer(accelerator='cpu', devices=2, strategy=strategy)",
        ]
    )
    result = run_script(source, timeout=60, env=ENVIRONMENT, warm_processes=1)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "has 2 processes" in last
    assert "mesh 'data_parallel=1,tensor_parallel=3' has 3 ranks" in last


def test_strategy_layer_does_not_import_lightning() -> None:
    source = "import sys, weft, weft.strategy; assert not [m for m in sys.modules if 'lightning' in m], 'imported'"
    assert run_script(source, timeout=60, env=os.environ).returncode == 0
