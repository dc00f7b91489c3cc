"""`python -m weft estimate --config FILE`: the memory of each rank, before anything is allocated."""

from __future__ import annotations

import argparse
import importlib
import json
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m weft", description="weft's commands")
    commands = parser.add_subparsers(dest="command", required=True)
    estimate = commands.add_parser("estimate", help="bytes per rank and phase of a training, from its configuration")
    estimate.add_argument("--config", required=True, metavar="FILE", help="a YAML file, as docs/memory.md describes it")
    estimate.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    args = parser.parse_args()

    module = importlib.import_module("weft.strategy.estimate")
    try:
        result = module.estimate_file(args.config)
    except ValueError as error:
        print(f"weft estimate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result.to_dict(), indent=2) if args.json else result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
