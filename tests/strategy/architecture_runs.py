"""Compares one forward and backward of each architecture, sharded by plan="auto", with the unsharded model.

Outcomes on one rank, from best to worst:
    equal        outputs and gradients agree to a relative TOLERANCE
    unsupported  weft itself raised an error that names a module of the model
    wrong        a tensor differs
    error        any other exception
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from strategy.attention_zoo.comparison import OUTCOMES, is_clear_error
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import weft
from support.architectures import ARCHITECTURES, Architecture
from support.parity import local_shard, tensor_parallel
from support.ranks import run_on_ranks
from weft.strategy.reports.summary import summary

WORLD_SIZE = 2
# Models whose own code rounds to float32 agree as well, because both models round the same values.
TOLERANCE = 1e-9
NEGLIGIBLE = 1e-3  # a gradient's difference is relative to its norm, or to this fraction of the norm of all gradients


@dataclass
class Run:
    """Result of an architecture on one rank.

    `sharded`: weft's summary line on the sharded modules. `share`: the rank's bytes of parameters over all bytes.
    `difference`: the largest relative difference of an output or a gradient; the norms are those of the rank's shards.
    """

    name: str
    result: str = "equal"
    sharded: str = ""
    share: float = 1.0
    difference: float = 0.0
    details: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name}: {self.result}: {'; '.join(self.details) or 'no details'}"


def all_runs() -> list[Run]:
    """Run each architecture on 2 warm ranks; return rank 0's runs, with the worse result and difference of the two."""
    ranks = run_on_ranks(WORLD_SIZE, run_on_rank, timeout=280)
    return [_merged(runs) for runs in zip(*ranks, strict=True)]


def _merged(runs: Iterable[Run]) -> Run:
    first, *others = runs
    for other in others:
        first.difference = max(first.difference, other.difference)
        if OUTCOMES.index(other.result) > OUTCOMES.index(first.result):
            first.result, first.details = other.result, other.details
    return first


def run_on_rank(world_size: int) -> list[Run]:
    """Run each architecture on this rank. Print its name first, to show the architecture at which a rank hangs."""
    mesh = tensor_parallel(world_size)
    runs = []
    for architecture in ARCHITECTURES:
        print(architecture.name, flush=True)
        runs.append(run(architecture, mesh))
        gc.collect()
    return runs


def run(architecture: Architecture, mesh: DeviceMesh, plan: Any = "auto") -> Run:
    """Compare the sharded with the unsharded model on this rank.

    Continue after a difference, because another rank may find none and would hang in the next collective.
    """
    result = Run(architecture.name)
    reference = architecture.build()
    names = {name for name, _ in reference.named_modules() if name}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = weft.parallelize(copy.deepcopy(reference), mesh, plan)
            result.sharded = next((line for line in summary(model) if line.startswith("sharded: ")), "")
            result.share = _share(model, reference)
            ours, theirs = (_outputs_after_backward(each, architecture.batch()) for each in (model, reference))
        compare_outputs(ours, theirs, result)
        compare_gradients(model, reference, result)
    except Exception as error:
        result.result = "unsupported" if is_clear_error(error, names) else "error"
        result.details.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return result


def _share(model: nn.Module, reference: nn.Module) -> float:
    local_bytes = sum(_local(parameter).nbytes for parameter in model.parameters())
    return local_bytes / sum(parameter.nbytes for parameter in reference.parameters())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _outputs_after_backward(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """Return the floating-point outputs, weighted at random in the loss: a norm's output has a constant square sum."""
    outputs = model(**batch)
    values = [outputs] if isinstance(outputs, Tensor) else list(outputs.values())
    floats = [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(each.shape, dtype=each.dtype, generator=generator) for each in floats]
    sum((each * weight).sum() for each, weight in zip(floats, weights, strict=True)).backward()
    return floats


def compare_outputs(ours: list[Tensor], theirs: list[Tensor], run: Run) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        _compare_tensor(f"output {index}", a, b, b.norm().item(), run)


def compare_gradients(model: nn.Module, reference: nn.Module, run: Run) -> None:
    theirs = dict(reference.named_parameters())
    grads = [parameter.grad for parameter in theirs.values() if parameter.grad is not None]
    total = torch.stack([grad.norm() for grad in grads]).norm().item()
    ours = dict(model.named_parameters())
    if ours.keys() != theirs.keys():
        _record_wrong(f"parameters differ: {sorted(ours.keys() ^ theirs.keys())}", run)
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].grad, theirs[name].grad
        if a is None or b is None:
            if a is not b:
                _record_wrong(f"{name} has {'no' if a is None else 'a'} gradient", run)
            continue
        scale = max(b.norm().item(), NEGLIGIBLE * total)
        if isinstance(a, DTensor):
            b = local_shard(b, a)
        _compare_tensor(f"gradient of {name}", _local(a), b, scale, run)


def _compare_tensor(name: str, ours: Tensor, theirs: Tensor, scale: float, run: Run) -> None:
    if ours.shape != theirs.shape:
        _record_wrong(f"{name} has the shape {tuple(ours.shape)}, not {tuple(theirs.shape)}", run)
        return
    difference = (ours.detach() - theirs.detach()).norm().item() / scale
    run.difference = max(run.difference, difference)
    if not difference <= TOLERANCE:
        _record_wrong(f"{name} differs by {difference:.1e}", run)


def _record_wrong(detail: str, run: Run) -> None:
    run.result = "wrong"
    run.details.append(detail)
