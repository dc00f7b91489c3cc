"""Loading a pretrained model onto ranks: memory, bytes read and time, against reading the file and `from_pretrained`.

    python benchmarks/pretrained.py [--ranks 1 2 4 8] [--kinds tp dp] [--samples 3] [--small] [--json] [--check]

Makes a Llama of transformers in bfloat16 (1.6 GB; --small: 30 MB) in a temporary folder. Each sample starts fresh ranks
and gives, for each of them:

    counted      peak bytes of CPU tensors that weft's allocator counts (docs/memory.md), while loading
    anonymous    growth of the process's peak of anonymous resident memory (RssAnon): without pages of files
    read         bytes of tensors that are read from the file
    shard        bytes of the rank's parameters and buffers
    loading      seconds from a barrier to the end of the slowest rank in which the tensors are read: `parallelize` by
                 rules, which recognise nothing, and for dp `apply_fsdp`
    start-up     seconds of from_pretrained in `deferred_init` and of sharding with plan="auto", which verifies layers

In turn with it, `full` calls from_pretrained without deferring on every rank, and `file` reads the file by safetensors
in one process and copies every tensor. The file is in the page cache in all of them. With --check the exit status is 1
unless all bounds of docs/benchmarks/pretrained.md hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
from common import machine_facts, run_on_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from weft.strategy import Plan, deferred_init
from weft.strategy.data_parallel import apply_fsdp
from weft.strategy.deferred.files import FileTensor

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 13,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
SMALL_SIZES = {**SIZES, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 4000}
RULES = {
    "model.embed_tokens": "vocab_embedding",
    **{f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp": "column_row_mlp",
    "lm_head": "column_gather_output",
}
SLACK_BYTES, LIBRARY_BYTES = 16 << 20, 200 << 20
READ_BOUND, TIME_BOUND = 1.05, 1.3


def make_model(folder: Path, sizes: dict[str, int]) -> None:
    """Write a model with random weights, in a process of its own: it needs the memory of the full model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="100GB")


