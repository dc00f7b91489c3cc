"""The command `weft`: `weft estimate` predicts memory, `weft tune` finds layouts, `weft profile` measures rates and
layer times for it, `weft doctor` examines this host, `weft compare` compares sharded with unsharded training, `weft
convert` writes the model of a checkpoint in the layout of Hugging Face, `weft verify` compares the checksums of a
checkpoint, `weft inspect` prints its content, `weft flight` compares the ranks' records of a failed run, and `weft
report` writes the page of a run's report.

The command is in a separate package because importing `weft` loads torch and the operators, unless `needs_operators`
is False here. `weft estimate` and `weft tune` set it to False: models that the C++ memory model supports need neither.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from weft_command import profile
from weft_command.examples import EXAMPLES

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
needs_operators = True  # whether importing `weft` loads torch and the operators


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog="weft", description="Predict memory, compare training, convert checkpoints")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_estimate(commands)
    _add_tune(commands)
    profile.add_to(commands)
    _add_doctor(commands)
    _add_compare(commands)
    _add_convert(commands)
    _add_verify_and_inspect(commands)
    _add_flight(commands)
    _add_report(commands)
    for name, command in commands.choices.items():
        command.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the lines of the examples
        command.description = textwrap.fill(command.description or "", 100)
        command.epilog = "\n".join(["examples:", *(f"  {example}" for example in EXAMPLES[name])])
    return parser


def main() -> int:
    args = make_parser().parse_args()
    runs = {
        "estimate": _estimate,
        "tune": _tune,
        "profile": profile.run,
        "doctor": _doctor,
        "compare": _compare,
        "convert": _convert,
        "verify": _verify,
        "inspect": _inspect,
        "flight": _flight,
        "report": _report,
    }
    run = runs[args.command]
    return run(args)


def _add_estimate(commands: Any) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="predict the bytes per rank in each phase of training, from a configuration or by a dry run of a module",
        description="docs/estimate_memory.md describes both ways.",
    )
    name = "PACKAGE.MODULE:NAME"
    source = estimate.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE", help="a YAML file that describes the training")
    source.add_argument("--module", metavar=name, help="a model, or a function that builds one, for a dry run")
    layout_help = "such as dp2,tp2 (with --module tp1 by default); replaces the file's mesh or layout"
    estimate.add_argument("--layout", metavar="SIZES", help=layout_help)
    estimate.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    dry_run = estimate.add_argument_group("with --module")
    _add_dry_run(dry_run, "the batch of a data-parallel rank, or a function that makes it")
    batches_help = "batches whose gradients a step accumulates (default 1)"
    dry_run.add_argument("--accumulate-grad-batches", type=int, metavar="N", help=batches_help)
    _add_pipeline(dry_run, "by default twice the number of pipeline ranks")
    dry_run.add_argument("--rank", type=int, help="the global rank (default 0; in a pipeline, one of each position)")


def _add_pipeline(dry_run: Any, micro_batches_help: str) -> None:
    dry_run.add_argument("--pipeline-cuts", help="auto (default), or the first modules of all stages but the first")
    dry_run.add_argument("--pipeline-schedule", help="1f1b (default), gpipe, interleaved, zero_bubble, zbv, ...")
    dry_run.add_argument("--num-micro-batches", type=int, help=micro_batches_help)
    dry_run.add_argument("--pipeline-module", help="the submodule of a LightningModule to divide into stages")


def _add_dry_run(dry_run: Any, batch_help: str) -> None:
    name = "PACKAGE.MODULE:NAME"
    dry_run.add_argument("--batch", metavar=name, help=batch_help)
    dry_run.add_argument("--loss", dest="loss_fn", metavar=name, help="a function (module, batch) -> loss")
    dry_run.add_argument("--plan", help="auto (default), huggingface, a file, rules as YAML, or a function's name")
    dry_run.add_argument("--precision", help="32-true (default), bf16-mixed, bf16-true or 16-true")
    dry_run.add_argument("--optimizer", help=f"a class of torch.optim, or {name} of a function module -> optimizer")
    dry_run.add_argument("--optimizer-state", help="float32 (default), bfloat16 or int8")
    dry_run.add_argument("--master-weights", help="float32 (default), split or split8")
    dry_run.add_argument("--optimizer-in-backward", nargs="?", const=True, choices=("rows",), help="without value: all")
    dry_run.add_argument("--activation-checkpointing", help="none (default), selective, full, full:8, ...")
    dry_run.add_argument("--sequence-parallel", action="store_true", default=None)
    dry_run.add_argument("--context-attention", help="ring (default), ulysses or ring_ulysses, with cp")
    dry_run.add_argument("--zero-stage", type=int, help="0, 1, 2 or 3 (the default)")


_OPTIONS_OF_DRY_RUN = (
    "batch",
    "loss_fn",
    "plan",
    "precision",
    "optimizer",
    "optimizer_state",
    "master_weights",
    "optimizer_in_backward",
    "activation_checkpointing",
    "sequence_parallel",
    "context_attention",
    "zero_stage",
    "pipeline_cuts",
    "pipeline_schedule",
    "num_micro_batches",
    "pipeline_module",
)
_OPTIONS_OF_ESTIMATE = (*_OPTIONS_OF_DRY_RUN, "accumulate_grad_batches", "rank")


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _check_no_options_of_module(options: dict[str, Any]) -> None:
    if options:
        first = next(iter(options)).replace("_", "-").removesuffix("-fn")
        raise ValueError(f"--{first} is for --module, and --config was given; write it into the file.")


def _estimate(args: argparse.Namespace) -> int:
    global needs_operators  # noqa: PLW0603
    options = _given(args, _OPTIONS_OF_ESTIMATE)
    try:
        if args.module is not None:
            _add_current_folder_to_path()
            dry_run = importlib.import_module("weft.strategy.dry_run")
            result = dry_run.estimate_module(args.module, args.layout or "tp1", **options)
        else:
            _check_no_options_of_module(options)
            needs_operators = False
            result = importlib.import_module("weft.strategy.estimate").estimate_file(args.config, layout=args.layout)
    except (ValueError, RuntimeError) as error:
        print(f"weft estimate: {str(error).removeprefix('estimate: ')}", file=sys.stderr)
        return 2
    print(json.dumps(result.to_dict(), indent=2) if args.json else result)
    return 0


class _Progress:
    """Prints sentences to stderr, the first one and then at most one in some seconds."""

    _SECONDS = 5

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._printed_at = -math.inf

    def __call__(self, sentence: str) -> None:
        if time.monotonic() - self._printed_at >= self._SECONDS:
            self._printed_at = time.monotonic()
            print(f"{self._prefix}{sentence}", file=sys.stderr)


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="find the layouts with the shortest predicted steps that fit into the memory of a device",
        description="docs/tune.md describes the search. Exit status: 0, 1 if no layout fits, or 2 for invalid input.",
    )
    config_help = "a YAML file that describes the training, as for weft estimate; a layout in it does not matter"
    source = tune.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE", help=config_help)
    module_help = "a model, or a function that builds one: each layout is a dry run"
    source.add_argument("--module", metavar="PACKAGE.MODULE:NAME", help=module_help)
    tune.add_argument("--devices", type=int, required=True, help="the number of devices of all hosts")
    cluster_help = "a100, h100 (default), h200, b200, cpu, or a YAML file with rates"
    tune.add_argument("--cluster", default="h100", metavar="NAME", help=cluster_help)
    memory_help = "the most bytes of a device, such as 72GB; by default 90 %% of a GPU's memory, or a CPU rank's share"
    tune.add_argument("--memory", help=memory_help)
    batch_help = "sequences (or rows) of a step over all ranks; by default those of the batch for each device"
    tune.add_argument("--global-batch", type=int, metavar="SEQUENCES", help=batch_help)
    fix_help = "sizes that are not chosen: pp, rep, dp, tp, zero, accumulate; pp=1 leaves pipelines out"
    tune.add_argument("--fix", default="", metavar="SIZES", help=fix_help)
    tune.add_argument("--top", type=int, default=5, metavar="N", help="layouts to print (default 5)")
    draw_help = "with --config: draw the layouts that no other beats in both time and memory; needs matplotlib"
    tune.add_argument("--draw", metavar="SVG", help=draw_help)
    tune.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")
    batch_help = "the batch of a rank if all ranks are data-parallel, or a function that makes it"
    dry_run = tune.add_argument_group("with --module")
    _add_dry_run(dry_run, batch_help)
    _add_pipeline(dry_run, "by default chosen from multiples of the pipeline's ranks")


def _tune(args: argparse.Namespace) -> int:
    global needs_operators  # noqa: PLW0603
    search = {"cluster": args.cluster, "memory": args.memory, "fixed": args.fix, "max_results": args.top}
    options = _given(args, _OPTIONS_OF_DRY_RUN)
    try:
        if args.module is not None:
            if args.draw is not None:
                raise ValueError("--draw is for --config, and --module was given; leave one of the two out.")
            _add_current_folder_to_path()
            tune = importlib.import_module("weft.strategy.tuning.modules").tune_module
            options |= {"global_rows": args.global_batch, "report": _Progress("weft tune: ")}
            result = tune(args.module, args.devices, **search, **options)
        else:
            _check_no_options_of_module(options)
            needs_operators = False
            tune = importlib.import_module("weft.strategy.tuning").tune_file
            search |= {"global_sequences": args.global_batch, "finds_front": args.draw is not None}
            result = tune(args.config, args.devices, **search)
    except (ValueError, RuntimeError) as error:
        text = str(error).removeprefix("tune: ").removeprefix("estimate: ")
        print(f"weft tune: {text}", file=sys.stderr)
        return 2
    print(json.dumps(result.to_dict(), indent=2) if args.json else result)
    if args.draw is not None:
        try:
            importlib.import_module("weft.strategy.tuning").draw_front(result, args.draw)
        except (ModuleNotFoundError, OSError) as error:
            print(f"weft tune: {str(error).removeprefix('tune: ')}", file=sys.stderr)
            return 2
        print(f"drawn: {args.draw}", file=sys.stderr)
    return 0 if result.layouts else 1


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="print versions, devices, limits and measured links of this host, and what to do about problems",
        description="Exit status: 0, or 1 if there is a problem. Measuring takes half a minute.",
    )
    doctor.add_argument("--quick", action="store_true", help="measure nothing")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")


def _doctor(args: argparse.Namespace) -> int:
    found = importlib.import_module("weft.strategy.doctor").examine(measures=not args.quick)
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 1 if found.problems else 0


def _add_current_folder_to_path() -> None:
    # The user's modules are in the current folder. `python -m` adds it to the path; a script adds only its own folder.
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="train a model for a few steps sharded and unsharded, and print where the results differ",
        description="Exit status: 0 if the results agree, 1 if they differ, 2 if they could not be compared.",
    )
    name = "PACKAGE.MODULE:NAME"
    compare.add_argument("--module", required=True, metavar=name, help="a model, or a function that builds one")
    compare.add_argument("--batch", metavar=name, help="a batch, or a function that makes one")
    compare.add_argument("--loss", metavar=name, help="a function (module, batch) -> loss")
    compare.add_argument("--layout", default="tp2", help="such as tp2 (default), dp2 or dp2,tp2")
    plan_help = "auto (default), huggingface, a file, rules as YAML, or the dotted name of a function"
    compare.add_argument("--plan", default="auto", help=plan_help)
    compare.add_argument("--steps", type=int, default=3, help="number of training steps (default 3)")
    compare.add_argument("--learning-rate", type=float, default=0.01, help="of SGD (default 0.01)")
    compare.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"), default="float64")
    compare.add_argument(
        "--tolerance", type=float, help="largest relative difference that counts as agreement; default: by dtype"
    )
    compare.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), default=3)
    compare.add_argument("--sequence-parallel", action="store_true")
    compare.add_argument("--first-layers", type=int, metavar="K", help="keep K blocks of each list of repeated blocks")
    compare.add_argument("--mode", choices=("train", "eval"), default="train", help="eval: without dropout")
    compare.add_argument("--seed", type=int, default=0)
    compare.add_argument("--timeout", type=float, default=600.0, help="of the comparison, in seconds (default 600)")
    compare.add_argument("--json", action="store_true", help="print one JSON object")


def _compare(args: argparse.Namespace) -> int:
    _add_current_folder_to_path()
    strategy = importlib.import_module("weft.strategy")
    names = ("batch", "layout", "plan", "steps", "learning_rate", "tolerance", "zero_stage", "sequence_parallel")
    options = {name: getattr(args, name) for name in (*names, "first_layers", "mode", "seed", "timeout")}
    dtype = getattr(importlib.import_module("torch"), args.dtype)
    try:
        result = strategy.compare(args.module, loss_fn=args.loss, dtype=dtype, **options)
    except (ValueError, RuntimeError, TimeoutError) as error:
        print(f"weft compare: {str(error).removeprefix('compare: ')}", file=sys.stderr)
        return 2
    print(json.dumps(result.to_dict(), indent=2) if args.json else result)
    return 0 if result.agrees else 1


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert", help="write the model of a training checkpoint in the layout of Hugging Face"
    )
    convert.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory or file of a Trainer; also its URL")
    convert.add_argument("directory", metavar="DIRECTORY", help="the directory to write, which must not exist")
    convert.add_argument("--base", metavar="FOLDER", help="the pretrained directory from which training started")
    convert.add_argument("--module", metavar="NAME", help="the module in the LightningModule that is written")
    convert.add_argument("--dtype", choices=sorted(_DTYPES), help="of the written floating-point tensors")
    convert.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default 5GB)")


def _convert(args: argparse.Namespace) -> int:
    strategy = importlib.import_module("weft.strategy")
    dtype = None if args.dtype is None else getattr(importlib.import_module("torch"), _DTYPES[args.dtype])
    options = {"base": args.base, "module": args.module, "dtype": dtype, "max_shard_size": args.max_shard_size}
    try:
        strategy.convert(args.checkpoint, args.directory, **options)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        text = str(error).removeprefix("convert ").removeprefix("save_pretrained ")
        print(f"weft convert: {text}", file=sys.stderr)
        return 2
    return 0


def _add_verify_and_inspect(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="compare all checksums of a checkpoint directory",
        description=(
            "Exit status: 0 if all agree, 1 if a file is damaged, missing or unreadable, 2 if the directory has no "
            "manifest.json, such as one of weft 0.1 or Lightning."
        ),
    )
    inspect = commands.add_parser(
        "inspect",
        help="print the mesh, the plan and the tensors of a checkpoint directory; with --json also its files",
        description="Exit status: 0, or 2 if the manifest is missing or cannot be used.",
    )
    for command in (verify, inspect):
        command.add_argument("directory", metavar="DIRECTORY", help="a checkpoint of a Trainer or Fabric; also its URL")
    inspect.add_argument("--json", action="store_true", help="print one JSON object, with sizes in bytes")


def _verify(args: argparse.Namespace) -> int:
    checkpoint = importlib.import_module("weft.strategy.checkpoint")
    try:
        problems = checkpoint.verify(args.directory)
    except (FileNotFoundError, ImportError) as error:
        print(f"weft verify: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        problems = [str(error)]
    for problem in problems:
        print(f"weft verify: {problem}", file=sys.stderr)
    if not problems:
        contents = checkpoint.inspect(args.directory)
        total = sum(size for _, size in contents.files)
        print(f"{args.directory}: all {len(contents.files)} files agree with their checksums ({total:,} bytes)")
    return 1 if problems else 0


def _inspect(args: argparse.Namespace) -> int:
    checkpoint = importlib.import_module("weft.strategy.checkpoint")
    try:
        contents = checkpoint.inspect(args.directory)
    except (OSError, ValueError, ImportError) as error:
        print(f"weft inspect: {error}", file=sys.stderr)
        return 2
    print(json.dumps(contents.to_dict(), indent=2) if args.json else contents)
    return 0


def _add_flight(commands: Any) -> None:
    flight = commands.add_parser(
        "flight",
        help="compare the flight records of a failed run, print the ranks that are missing in a call, draw the calls",
        description="Exit status: 0, or 2 if there are no records or a record cannot be read.",
    )
    flight.add_argument("directory", metavar="DIRECTORY", help="the record_dir of HealthMonitor")
    flight.add_argument("--svg", metavar="FILE", help="the drawing (default DIRECTORY/flight.svg)")


def _flight(args: argparse.Namespace) -> int:
    module = importlib.import_module("weft.flight_report")
    path = Path(args.directory, "flight.svg") if args.svg is None else Path(args.svg)
    try:
        print(module.report(args.directory))
        module.draw(args.directory, path)
    except (OSError, ValueError) as error:
        print(f"weft flight: {error}", file=sys.stderr)
        return 2
    print(f"drawn: {path}")
    return 0


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write the HTML page of a run from the data that the callback Report has written",
        description="Exit status: 0, or 2 if the directory has no report or it cannot be read.",
    )
    report.add_argument("directory", metavar="RUN_DIR", help="the dirpath of Report")
    report.add_argument("--output", metavar="FILE", help="the page (default RUN_DIR/weft_report.html)")


def _report(args: argparse.Namespace) -> int:
    run_data = importlib.import_module("weft.strategy.reports.run_data")
    directory = Path(args.directory)
    output = None if args.output is None else Path(args.output)
    try:
        path = run_data.write_page(directory, run_data.read(directory), output)
    except (OSError, ValueError) as error:
        print(f"weft report: {error}", file=sys.stderr)
        return 2
    print(f"written: {path}")
    return 0
