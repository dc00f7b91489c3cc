"""Kills a random rank of a training at random moments, starts it again each time, and compares the final weights.

    python tests/soak/restarts.py [--kills 50] [--seed 0] [--json]

The training of two ranks (tests/lightning_plugin/scripts/restarted.py) saves each second step in the background. It is
killed by SIGKILL between the start of its first step and half a second later. The final weights must equal those of an
undisturbed run bit for bit; exits with 1 if they do not. It needs about 5 minutes for 50 kills on 2 cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from lightning_plugin.test_restarts import ENVIRONMENT, SCRIPT

from support.processes import ProcessTree, assert_nothing_left
from weft.lightning import newest_checkpoint
from weft.strategy.checkpoint import open_checkpoint

STEPS_PER_KILL = 14
MAX_DELAY = 0.5  # seconds


def run(folder: Path, num_steps: int, rank: int | None, delay: float) -> int:
    """Run the training; kill a rank after a delay from its first step on. Returns the exit status."""
    command = [sys.executable, SCRIPT, folder, str(num_steps)]
    with ProcessTree(command, env=ENVIRONMENT, warm_processes=2) as tree:
        if rank is not None:
            tree.wait_for_text(f"READY {rank}", timeout=240)
            [pid] = [int(pid) for found, pid in re.findall(r"READY (\d) (\d+)", tree.stdout) if int(found) == rank]
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):  # the training has ended
                os.kill(pid, signal.SIGKILL)
        result = tree.wait(300.0)
        assert_nothing_left(tree.pgid, within=10.0)
    return result.returncode


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, or 0."""
    path = newest_checkpoint(folder) if folder.exists() else None
    return 0 if path is None else int(open_checkpoint(Path(path)).rest()["global_step"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    numbers = random.Random(args.seed)
    num_steps = args.kills * STEPS_PER_KILL
    with tempfile.TemporaryDirectory(prefix="weft-restarts-") as name:
        undisturbed, killed = Path(name, "undisturbed"), Path(name, "killed")
        if run(undisturbed, num_steps, None, 0.0) != 0:
            return 1
        steps = []
        begin = time.monotonic()
        while len(steps) < args.kills and not (killed / "weights.pt").exists():
            rank, delay = numbers.randrange(2), numbers.uniform(0.0, MAX_DELAY)
            if run(killed, num_steps, rank, delay) != 0:
                steps.append(saved_step(killed))
                if not args.json:
                    print(
                        f"kill {len(steps)}: rank {rank} {delay:.2f} s after its start, saved {steps[-1]}", flush=True
                    )
        status = 0 if (killed / "weights.pt").exists() else run(killed, num_steps, None, 0.0)
        seconds = time.monotonic() - begin
        expected, found = torch.load(undisturbed / "weights.pt"), torch.load(killed / "weights.pt")
        is_equal = expected.keys() == found.keys() and all(torch.equal(v, found[k]) for k, v in expected.items())
        left = sorted(path.name for path in killed.iterdir())
    result = {"kills": len(steps), "steps": num_steps, "equal": is_equal, "seconds": seconds, "left": left}
    print(json.dumps({**result, "saved": steps}) if args.json else result)
    return 0 if status == 0 and is_equal and len(steps) == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
