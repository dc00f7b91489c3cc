"""Calls every operator with random argument sets: each matches the unsharded computation or raises as documented.

    PYTHONPATH=tests python tests/soak/operators.py --count 10000
    PYTHONPATH=tests python tests/soak/operators.py --operator all_to_all --ranks 2 --seed 4711 --count 1
    PYTHONPATH=tests python tests/soak/operators.py --device cuda --ranks 2 --count 1000

On CUDA the ranks share a device, over gloo; repeat a failed set with the same options. A fifth of the sets run on 3
ranks, the others on 2. Prints one JSON line for each operator, and each failed set with its seed; continues with the
next set after a failure. Exits with 0 if no set failed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter

from ops.fuzz import NAMES
from ops.fuzz.launch import run_calls
from ops.operators import NEEDS_NCCL

from support.rank_pool import POOLS
from support.ranks import RankFailure, run_on_ranks

SETS_PER_LAUNCH = 1000
MAX_FAILURES = 20  # per operator


def soak(
    operator: str, num_ranks: int, first_seed: int, count: int, device: str, backend: str
) -> tuple[Counter[str], list[int]]:
    """Return the number of sets by outcome, and the seeds of the failed sets."""
    outcomes: Counter[str] = Counter()
    failed: list[int] = []
    seed, end = first_seed, first_seed + count
    while seed < end and len(failed) < MAX_FAILURES:
        size = min(SETS_PER_LAUNCH, end - seed)
        call = {"operator": operator, "first_seed": seed, "count": size, "device": device, "backend": backend}
        try:
            outcomes.update(run_on_ranks(num_ranks, run_calls, timeout=600, **call)[0])
            seed += size
        except RankFailure as failure:
            text = str(failure)
            print(text, file=sys.stderr, flush=True)
            found = re.search(r"--seed (\d+)", text)
            if found is None:
                raise
            failed.append(int(found[1]))
            # The failed launch returned no counts: run the sets before the failed one again.
            outcomes.update(run_on_ranks(num_ranks, run_calls, timeout=600, **call | {"count": failed[-1] - seed})[0])
            seed = failed[-1] + 1
    return outcomes, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operator", choices=sorted(NAMES), help="run this operator only")
    parser.add_argument("--count", type=int, default=10_000, help="sets for each operator")
    parser.add_argument("--ranks", type=int, help="number of ranks; default: 2 for most sets, 3 for a fifth")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first set; each further set adds 1")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the arguments are")
    parser.add_argument("--backend", choices=["cpu:weft", "gloo"], help="default: cpu:weft, on CUDA gloo")
    args = parser.parse_args()
    backend = args.backend or ("cpu:weft" if args.device == "cpu" else "gloo")
    if args.device == "cuda" and backend != "gloo":
        parser.error(f"--device cuda got --backend {backend}, but needs gloo: leave --backend out.")
    on_three = args.count // 5
    num_sets = {args.ranks: args.count} if args.ranks else {2: args.count - on_three, 3: on_three}
    num_failed = 0
    names = [name for name in NAMES if args.device == "cpu" or name not in NEEDS_NCCL]
    for operator in [args.operator] if args.operator else names:
        outcomes: Counter[str] = Counter()
        failures, seed = {}, args.seed
        for num_ranks, count in num_sets.items():
            new_outcomes, failures[num_ranks] = soak(operator, num_ranks, seed, count, args.device, backend)
            outcomes += new_outcomes
            seed += count
        num_failed += sum(len(seeds) for seeds in failures.values())
        print(json.dumps({"soak": operator, **outcomes, "failed_seeds": failures}), flush=True)
    POOLS.close()
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
