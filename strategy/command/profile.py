"""`weft profile`: measures the rates of CPU ranks of this host, and the layer times of a model."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

_OPTIONS_OF_CONFIG = ("tensor", "rows", "device")


def add_to(commands: Any) -> None:
    """Add the parser of the command's arguments."""
    profile = commands.add_parser(
        "profile",
        help="measure the rates of CPU ranks of this host, or the layer times of a model, as a cluster for weft tune",
        description=(
            "Prints the content of a cluster's file, or what can be appended to one. Takes half a minute for rates and "
            "a minute or more for layer times, in which the host should do nothing else. docs/tune.md describes both."
        ),
    )
    profile.add_argument("--devices", type=int, help="measure rates, of this number of CPU ranks")
    config_help = "measure the layer times of the Llama-like model in a configuration of weft estimate, on one rank"
    profile.add_argument("--config", metavar="FILE", help=config_help)
    layers = profile.add_argument_group("with --config")
    tensor_help = "numbers of tensor-parallel ranks, such as 1,2,4 (default: 1,2,4,8, as far as they divide the heads)"
    layers.add_argument("--tensor", metavar="SIZES", help=tensor_help)
    rows_help = "tokens of a batch, such as 512,2048 (default: one sequence, the file's batch, one for each such rank)"
    layers.add_argument("--rows", metavar="NUMBERS", help=rows_help)
    layers.add_argument("--device", choices=("cpu", "cuda"), help="cpu (default), with one thread, or cuda")
    profile.add_argument("--json", action="store_true", help="print one JSON object, not YAML")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    try:
        _check(args)
        found = [] if args.config is None else [_layers_of(args)]  # first, because it checks the configuration
        if args.devices is not None:
            found.insert(0, _host_of(args.devices))
    except (ValueError, RuntimeError, TimeoutError) as error:
        text = str(error).removeprefix("profile: ").removeprefix("estimate: ")
        print(f"weft profile: {text}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({key: value for each in found for key, value in each.to_dict().items()}, indent=2))
    else:
        print("\n".join(map(str, found)))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.devices is None and args.config is None:
        raise ValueError("got neither --devices nor --config; give a number of CPU ranks, a configuration, or both.")
    if args.config is None:
        for name in _OPTIONS_OF_CONFIG:
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} is for --config, which was not given; give it, or leave --{name} out.")
    if args.devices is not None and args.device == "cuda":
        raise ValueError(
            "--devices measures CPU ranks, and --device is cuda; leave one of the two out: the cluster's file of GPUs "
            "has 'like', such as like: h100."
        )


def _host_of(num_ranks: int) -> Any:
    return importlib.import_module("weft.strategy.tuning.profile").profile_host(num_ranks)


def _layers_of(args: argparse.Namespace) -> Any:
    options: dict[str, Any] = {} if args.device is None else {"device": args.device}
    if args.tensor is not None:
        options["tensor_sizes"] = _numbers("tensor", args.tensor)
    if args.rows is not None:
        options["rows"] = _numbers("rows", args.rows)

    def progress(text: str) -> None:
        print(f"weft profile: {text}", file=sys.stderr)

    layers = importlib.import_module("weft.strategy.tuning.layer_profile")
    return layers.profile_layers(args.config, progress=progress, **options)


def _numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"got --{name} {text!r}; give whole numbers with commas, such as 1,2,4.")
    return [int(part) for part in parts]