class AnonymousPeak:
    """Samples RssAnon every few milliseconds on a thread; `growth` is the peak above the value at the start."""

    def __init__(self) -> None:
        self._first = self._peak = self._now()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ends.wait(0.003):
            self._peak = max(self._peak, self._now())

    def growth(self) -> int:
        self._ends.set()
        self._thread.join()
        return max(self._peak, self._now()) - self._first

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def load_shards(path: Path, kind: str, plan: Any) -> tuple[torch.nn.Module, float]:
    """Return the sharded model, and the time at which it was built, before anything was read."""
    from transformers import AutoModelForCausalLM

    num_ranks = dist.get_world_size()
    sizes = (1, num_ranks) if kind == "tp" else (num_ranks, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data_parallel", "tensor_parallel"))
    is_fully_sharded = sizes[0] > 1
    with deferred_init():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    dist.barrier()
    start = time.perf_counter()
    weft.parallelize(model, mesh, plan, keeps_plain_on_one_rank=is_fully_sharded, keeps_deferred=is_fully_sharded)
    if is_fully_sharded:
        apply_fsdp(model, mesh["data_parallel"])
    return model, start


def load_full(path: Path, kind: str, plan: Any) -> tuple[torch.nn.Module, float]:
    from transformers import AutoModelForCausalLM

    start = time.perf_counter()
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # from_pretrained maps the file: a copy reads it, as `.to(device)` does
            parameter.data = parameter.detach().clone()
    return model, start


def measure(load: Callable[..., Any], path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the figures of all ranks; collective."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.models.llama.modeling_llama  # noqa: B018  (imports the module, which is not part of loading)
    weft.memory.track()
    dist.barrier()
    weft.memory.reset_peak()
    counted, read = weft.memory.current(), FileTensor.num_bytes_read
    anonymous = AnonymousPeak()
    dist.barrier()
    start = time.perf_counter()
    model, _ = load(path, kind, "auto")
    dist.barrier()
    start_up = time.perf_counter() - start
    tensors = [p._local_tensor if isinstance(p, DTensor) else p for p in (*model.parameters(), *model.buffers())]
    figures = {
        "counted": weft.memory.peak() - counted,
        "anonymous": anonymous.growth(),
        "read": FileTensor.num_bytes_read - read,
        "shard": sum(tensor.nbytes for tensor in tensors),
        "largest": max(tensor.nbytes for tensor in tensors),
        "start_up": start_up,
    }
    del model, tensors
    gc.collect()
    _, start = load(path, kind, Plan(RULES, verify="never"))
    dist.barrier()
    figures["loading"] = time.perf_counter() - start
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, figures)
    return gathered


def read_file(path: Path) -> float:
    """Return the seconds in which one process reads and copies all tensors of the file."""
    start = time.perf_counter()
    copies = [tensor.clone() for tensor in load_file(path / "model.safetensors").values()]
    seconds = time.perf_counter() - start
    del copies
    return seconds


def row_of(path: Path, kind: str, num_ranks: int, num_samples: int) -> dict[str, Any]:
    """Return the samples of one number of ranks, interleaved with both baselines, and the figures of the first."""
    seconds: dict[str, list[float]] = {}
    ranks: dict[str, list[dict[str, Any]]] = {}
    for _ in range(num_samples):
        seconds.setdefault("file", []).append(run_on_ranks(read_file, 1, path))
        for name, load in (("weft", load_shards), ("full", load_full)):
            figures = run_on_ranks(measure, num_ranks, load, path, kind)
            ranks.setdefault(name, figures)
            for phase in ("loading", "start_up"):
                seconds.setdefault(f"{name} {phase}", []).append(max(each[phase] for each in figures))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    row = {"kind": kind, "num_ranks": num_ranks, "seconds": seconds, "medians": medians, "ranks": ranks}
    return {**row, "misses": misses(row)}


def misses(row: dict[str, Any]) -> list[str]:
    """Return a sentence for each bound that a row does not hold."""
    sentences = []
    for rank, figures in enumerate(row["ranks"]["weft"]):
        bound = figures["shard"] + figures["largest"] + SLACK_BYTES
        for name, limit in (
            ("counted", bound),
            ("anonymous", bound + LIBRARY_BYTES),
            ("read", READ_BOUND * figures["shard"]),
        ):
            if figures[name] > limit:
                sentences.append(f"rank {rank}: {name} {figures[name] / 1e6:.1f} MB, bound {limit / 1e6:.1f} MB")
    ratio = row["medians"]["weft loading"] / row["medians"]["file"]
    if ratio > TIME_BOUND:
        sentences.append(f"loading: {ratio:.2f} of reading the file, bound {TIME_BOUND}")
    return sentences


def print_rows(rows: list[dict[str, Any]]) -> None:
    print("kind ranks  rank  counted MB  anonymous MB  read MB  shard MB | seconds: loading  of file  start-up, full")
    for row in rows:
        for rank, figures in enumerate(row["ranks"]["weft"]):
            values = (figures[name] / 1e6 for name in ("counted", "anonymous", "read", "shard"))
            text = "{:>11.1f} {:>13.1f} {:>8.1f} {:>9.1f}".format(*values)
            names = ("weft loading", "file", "weft start_up", "full start_up") if rank == 0 else ()
            times = " ".join(f"{row['medians'][name]:8.2f}" for name in names)
            print(f"{row['kind']:<4} {row['num_ranks']:>5} {rank:>5} {text} |        {times}")
        for sentence in row["misses"]:
            print(f"  bound missed: {sentence}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=["tp", "dp"], choices=["tp", "dp"])
    parser.add_argument("--samples", type=int, default=3, help="fresh sets of ranks for each row")
    parser.add_argument("--small", action="store_true", help="a model of 30 MB")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound does not hold")
    args = parser.parse_args()
    if min(args.ranks) < 1 or args.samples < 1:
        parser.error("give --ranks and --samples of 1 or more.")
    with tempfile.TemporaryDirectory(prefix="weft-pretrained-") as folder:
        path = Path(folder, "model")
        run_on_ranks(make_model, 1, path, SMALL_SIZES if args.small else SIZES)
        read_bytes = (path / "model.safetensors").stat().st_size
        rows = []
        for kind in args.kinds:
            for num_ranks in args.ranks:
                rows.append(row_of(path, kind, num_ranks, args.samples))
                print(f"{kind}, {num_ranks} ranks: done", file=sys.stderr)
    if args.json:
        report = {"benchmark": "pretrained", "machine": machine_facts(), "file_bytes": read_bytes, "results": rows}
        print(json.dumps(report, indent=2))
    else:
        print(f"a file of {read_bytes / 1e9:.2f} GB")
        print_rows(rows)
    return 1 if args.check and any(row["misses"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
