"""Kills the ranks of a save before each of its calls on the file system, and loads the checkpoint.

    python tests/soak/checkpoints.py [--ranks 4] [--stride 1] [--json]

Each rank in turn is the one whose calls are counted; all ranks are killed together. Every kind of save is tried over an
old checkpoint and without one, and with names that the file system can and cannot exchange. The checkpoint must
then load, and have the old values or the new ones in all tensors; without an old one, it may also be absent. Exits with
1 if there is another outcome. It needs about 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from lightning_plugin import test_checkpoint_crashes as crashes
from support.processes import run_on_forks
from weft.strategy import durable

OLD, NEW = crashes.OLD, crashes.NEW


def outcome(path: Path, has_old: bool) -> str:
    """Return "old", "new", "absent", or a text that says how the checkpoint is neither."""
    if not durable.existing(path).exists():
        return "absent" if not has_old else "lost: nothing has the name"
    try:
        value = crashes.loaded(path)
    except Exception as error:
        return f"damaged: {type(error).__name__}: {error}"
    return {OLD: "old", NEW: "new"}.get(value, f"damaged: it has {value}")


def kill_at_each_call(
    folder: Path, num_ranks: int, victim: int, kind: str, old: Path | None, stride: int
) -> tuple[int, Counter[str]]:
    """Return the number of calls at which the ranks were killed, and the outcomes."""
    path = folder / "saves" / "last.ckpt"
    outcomes: Counter[str] = Counter()
    number = 0
    while True:
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        if old is not None:
            shutil.copytree(old, path)
        statuses = run_on_forks(num_ranks, crashes.save_and_die, path, kind, victim, number * stride)
        if statuses == [0] * num_ranks:
            break
        if statuses != [-signal.SIGKILL] * num_ranks:
            outcomes[f"failed: statuses {statuses}"] += 1
        outcomes[outcome(path, old is not None)] += 1
        number += 1
    outcomes_at_end = outcome(path, True)
    if outcomes_at_end != "new":
        outcomes[f"undisturbed: {outcomes_at_end}"] += 1
    return number, outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stride", type=int, default=1, help="kill before every n-th call (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    crashes.SHAPES = {f"tensor {idx}": (8 + idx, 4) for idx in range(2 * args.ranks)}  # so that each rank writes
    exchange = durable._exchange
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weft-crashes-") as name:
        folder = Path(name)
        old = folder / "old.ckpt"
        if run_on_forks(args.ranks, crashes.save, OLD, old, "directory") != [0] * args.ranks:
            return 1
        for kind, has_old, can_exchange in (
            ("directory", True, True),
            ("directory", True, False),
            ("directory", False, True),
            ("background", True, True),
            ("background", False, True),
        ):
            durable._exchange = exchange if can_exchange else lambda *_: False
            for victim in range(args.ranks):
                number, outcomes = kill_at_each_call(
                    folder, args.ranks, victim, kind, old if has_old else None, args.stride
                )
                bad = {text: count for text, count in outcomes.items() if text not in ("old", "new", "absent")}
                row = {"kind": kind, "old": has_old, "exchange": can_exchange, "victim": victim, "points": number}
                rows.append({**row, **{text: outcomes[text] for text in ("old", "new", "absent")}, "bad": bad})
                if not args.json:
                    print(rows[-1], flush=True)
    num_points, num_bad = sum(row["points"] for row in rows), sum(sum(row["bad"].values()) for row in rows)
    if args.json:
        print(json.dumps({"ranks": args.ranks, "points": num_points, "bad": num_bad, "rows": rows}, indent=2))
    else:
        print(f"{num_points} crash points on {args.ranks} ranks, {num_bad} that left neither old nor new")
    return 1 if num_bad else 0


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
