"""Counts the tokens that each expert of a model gets in the forwards of training steps."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


class ExpertCounts:
    """The tokens of each expert, by the name of the module that holds the experts, on this rank.

    The ranks of a tensor-parallel group count the same tokens, except in `sharded`, the names of modules whose tokens
    sequence parallelism shards over these ranks. Forwards outside of `begin_batch` and `end_batch`, such
    as those of a validation, do not count, nor do recomputations in a backward.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        from weft.strategy.experts import find_experts, has_own_tokens, num_experts_of

        self.of: dict[str, Tensor] = {}
        self.sharded: set[str] = set()
        self._handles: list[Any] = []
        self._is_batch = False
        for name, layout in find_experts(module).items():
            experts = module.get_submodule(name)
            self.of[name] = torch.zeros(num_experts_of(experts, layout), dtype=torch.int64, device=device)
            if has_own_tokens(experts):
                self.sharded.add(name)
            count = functools.partial(self._count, name)
            self._handles.append(experts.register_forward_pre_hook(count, with_kwargs=True))

    def begin_batch(self) -> None:
        self._is_batch = True

    def end_batch(self) -> None:
        self._is_batch = False

    def restart(self) -> None:
        for counts in self.of.values():
            counts.zero_()

    def remove(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _count(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_recomputation = torch._C._current_graph_task_id() != -1
        if not self._is_batch or is_recomputation:
            return
        ids = args[1] if len(args) > 1 else kwargs["top_k_index"]
        shard = getattr(ids, "local", ids)  # of a sequence that is sharded over context-parallel ranks
        counts = self.of[name]
        counts += torch.bincount(shard.flatten(), minlength=counts.numel())


class CountingMixin:
    """The part of a callback that counts tokens in the batches of a training: in `counts`, None outside of it."""

    counts: ExpertCounts | None = None

    def start_counting(self, trainer: Any, pl_module: Any) -> ExpertCounts:
        """Count from zero, instead of counts of an earlier run."""
        self.stop_counting()
        self.counts = ExpertCounts(pl_module, trainer.strategy.root_device)
        return self.counts

    def stop_counting(self) -> None:
        if self.counts is not None:
            self.counts.remove()
        self.counts = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.counts is not None:
            self.counts.begin_batch()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.stop_counting()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.stop_counting()
