"""Logs a summary when a model is set up: the layout, the sharding of modules, and the memory of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weft._plugin.meshes import axis_sizes

if TYPE_CHECKING:
    from weft._plugin.engine import Engine

_RANKS_SHOWN = 8


class StartSummary:
    """Logs at most 12 lines on the first rank, each beginning with "weft: "; for a strategy with a plan and a mesh."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._summarized: torch.nn.Module | None = None
        self.lines: list[str] = []  # of the last summary, on all ranks

    def log(self, module: torch.nn.Module) -> None:
        """Log the summary, once for a module; collective."""
        if self._summarized is module:
            return
        self._summarized = module
        engine, mesh, plan = self._engine, self._engine.mesh, self._engine.plan
        if mesh.size() == 1:
            self.lines = ["nothing is sharded, as there is one device (on CPU, devices='auto' means 1)."]
            engine.console.log(f"weft: {self.lines[0]}")
            return
        assert plan is not None
        sizes = ", ".join(f"{name}={size}" for name, size in axis_sizes(mesh, engine.groups).items())
        stage = f", zero_stage={engine.sharding_stage}" if engine.data_axes.num_gradient_ranks > 1 else ""
        attention = (
            f", context_attention={engine.options.context_attention}" if engine.context_group is not None else ""
        )
        unverified = ", without verification" if plan.verify == "never" else ""
        lines = [
            f"layout: {sizes}{stage}{attention}; plan: {plan.preset or 'rules'}{unverified}.",
            *self._sharding_lines(module),
        ]
        self.lines = lines + self._memory_of_ranks(module)
        engine.console.log("\n".join(f"weft: {line}" for line in self.lines))
        self._warn_on_replicated(module)

    def _sharding_lines(self, module: torch.nn.Module) -> list[str]:
        from weft.strategy.reports.summary import expert_lines, replicated_lines, summary

        if self._engine.tensor_parallel_group.size() > 1:
            return summary(module)
        if self._engine.data_axes.num_gradient_ranks > 1:
            return [*expert_lines(module), *replicated_lines(module)]
        return ["each rank has the layers of its own stages, which are not sharded."]

    def _memory_of_ranks(self, module: torch.nn.Module) -> list[str]:
        """Return lines on the bytes of parameters on each rank, and of gradients and Adam's states; collective."""
        engine, mesh = self._engine, self._engine.mesh
        parameters = list(module.parameters())
        trainable = [p for p in parameters if p.requires_grad]
        parameter_bytes, trainable_bytes = (
            sum(getattr(p, "_local_tensor", p).nbytes for p in ps) for ps in (parameters, trainable)
        )
        sizes = torch.tensor([parameter_bytes, trainable_bytes], device=engine.device)
        full_bytes = sum(p.nbytes for p in parameters)
        groups = [engine.tensor_parallel_group, engine.data_axes.group]  # innermost first, for the order of the ranks
        if engine.pipeline is not None:
            groups.append(engine.stages.group)
            total_bytes = torch.tensor([full_bytes], device=engine.device)
            dist.all_reduce(total_bytes, group=engine.stages.group)
            full_bytes = int(total_bytes)
        for group in groups:
            if group.size() > 1:
                gathered = sizes.new_empty(group.size() * sizes.numel())
                dist.all_gather_into_tensor(gathered, sizes, group=group)
                sizes = gathered
        ranks = sizes.view(-1, 2)
        shown = ranks[:_RANKS_SHOWN, 0].tolist()
        held_by = ", ".join(f"rank {rank}: {size / 1e6:.3f}" for rank, size in enumerate(shown))
        more = f", and {mesh.size() - _RANKS_SHOWN} more" if mesh.size() > _RANKS_SHOWN else ""
        largest, grads = (int(column.max()) / 1e6 for column in ranks.unbind(1))
        return [
            f"parameters: {full_bytes / 1e6:.3f} MB in all; MB held by {held_by}{more}.",
            f"predicted memory per rank: at most {largest + grads:.3f} MB of parameters and gradients plus "
            f"{2 * grads:.3f} MB of Adam states; activations not included.",
        ]

    def _warn_on_replicated(self, module: torch.nn.Module) -> None:
        """Warn if every rank of a tensor-parallel group holds much of the model in full."""
        from weft.strategy.reports.summary import REPLICATED_FRACTION, replicated_fraction

        share = replicated_fraction(module)
        if self._engine.tensor_parallel_group.size() == 1 or share <= REPLICATED_FRACTION:
            return
        assert self._engine.plan is not None
        replicated_notes = [note for note in self._engine.plan.report().notes if "left replicated" in note]
        example = f" ({replicated_notes[0]})" if replicated_notes else ""
        self._engine.console.warn(
            f"weft: every rank holds {100 * share:.0f} % of the parameters' bytes in full{example}: name their modules "
            "in a plan, use strategy='weft_fsdp' or pipeline_cuts, which shard any parameter, or see "
            f"print({self._engine.owner}.strategy.plan.report())."
        )
