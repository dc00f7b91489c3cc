"""The option `compile`: validates it, and compiles the blocks of a module that is sharded over layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.nn import Module

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft._plugin.options import Options
    from weft.strategy.planning.layout import Sizes

BLOCKS = "blocks"


def check_compile(owner: str, options: Options, sizes: Sizes) -> None:
    """Raise TypeError or ValueError for a value that is no option, and for options that compiled blocks exclude."""
    if options.compile is None:
        return
    if options.compile != BLOCKS and not isinstance(options.compile, Mapping):
        raise TypeError(
            f"{owner} got compile={options.compile!r}; pass 'blocks', or a dict of arguments of torch.compile, such as "
            "{'mode': 'max-autotune-no-cudagraphs'}."
        )
    from weft.strategy.modules.compiled_blocks import check_arguments

    check_arguments(owner, _arguments_of(options))
    reasons = {
        f"{sizes.context_parallel} context-parallel ranks": (
            sizes.context_parallel != 1,
            "whose sharded sequences break the graph at each function",
        ),
        "activation_offload=True": (options.activation_offload, "whose copies torch.compile does not support"),
        "optimizer_in_backward='rows'": (
            options.optimizer_in_backward == "rows",
            "which needs the backward of each MLP by itself",
        ),
        "a pipeline_schedule with split backwards": (
            options.has_stages and _splits_backwards(options.pipeline_schedule),
            "and the backward of compiled code cannot be split",
        ),
    }
    for name, (is_given, reason) in reasons.items():
        if is_given:
            raise ValueError(f"{owner} got compile={options.compile!r} and {name}, {reason}; leave one of them out.")


def _arguments_of(options: Options) -> Mapping[str, Any]:
    return options.compile if isinstance(options.compile, Mapping) else {}


def _splits_backwards(schedule: Any) -> bool:
    from weft.strategy import _plan
    from weft.strategy.pipeline import SCHEDULES, Schedule

    if not isinstance(schedule, Schedule):
        return schedule in SCHEDULES and _plan.splits_backwards(schedule)
    return any(action.kind in ("I", "W") for rank in schedule.ranks for action in rank)


def check_blocks(engine: Engine, module: Module) -> None:
    """Raise ValueError, on all ranks, for a full module without blocks, or with a rule that offloads activations."""
    from weft.strategy.modules.activation_checkpointing import repeated_blocks
    from weft.strategy.pipeline import find_staged

    given = f"{engine.name} got compile={engine.options.compile!r}"
    if find_staged(module) is None and not repeated_blocks(module):
        raise ValueError(
            f"{given}, and '{type(module).__name__}' has no repeated blocks, which are modules of one class in an "
            "nn.ModuleList or nn.Sequential; leave it out, and call torch.compile in your own code."
        )
    if engine.plan is not None and engine.plan.offloads(module):
        raise ValueError(
            f"{given} and a rule of its plan with offload, whose copies torch.compile does not support; leave one of "
            "them out."
        )


def compile_model(engine: Engine, module: Module) -> None:
    """Compile the blocks of this rank, and log their number."""
    from weft.strategy import compile_blocks

    names = compile_blocks(module, _arguments_of(engine.options))
    if names:
        shown = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
        engine.console.log(f"weft compiles {len(names)} blocks, each at its first call: {shown}.")
    configs = (getattr(each, "config", None) for each in module.modules())
    if names and any(getattr(config, "use_cache", None) is True for config in configs):
        engine.console.log(
            "weft: the config of the model has use_cache=True, with which each block gets keys and values of its own, "
            "and is compiled by itself; set use_cache=False for training."
        )
