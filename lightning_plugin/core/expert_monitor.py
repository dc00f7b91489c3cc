"""The mixin of ExpertMonitor, a callback that logs how evenly tokens are routed; `factory.py` adds the base class."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from weft._plugin.expert_counts import CountingMixin
from weft._plugin.monitors import check_at_least_one, log, num_steps
from weft._plugin.strategy_mixin import StrategyMixin


class ExpertMixin(CountingMixin):
    """Logs how evenly each layer of a mixture of experts routes its tokens, since the log before.

    For a layer "model.layers.0.mlp.experts": "experts/model.layers.0.mlp.experts", the largest number of tokens of an
    expert, divided by the mean; 1 if all experts get the same number. A step of an expert-parallel run lasts as long as
    that of the rank with the most tokens. The tokens of all ranks are counted, in training steps. Each log runs one
    collective. The layers are those that `weft.strategy.experts.find_experts` finds, under any strategy.

    Args:
        every_n_steps: the steps between two logs; the end of training is logged, too. None: the end of each epoch is
            logged.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        if every_n_steps is not None:
            check_at_least_one("ExpertMonitor", "every_n_steps", every_n_steps)
        self._every_n_steps = every_n_steps
        self._table: dict[str, list[int]] = {}
        self._step = self._reported_step = -1

    def table(self) -> dict[str, list[int]]:
        """Return the tokens of each expert, by the name of the layer; those of the last log, the same on all ranks.

        Raises:
            RuntimeError: nothing was logged yet.
        """
        if not self._table:
            raise RuntimeError("ExpertMonitor has not logged yet; call table() after an epoch or a run.")
        return {name: list(counts) for name, counts in self._table.items()}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step, self._reported_step = num_steps(trainer, pl_module), -1
        self.start_counting(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.counts is not None:
            self.counts.end_batch()
        before, self._step = self._step, num_steps(trainer, pl_module)
        if self._every_n_steps and self._step != before and self._step % self._every_n_steps == 0:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._every_n_steps is None:
            self._report(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._step != self._reported_step:
            self._report(trainer)

    def _report(self, trainer: Any) -> None:
        self._reported_step = self._step
        if self.counts is None:
            return
        strategy = trainer.strategy
        # The ranks of a tensor-parallel group count the same tokens, or shards of them.
        counts_here = not isinstance(strategy, StrategyMixin) or strategy.tensor_parallel_group.rank() == 0
        mine = {
            name: counts.tolist() if counts_here or name in self.counts.sharded else [0] * counts.numel()
            for name, counts in self.counts.of.items()
        }
        tables: list[Any] = [mine]
        if dist.is_available() and dist.is_initialized():
            tables = [None] * dist.get_world_size()
            dist.all_gather_object(tables, mine)
        self._table = {}
        for table in tables:
            for name, counts in table.items():
                before = self._table.get(name, [0] * len(counts))
                self._table[name] = [left + right for left, right in zip(before, counts, strict=True)]
        self.counts.restart()
        shares = {name: max(counts) * len(counts) / max(sum(counts), 1) for name, counts in self._table.items()}
        log(trainer, {f"experts/{name}": share for name, share in shares.items()}, self._step)
