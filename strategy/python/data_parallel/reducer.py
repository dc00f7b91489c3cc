"""Averages the gradients of replicas in buckets, which overlaps the reduction with the backward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.strategy.data_parallel.local import local_shard
from weft.strategy.data_parallel.replica_groups import ReplicaGroups
from weft.strategy.data_parallel.sparse_gradients import average_sparse_gradients, sparse_parameters

_BUCKET_BYTES = 25 << 20
_MAX_IN_FLIGHT = 2  # reductions that a backward leaves in flight


@dataclasses.dataclass(eq=False)
class _Bucket:
    parameters: list[Tensor]
    pending: set[Tensor]  # those whose gradient the current backward has not completed
    group: dist.ProcessGroup
    is_sparse: bool = False


@dataclasses.dataclass(eq=False)
class _Reduction:
    bucket: _Bucket
    flat: Tensor
    work: dist.Work | None  # None: the group has one rank
    in_place: bool


class GradientReducer:
    """Averages each parameter's local gradient over the ranks of a group, which hold equal local parameters.

    Works on DTensors as on plain tensors; sharding and replication along other axes of a mesh do not change. Gradients
    are copied into buckets of at most 25 MiB, in reverse order of the parameters. A contiguous gradient that is alone
    in its bucket, as all above 25 MiB are, is reduced in place. After it starts a reduction, a backward waits until at
    most two are in flight; `finish` starts all remaining reductions at once. If only some ranks have a gradient of a
    parameter, the average is over all ranks, counting zeros; if no rank has one, the parameter keeps none. Sparse
    gradients are averaged in `finish`, by `average_sparse_gradients`.

    Call `finish` on all ranks after each backward whose gradients are to be averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = _BUCKET_BYTES,
        experts: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            experts: the ranks of `group` that hold the same experts, for parameters on the axis expert_parallel.
        """
        self._group = group
        self._groups = ReplicaGroups(group, experts)
        self._is_paused = False
        self._next_bucket = 0
        self._has_local_gradients = False  # from a backward outside of `paused`, not averaged yet
        self._in_flight: deque[_Reduction] = deque()
        self._sparse = sparse_parameters(model)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._handles: list[RemovableHandle] = []
        self._register(p for p in self._names if p.requires_grad)

    def _register(self, parameters: Iterable[Tensor]) -> None:
        """Add buckets and hooks for parameters that require gradients and are in no bucket yet."""
        added = list(parameters)
        buckets = _divide_into_buckets([p for p in added if p not in self._sparse], self._bucket_bytes, self._groups)
        sparse = [parameter for parameter in added if parameter in self._sparse]
        buckets += [_Bucket([each], {each}, self._groups.of(each), is_sparse=True) for each in sparse]
        for bucket in buckets:
            self._buckets.append(bucket)
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backwards leave gradients local; `finish` outside averages the accumulated gradients."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._is_paused:
            return
        self._has_local_gradients = True
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.pending:
            raise RuntimeError(
                f"GradientReducer: '{self._names[parameter]}' got a gradient from a second backward before those "
                "of the first were averaged; call backward through the strategy (fabric.backward, manual_backward); to "
                "accumulate gradients, run all backwards but the last in fabric.no_backward_sync."
            )
        bucket.pending.discard(parameter)
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].pending:
            self._start_reduction(self._buckets[self._next_bucket])
            while len(self._in_flight) > _MAX_IN_FLIGHT:
                self._finish_reduction(self._in_flight.popleft(), None)

    def finish(self) -> None:
        """Complete the average of the last backward's gradients; collective; does nothing while paused."""
        if self._is_paused:
            return
        self._register(p for p in self._names if p.requires_grad and p not in self._bucket_of)
        if not self._bucket_of:
            return
        has_gradient = [p.grad is not None for p in self._bucket_of]
        while self._next_bucket < len(self._buckets):
            self._start_reduction(self._buckets[self._next_bucket])
        flags = torch.tensor(has_gradient, dtype=torch.uint8).to(self._device(), non_blocking=True)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        with_gradient = None
        if not all(has_gradient):  # else nothing depends on the flags, and reading them would wait for the device
            with_gradient = {p for p, flag in zip(self._bucket_of, flags.tolist(), strict=True) if flag}
        while self._in_flight:
            self._finish_reduction(self._in_flight.popleft(), with_gradient)
        sparse = [parameter for bucket in self._buckets if bucket.is_sparse for parameter in bucket.parameters]
        average_sparse_gradients(sparse, self._group)
        self._next_bucket, self._has_local_gradients = 0, False
        for bucket in self._buckets:
            bucket.pending = set(bucket.parameters)

    def finish_if_needed(self) -> None:
        """Call `finish` if a backward has run outside of `paused` since the last `finish`; for calls before a step."""
        if self._has_local_gradients:
            self.finish()

    def _device(self) -> torch.device:
        return local_shard(next(iter(self._bucket_of))).device

    def _start_reduction(self, bucket: _Bucket) -> None:
        self._next_bucket += 1
        if bucket.is_sparse:
            return
        grads = [None if p.grad is None else local_shard(p.grad) for p in bucket.parameters]
        first = grads[0]
        in_place = len(grads) == 1 and first is not None and first.is_contiguous()
        if in_place:
            assert first is not None
            flat = first.view(-1)
        else:
            locals_ = [local_shard(p) for p in bucket.parameters]
            flat = locals_[0].new_empty(sum(local.numel() for local in locals_))
            views = [view.view(local.shape) for view, local in zip(_split(flat, bucket), locals_, strict=True)]
            for view in (view for view, grad in zip(views, grads, strict=True) if grad is None):
                view.zero_()
            _copy([(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not None])
        work = None
        if bucket.group.size() > 1:
            flat.div_(bucket.group.size())
            work = dist.all_reduce(flat, group=bucket.group, async_op=True)
        self._in_flight.append(_Reduction(bucket, flat, work, in_place))

    def _finish_reduction(self, reduction: _Reduction, with_gradient: set[Tensor] | None) -> None:
        if reduction.work is not None:
            reduction.work.wait()
        if reduction.in_place:
            return
        copies = []
        for flat_grad, parameter in zip(
            _split(reduction.flat, reduction.bucket), reduction.bucket.parameters, strict=True
        ):
            if with_gradient is not None and parameter not in with_gradient:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local = local_shard(parameter.grad)
            copies.append((local, flat_grad.view(local.shape)))
        _copy(copies)


def _copy(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first of each pair from the second, in few launches on a GPU."""
    if copies:
        targets, sources = zip(*copies, strict=True)
        torch._foreach_copy_(targets, sources)


def average_gradient(parameter: Tensor, group: dist.ProcessGroup) -> None:
    """Average one complete gradient over `group` now, in place; collective."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        average_sparse_gradients([parameter], group)
        return
    local = local_shard(parameter.grad).div_(group.size())
    reduced = local.contiguous()
    dist.all_reduce(reduced, group=group)
    if reduced is not local:
        local.copy_(reduced)


def _split(flat: Tensor, bucket: _Bucket) -> tuple[Tensor, ...]:
    segments: tuple[Tensor, ...] = flat.split([local_shard(p).numel() for p in bucket.parameters])
    return segments


def _divide_into_buckets(parameters: list[Tensor], bucket_bytes: int, groups: ReplicaGroups) -> list[_Bucket]:
    """Divide parameters into buckets, roughly in the order in which a backward completes their gradients."""
    buckets: list[_Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device, dist.ProcessGroup], tuple[_Bucket, int]] = {}
    for parameter in reversed(parameters):
        local = local_shard(parameter)
        kind = (local.dtype, local.device, groups.of(parameter))
        bucket, used = open_buckets.get(kind, (None, bucket_bytes))
        if bucket is None or used + local.nbytes > bucket_bytes:
            bucket, used = _Bucket([], set(), kind[2]), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        bucket.pending.add(parameter)
        open_buckets[kind] = (bucket, used + local.nbytes)
    return buckets
