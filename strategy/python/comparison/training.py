"""Runs the steps of the sharded and the unsharded model on every rank of a process group."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from weft.collectives import CollectiveError
from weft.strategy.comparison import subject
from weft.strategy.comparison.outputs import Outputs, relative_difference, running_modules
from weft.strategy.comparison.result import Comparison, OutputDifference, ParameterDifference, StepLoss
from weft.strategy.comparison.sharded import JobMesh, ShardedTraining, gradients_of, unsharded_value
from weft.strategy.modules.sharded_errors import ShardedModuleError
from weft.strategy.pipeline.micro_batches import batch_size_of, map_tensors, split_batch
from weft.strategy.plan import Plan
from weft.strategy.planning.layout import Sizes
from weft.strategy.reports.report_table import report
from weft.strategy.sharding.gradients import check_replicated_gradients
from weft.strategy.sharding.state import original_class

if TYPE_CHECKING:
    from weft.strategy.comparison.entry import Request

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_GRACE_SECONDS = 5.0  # for the other ranks to raise as well, before their collectives are aborted
# Differences are relative to at least this fraction of the norm of all gradients (or weights): a gradient with a
# smaller norm may be only rounding, such as that of the key bias of an attention.
_FLOOR = 1e-3


def train_both(request: Request) -> Comparison:
    """Train sharded and unsharded, and compare; collective over the default process group.

    Raises:
        ValueError: arguments do not fit together, or the plan does not fit the model.
        Exception: any error of the unsharded model, unchanged.
    """
    sizes = Sizes.parse(request.layout).resolve(dist.get_world_size(), dist.get_world_size())
    source = subject.resolve(request.module)
    device = next(source.parameters()).device if isinstance(source, nn.Module) else torch.device("cpu")
    job = JobMesh(sizes, device.type)
    with _preserving_globals(device):
        torch.set_default_dtype(request.dtype)  # of tensors that forwards create, such as masks
        result = _ComparisonRun(request, job, device, request.mode).run()
        if request.mode == "train" and result.draws_random_numbers and not result.agrees and not result.failure:
            in_eval_mode = _ComparisonRun(request, job, device, "eval").run()
            result = Comparison(**{**result.__dict__, "in_eval_mode": in_eval_mode})
    return result


@contextlib.contextmanager
def _preserving_globals(device: torch.device) -> Iterator[None]:
    dtype, state = torch.get_default_dtype(), random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(state)
        torch.set_default_dtype(dtype)


class _Failure(NamedTuple):
    """The error of the sharded model on a rank.

    is_consequence: whether the error is a CollectiveError, which the error of another rank may have caused.
    module: the name of the module whose forward raised the error; "": the model, or the backward.
    text: the message; "": no error.
    """

    is_consequence: bool = False
    module: str = ""
    text: str = ""


class _ComparisonRun:
    """Runs one comparison. Every rank also trains the unsharded model, the reference, on all ranks' batches."""

    def __init__(self, request: Request, job: JobMesh, device: torch.device, mode: str) -> None:
        self._request, self._job, self._device = request, job, device
        self._mode = mode
        self._num_data_ranks, self._data_rank = job.data_group.size(), job.data_group.rank()
        self._reference = self._build()
        self._names = [name for name, p in self._reference.named_parameters() if p.requires_grad]
        self._rank_batches, is_for_forward = self._make_rank_batches()
        self._loss_fn, self._loss_name = subject.loss_of(self._reference, request.loss_fn, is_for_forward)
        self._sharded = ShardedTraining(
            copy.deepcopy(self._reference),
            job,
            Plan(request.plan, sequence_parallel=request.sequence_parallel),
            request.zero_stage,
            request.learning_rate,
            subject.entry_points_of(self._loss_fn),
        )
        self._optimizer = torch.optim.SGD(self._reference.parameters(), lr=request.learning_rate)
        self._computed_dtypes = _ComputedDtypes()
        self._draws_random_numbers = False
        self._outputs = Outputs(job.tensor_group.rank(), job.tensor_group.size())

    def _build(self) -> nn.Module:
        request = self._request
        model = subject.build_model(request.module, request.dtype, request.first_layers, request.seed)
        model.to(self._device).train(self._mode == "train")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):  # the seed may not determine their values
                value = tensor.contiguous()
                dist.broadcast(value, 0)
                tensor.copy_(value)
        return model

    def _make_rank_batches(self) -> tuple[list[Any], bool]:
        """Return (the batches of all data-parallel ranks, equal on every rank; the second result of `batch_of`)."""
        local_batch, is_for_forward = subject.batch_of(self._reference, self._request.batch, self._num_data_ranks)
        objects = [local_batch]
        dist.broadcast_object_list(objects, 0)
        dtype = self._request.dtype
        batch = map_tensors(
            lambda t: t.to(self._device, dtype if t.is_floating_point() else None),
            objects[0],
        )
        if self._num_data_ranks == 1:
            return [batch], is_for_forward
        num_samples = batch_size_of(batch)
        if num_samples % self._num_data_ranks != 0:
            raise ValueError(
                f"compare: the batch of {num_samples} samples does not divide by the {self._num_data_ranks} "
                f"data-parallel ranks of the layout '{self._request.layout}'; pass a batch that does."
            )
        return split_batch(batch, self._num_data_ranks), is_for_forward

    def run(self) -> Comparison:
        losses: list[StepLoss] = []
        largest: Tensor | None = None
        replicated_note = failure = failing_module = ""
        for step in range(self._request.steps):
            reference_losses = self._unsharded_losses(step)
            loss, failing_module, failure = self._sharded_loss(step)
            if failure:
                break
            if step == 0:
                replicated_note = self._replicated_note()
            differences = self._step_and_compare()
            largest = differences if largest is None else torch.maximum(largest, differences)
            losses.append(self._step_loss(step, loss, reference_losses))
        return self._result(losses, largest, replicated_note, failing_module, failure)

    def _seed(self, step: int, data_rank: int) -> None:
        seed = self._request.seed + 1 + step * self._num_data_ranks + data_rank
        torch.manual_seed(seed)
        random.seed(seed)

    def _unsharded_losses(self, step: int) -> list[Tensor]:
        """Return the unsharded model's loss on each data-parallel rank's batch; compute gradients of their mean."""
        self._optimizer.zero_grad()
        losses = []
        for data_rank, batch in enumerate(self._rank_batches):
            self._seed(step, data_rank)
            before = torch.get_rng_state()
            is_recorded = step == 0 and data_rank == self._data_rank
            with self._outputs.record_reference(self._reference) if is_recorded else contextlib.nullcontext():
                with self._computed_dtypes if is_recorded else contextlib.nullcontext():
                    loss = self._loss_fn(self._reference, batch)
            self._draws_random_numbers = self._draws_random_numbers or not torch.equal(before, torch.get_rng_state())
            (loss / self._num_data_ranks).backward()
            losses.append(loss.detach())
        if step == 0:
            self._outputs.tolerance = self._tolerance()[0]
        return losses

    def _sharded_loss(self, step: int) -> tuple[Tensor, str, str]:
        """Return this rank's loss, and `module` and `text` of one failure among all ranks ("": none); collective."""
        self._sharded.zero_grad()
        self._seed(step, self._data_rank)
        loss, failure, is_forward = torch.zeros(()), _Failure(), True
        running: list[str] = []
        comparing = self._outputs.compare(self._sharded.model) if step == 0 else contextlib.nullcontext()
        try:
            with running_modules(self._sharded.model) as running, comparing:
                loss = self._loss_fn(self._sharded.model, self._rank_batches[self._data_rank])
            is_forward = False
            self._sharded.backward(loss)
        except Exception as raised:  # an error of the sharded model is a result
            # A ShardedModuleError describes the shards; the error of the user's code is more specific here.
            error = raised.__cause__ if isinstance(raised, ShardedModuleError) and raised.__cause__ else raised
            module_name = running[-1] if running and is_forward else ""
            owner = original_class(self._sharded.model.get_submodule(module_name)).__name__
            shown = (
                f"the forward of '{module_name}' ({owner})"
                if module_name
                else "its forward"
                if is_forward
                else "its backward"
            )
            failure = _Failure(
                isinstance(error, CollectiveError),
                module_name,
                f"the sharded model raises {type(error).__name__} in {shown}{_raised_at(error)}: {error}",
            )
        self._wait_for_ranks(bool(failure.text))
        failures = [each for each in self._all_gather(failure) if each.text]
        failure = min(failures, key=lambda each: each.is_consequence, default=failure)
        return loss.detach(), failure.module, failure.text

    def _wait_for_ranks(self, has_failed: bool) -> None:
        """Wait for all ranks.

        If this rank has failed and other ranks do not arrive, they may wait for it in a collective of the model: this
        rank aborts the model's groups.
        """
        arrived = dist.barrier(group=self._job.control_group, async_op=True)
        deadline = time.monotonic() + _GRACE_SECONDS
        while has_failed and not arrived.is_completed():
            if time.monotonic() > deadline:
                self._job.abort()
                break
            time.sleep(0.02)
        arrived.wait()

    def _all_gather(self, value: Any) -> list[Any]:
        """Return each rank's value, in the order of the ranks; collective."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._job.control_group)
        return values

    def _replicated_note(self) -> str:
        """Return a sentence on replicated parameters whose gradients differ between ranks; "": no gradients differ."""
        try:
            check_replicated_gradients(self._sharded.model, data_group=self._job.gradient_group)
        except ValueError as error:
            return str(error)
        return ""

    def _step_and_compare(self) -> Tensor:
        """Step both sides; return the differences of gradients and of stepped weights; collective.

        The result is `[2, num_parameters]`, with the largest differences over the ranks.
        """
        reference = dict(self._reference.named_parameters())
        named = [(name, reference[name], reference[name].grad) for name in self._names]
        gradients = {name: torch.zeros_like(p) if grad is None else grad for name, p, grad in named}
        gradient_differences = _relative_differences(gradients_of(self._sharded.model), gradients)
        self._sharded.step()
        self._optimizer.step()
        sharded = {name: unsharded_value(p) for name, p in self._sharded.model.named_parameters() if p.requires_grad}
        weights = {name: reference[name].detach() for name in self._names}
        weight_differences = _relative_differences(sharded, weights)
        result = torch.tensor([gradient_differences, weight_differences], dtype=torch.float64, device=self._device)
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return result

    def _step_loss(self, step: int, loss: Tensor, reference_losses: list[Tensor]) -> StepLoss:
        differences, losses = zip(
            *self._all_gather((relative_difference(loss, reference_losses[self._data_rank]), loss.item())), strict=True
        )
        unsharded = sum(each.item() for each in reference_losses) / len(reference_losses)
        return StepLoss(step + 1, sum(losses) / len(losses), unsharded, max(differences))

    def _tolerance(self) -> tuple[float, str]:
        """Return the tolerance, and a text with the reason if the tolerance is larger than the dtype's, else ""."""
        request = self._request
        if request.tolerance is not None:
            return request.tolerance, ""
        coarsest = max((request.dtype, *self._computed_dtypes.collected), key=lambda dtype: TOLERANCES.get(dtype, 0.0))
        dtype_tolerance = TOLERANCES[request.dtype]
        is_coarser = TOLERANCES[coarsest] > dtype_tolerance
        note = f", because the forward computes partly in {_dtype_name(coarsest)}" if is_coarser else ""
        return TOLERANCES[coarsest], note

    def _result(
        self, losses: list[StepLoss], largest: Tensor | None, replicated_note: str, failing_module: str, failure: str
    ) -> Comparison:
        rows = {row.parameter: row for row in report(self._sharded.model).rows}
        values = [(None, None)] * len(self._names) if largest is None else largest.t().tolist()
        parameters = [
            ParameterDifference(name, rows[name].style, rows[name].rule, rows[name].note, rows[name].axes, *pair)
            for name, pair in zip(self._names, values, strict=True)
        ]
        prefix = f"{failing_module}." if failing_module else ""
        is_inside = {row.parameter: bool(failure) and row.parameter.startswith(prefix) for row in parameters}
        parameters.sort(key=lambda row: (not is_inside[row.parameter], -row.largest))
        firsts = [first for first in self._all_gather(self._outputs.first) if first is not None]
        tolerance, tolerance_note = self._tolerance()
        result = Comparison(
            self._setting(),
            tolerance,
            tolerance_note,
            tuple(losses),
            tuple(parameters),
            _earliest_difference(firsts),
            failure,
            self._draws_random_numbers,
            report(self._sharded.model).notes,
        )
        if replicated_note and not result.agrees:
            result = Comparison(**{**result.__dict__, "notes": (*result.notes, replicated_note)})
        return result

    def _setting(self) -> str:
        request = self._request
        stage = f", zero_stage {request.zero_stage}" if self._num_data_ranks > 1 else ""
        layers = "" if request.first_layers is None else f", the first {request.first_layers} of its repeated blocks"
        return (
            f"{type(self._reference).__name__}{layers}: layout {request.layout}{stage}, plan "
            f"{Plan(request.plan).preset or 'of rules'}, against one rank; SGD with learning rate "
            f"{request.learning_rate:g} in {_dtype_name(request.dtype)}, {self._mode} mode; loss: {self._loss_name}"
        )


def _raised_at(error: BaseException) -> str:
    """Return " at file:line" for the innermost frame of an error outside of torch and weft; "": there is none."""
    packages = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, weft, weft.strategy))
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame for frame in reversed(frames) if not frame.filename.startswith(packages)), None)
    return "" if line is None else f" at {os.path.basename(line.filename)}:{line.lineno}"


class _ComputedDtypes(TorchDispatchMode):
    """Inside, collects the floating dtypes of operators' results that have more than one element."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collected: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.collected |= {tensor.dtype for tensor in tensors if tensor.dtype in TOLERANCES and tensor.numel() > 1}
        return result


def _relative_differences(values: dict[str, Tensor], references: dict[str, Tensor]) -> list[float]:
    total = sum(tensor.double().norm().item() ** 2 for tensor in references.values()) ** 0.5
    return [relative_difference(values[name], tensor, _FLOOR * total) for name, tensor in references.items()]


def _earliest_difference(firsts: list[OutputDifference]) -> OutputDifference | None:
    return min(firsts, key=lambda first: first.position, default=None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
