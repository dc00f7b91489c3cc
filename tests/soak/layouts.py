"""Compares training on every mesh and ZeRO stage with training on one device.

Varies optimizer, gradient accumulation and clipping. Also resumes on each layout from the checkpoint of every layout.

    PYTHONPATH=tests python tests/soak/layouts.py
    PYTHONPATH=tests python tests/soak/layouts.py --layout dp2,tp2 --stage 3

Prints one JSON line for each mesh and stage, with its failures. Exits with 0 if there are none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile

from lightning_plugin.scripts.meshes import CASES, assert_matches_one_device
from lightning_plugin.test_meshes import CHECKPOINTS, assert_resumes, save_all
from torch import Tensor

from support.rank_pool import POOLS
from support.ranks import RankFailure

OPTIONS = list(itertools.product(("SGD", "AdamW"), (1, 2), (None, 0.3)))


def soak(folder: str, layout: str, stage: int | None) -> list[str]:
    """Return the options that failed on one mesh at one stage, each with its reason."""
    failed = []
    for optimizer, accumulate, clip in OPTIONS:
        try:
            assert_matches_one_device(folder, layout, stage, optimizer, accumulate, clip)
        except (AssertionError, RankFailure) as failure:
            reason = str(failure).strip().splitlines()[-1]
            failed.append(f"{optimizer}, accumulation {accumulate}, clip {clip}: {reason}")
    return failed


def soak_resumes(folder: str, expected: dict[str, Tensor], layout: str, stage: int | None) -> list[str]:
    """Return the checkpoints from which resuming on one mesh at one stage failed, each with its reason."""
    failed = []
    for saved in CHECKPOINTS:
        try:
            assert_resumes(folder, expected, layout, stage, [saved])
        except (AssertionError, RankFailure) as failure:
            failed.append(f"from {saved}: {str(failure).strip().splitlines()[-1]}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", help="run this layout only")
    parser.add_argument("--stage", type=int, help="run this ZeRO stage only")
    options = parser.parse_args()
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for layout, stage in CASES:
            if options.layout in (None, layout) and options.stage in (None, stage):
                failed = soak(folder, layout, stage)
                num_failed += len(failed)
                line = {"layout": layout, "zero_stage": stage, "runs": len(OPTIONS), "failed": failed}
                print(json.dumps(line), flush=True)
        expected = save_all(folder)
        for layout, stage in CHECKPOINTS:
            if options.layout in (None, layout) and options.stage in (None, stage):
                failed = soak_resumes(folder, expected, layout, stage)
                num_failed += len(failed)
                line = {"layout": layout, "zero_stage": stage, "resumed_from": len(CHECKPOINTS), "failed": failed}
                print(json.dumps(line), flush=True)
    POOLS.close()
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
