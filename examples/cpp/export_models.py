"""Saves the models that the C++ programs run, a feed-forward and a language model, and prints their results.

    python examples/cpp/export_models.py FOLDER [--ranks 2] [--compiled]

Every rank saves `mlp.rank<r>.pt` and `language_model.rank<r>.pt` (TorchScript) and, with `--compiled`,
`language_model.rank<r>.pt2` (torch.export, compiled by AOTInductor). Each rank prints the same results as the programs.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft

sys.path.insert(0, str(Path(__file__).parents[1]))
from model import FeedForward, ModelArgs, Transformer

SIZES = ModelArgs(dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=64, max_seq_len=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weft-export-") as scratch:
        mp.spawn(run_rank, (args.ranks, args.folder, args.compiled, scratch), args.ranks)


def run_rank(rank: int, num_ranks: int, folder: Path, is_compiled: bool, scratch: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:weft",
        init_method=f"file://{scratch}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(minutes=5),  # ranks finish compiling at different times
    )
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tensor_parallel",))
    torch.manual_seed(0)  # every rank builds the same full models, and keeps its shards
    mlp = weft.parallelize(nn.Sequential(FeedForward(8, 20), nn.LayerNorm(8)), mesh, "auto")
    model = weft.parallelize(Transformer(SIZES), mesh, "auto")
    with torch.no_grad():
        x = mlp_input()
        print_numbers(rank, "mlp", mlp(x))
        tokens = prompt()
        print_numbers(rank, "logits", model(tokens)[0, -1])
        print_numbers(rank, "continuation", continuation(model, tokens))
        for name, module in (("mlp", mlp), ("language_model", model)):
            torch.jit.script(weft.export_local(module)).save(str(folder / f"{name}.rank{rank}.pt"))
        if is_compiled:
            compile_package(weft.export_local(model), tokens, mesh, folder / f"language_model.rank{rank}.pt2")
    dist.destroy_process_group()


def compile_package(model: nn.Module, tokens: Tensor, mesh: DeviceMesh, path: Path) -> None:
    """Save the model, compiled for inputs shaped like `tokens`, with the name of its process group as metadata."""
    program = torch.export.export(model, (tokens,))
    options = {"aot_inductor.metadata": {"weft_group": mesh.get_group().group_name}}
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def mlp_input() -> Tensor:
    return torch.linspace(-1, 1, 2 * 8).view(2, 8)


def prompt() -> Tensor:
    return (torch.arange(12) * 37 % SIZES.vocab_size).view(1, 12)


def continuation(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return eight greedily decoded tokens after `tokens`."""
    for _ in range(8):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens[0, -8:]


def print_numbers(rank: int, name: str, numbers: Tensor) -> None:
    line = f"rank {rank} {name}: " + " ".join(f"{number:.9g}" for number in numbers.flatten().tolist())
    # The ranks share a terminal: one write keeps the line together, while print may write its newline separately.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
