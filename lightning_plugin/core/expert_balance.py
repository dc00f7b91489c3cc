"""The mixin of ExpertBalance, a callback that balances experts by router biases; `factory.py` adds the base class."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft._plugin.expert_counts import CountingMixin
from weft._plugin.monitors import num_steps
from weft._plugin.strategy_mixin import StrategyMixin

BIAS = "e_score_correction_bias"


class BalanceMixin(CountingMixin):
    """Balances the experts of models whose routers have biases, without a loss.

    After each optimizer step, the bias of each expert that got more tokens than the mean in this step decreases by
    `rate`, and that of each expert that got fewer increases by `rate`. Biases have a part in the choice of experts, and
    none in their weights. They are buffers named "e_score_correction_bias", as in DeepSeek-V3 and GLM-4.5 of
    transformers, in a module beside the experts or in the module that holds both. The tokens of all ranks count; each
    step runs one all-reduce for each layer, and another one with sequence parallelism.

    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1.2, from Wang et al., "Auxiliary-Loss-Free Load
    Balancing Strategy for Mixture-of-Experts" (2024).

    Args:
        rate: above 0.

    Raises:
        ValueError: another rate; at the start of training, a model without such biases.
    """

    def __init__(self, rate: float = 1e-3) -> None:
        super().__init__()
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < float("inf"):
            raise ValueError(f"ExpertBalance got rate={rate!r}; pass a number above 0.")
        self._rate = float(rate)
        self._biases: dict[str, Tensor] = {}
        self._step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = num_steps(trainer, pl_module)
        counted = self.start_counting(trainer, pl_module)
        self._biases = {
            name: bias for name, counts in counted.of.items() if (bias := _bias_of(pl_module, name, counts)) is not None
        }
        if not _on_any_rank(bool(self._biases), trainer.strategy.root_device):
            self.stop_counting()
            raise ValueError(
                f"ExpertBalance got a {type(pl_module).__name__} without buffers {BIAS!r} of routers beside experts; "
                "leave the callback out, or use a model whose routers have biases, such as DeepSeek-V3."
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.counts is None:
            return
        self.counts.end_batch()
        before, self._step = self._step, num_steps(trainer, pl_module)
        if self._step == before:
            return
        strategy = trainer.strategy
        group = strategy.groups.gradients if isinstance(strategy, StrategyMixin) else None
        for name, bias in self._biases.items():
            counts = self.counts.of[name]
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(counts, group=group)
                if name in self.counts.sharded and isinstance(strategy, StrategyMixin):
                    dist.all_reduce(counts, group=strategy.tensor_parallel_group)
            # In whole numbers: the mean of the counts need not be one.
            bias.add_(torch.sign(counts.sum() - counts * counts.numel()).to(bias.dtype), alpha=self._rate)
        self.counts.restart()


def _bias_of(model: Any, name: str, counts: Tensor) -> Tensor | None:
    """Return the bias of the router beside the experts of this name; None: there is none."""
    parent = model.get_submodule(name.rpartition(".")[0])
    for module in (parent, *parent.children()):
        bias: Tensor | None = module._buffers.get(BIAS)
        if bias is not None and bias.numel() == counts.numel():
            return bias
    return None


def _on_any_rank(value: bool, device: torch.device) -> bool:
    """Return whether a value is true on any rank; a pipeline's stage may have no experts."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    flag = torch.tensor(int(value), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
