"""Writes the tables of docs/combinations.md from runs of all combinations on 2 and 4 ranks (a quarter of an hour).

    python docs/generate_combinations.py
    python docs/generate_combinations.py cp2 cp2,tp2    # runs these layouts only, and keeps the tables of the others

The text outside the page's two markers is written by hand. tests/combinations runs some of the combinations in each
test run, and compares them with the page. Ends with status 1, and writes nothing, if a combination neither works nor
raises an error that names it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from combinations.options import LAYOUTS, Combination, combinations
from combinations.page import PAGE, page, written
from combinations.runs import Outcome, run

from support.rank_pool import POOLS, RankFailure


def main(layouts: list[str]) -> int:
    kept = written(PAGE.read_text(), LAYOUTS.keys() - layouts) if layouts else {}
    outcomes = [Outcome(each, error=error) for each, error in kept.items()]
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in sorted(layouts or LAYOUTS, key=LAYOUTS.__getitem__):
            for combination in combinations(layout):
                try:
                    outcome = run(combination, folder)
                except RankFailure as failure:
                    failures.append(f"{_text(combination)}: {failure}")
                    continue
                outcomes.append(outcome)
                if not outcome.is_allowed:
                    failures.append(f"{_text(combination)}: weights differ by {outcome.difference:.1e}")
            print(f"{layout}: done", flush=True)
    POOLS.close()
    if failures:
        print("\n\n".join(failures))
        print(f"{len(failures)} of {len(outcomes)} combinations fail")
        return 1
    PAGE.write_text(page(PAGE.read_text(), outcomes))
    return 0


def _text(combination: Combination) -> str:
    return f"{combination.layout}, {' and '.join(combination.names)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
