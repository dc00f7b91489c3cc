"""Chooses the layout of a run under the Trainer, for layout="auto": by dry runs of the user's module on rank 0."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft._plugin.dry_run_options import FirstBatch, memory_limit_of, options_of_training, unattached

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft._plugin.options import Options
    from weft._plugin.stock_strategies import StockTrainerStrategy
    from weft.strategy.planning.layout import MeshSizes
    from weft.strategy.tuning.result import FoundLayout

_GPUS = ("a100", "h100", "h200", "b200")  # clusters whose rates are known, by a part of the device's name


def check_options(owner: str, options: Options) -> None:
    """Raise ValueError for options that exclude layout="auto", or that need it."""
    if not options.chooses_layout:
        if options.memory_limit is not None:
            raise ValueError(
                f"{owner} got memory_limit={options.memory_limit!r} without layout='auto', which chooses a layout "
                "that fits into it; pass both."
            )
        return
    if options.plan is None:
        raise ValueError(f"{owner} got layout='auto' without a plan, which it needs; pass plan='auto'.")
    from weft.strategy.modules.activation_checkpointing import split_count

    unsupported = {
        "offload": options.offload is not None,
        "pipeline_cuts": options.has_stages,
        "optimizer_in_backward='rows'": options.optimizer_in_backward == "rows",
        "join_gate_up": options.join_gate_up,
        "activation_offload": options.activation_offload,
        "activation_checkpointing by patterns": split_count(options.activation_checkpointing)[0]
        not in ("none", "selective", "full"),
    }
    for name, is_given in unsupported.items():
        if is_given:
            raise ValueError(
                f"{owner} got layout='auto' and {name}, for which layouts are not compared; pass a layout, or "
                "leave the other out."
            )
    if options.memory_limit is not None:
        from weft.strategy.tuning.request import read_bytes

        try:
            read_bytes(options.memory_limit)
        except ValueError as error:
            raise ValueError(f"{owner} got memory_limit={options.memory_limit!r}: {error}") from None


def choose_layout(engine: Engine, strategy: StockTrainerStrategy) -> tuple[MeshSizes, int]:
    """Return (sizes, ZeRO stage) of the layout that fits and trains the most rows per second, by prediction.

    Collective. Each data-parallel rank keeps the batch size of its loader. The process group must exist, the mesh must
    not. The search must end within the group's timeout.

    Raises:
        ValueError: the Trainer does not fit a model, no layout fits or is possible, or the module and its batch cannot
            be sent to a new process.
        RuntimeError: the module raised an error.
    """
    entry_point = strategy.lightning_module.trainer.state.fn.value
    if entry_point != "fit":
        raise ValueError(f"{engine.name} got layout='auto', which fit chooses; pass a layout to {entry_point}.")
    answer = [_search(engine, strategy) if strategy.global_rank == 0 else None]
    dist.broadcast_object_list(answer, src=0, device=engine.device)
    assert answer[0] is not None
    found, text, engine.predicted_bytes = answer[0]
    if isinstance(found, type):
        raise found(f"{engine.name} got layout='auto': {text}")
    engine.console.log(f"weft: {text}")
    return found


def _search(
    engine: Engine, strategy: StockTrainerStrategy
) -> tuple[tuple[MeshSizes, int] | type[Exception], str, int | None]:
    """Return sizes with the stage, a sentence and the bytes of a rank, or the type of an error, its text and None."""
    from weft.strategy.planning.layout import Sizes
    from weft.strategy.tuning.modules import tune_module
    from weft.strategy.tuning.result_cache import ResultCache

    trainer = strategy.lightning_module.trainer
    num_ranks = strategy.num_processes * strategy.num_nodes
    sentences: list[str] = []

    def report(sentence: str) -> None:
        if not sentences:
            engine.console.log(f"weft: layout='auto': {sentence}")
        sentences.append(sentence)

    try:
        cache = ResultCache.of_environment()
        found = tune_module(
            unattached(strategy.lightning_module),
            num_ranks,
            batch=FirstBatch(trainer.fit_loop._data_source.instance),
            cluster=_cluster_of(engine, strategy.num_processes),
            memory=memory_limit_of(engine, engine.options.memory_limit, strategy.num_processes),
            keeps_batch=True,
            fixed=f"pp=1,accumulate={trainer.accumulate_grad_batches}",
            max_results=2,
            cache=cache,
            report=report,
            **options_of_training(engine),
        )
    except Exception as error:  # an error that only rank 0 raises would leave the other ranks waiting
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        text = str(error).removeprefix("tune: ").removeprefix("estimate: ").rstrip(".")
        return kind, f"{text}. A layout of your own, such as one that `weft tune` finds, needs no search.", None
    if not found.layouts:
        return ValueError, found.no_layout_fits(), None
    best = found.layouts[0]
    next_best = (
        f"; next {_name_of(found.layouts[1])} with {found.layouts[1].throughput:.4g}" if found.layouts[1:] else ""
    )
    text = (
        f"layout='auto' chooses {_name_of(best)} of {found.num_candidates} variants: {best.throughput:.4g} rows/s "
        f"predicted with the rates of {found.cluster}{next_best}; {best.peak_bytes / 1e9:.4g} GB on a device of "
        f"{found.memory_limit / 1e9:.4g} GB."
    )
    if cache is not None and cache.path_of_hit is not None:
        text += f" This is the result of an earlier search, from {cache.path_of_hit}."
    sizes = Sizes.parse(best.layout).resolve(num_ranks, strategy.num_processes)
    return (sizes, best.zero_stage), text, best.peak_bytes


def _name_of(found: FoundLayout) -> str:
    is_named = found.shards_data and found.zero_stage != 3
    return f"'{found.layout}' with zero_stage={found.zero_stage}" if is_named else f"'{found.layout}'"


def _cluster_of(engine: Engine, devices_per_host: int) -> dict[str, Any]:
    if engine.device.type == "cpu":
        from weft.collectives import SlowNetwork

        rates: dict[str, Any] = {"like": "cpu", "cores_per_host": len(os.sched_getaffinity(0))}
        network = SlowNetwork.of_environment()
        if network is None:
            return {**rates, "devices_per_host": devices_per_host}
        link = {name: getattr(network, name) for name in ("seconds_per_message", "bytes_per_second")}
        return {**rates, "devices_per_host": network.ranks_per_host, "network_link": link}
    name = torch.cuda.get_device_name(engine.device).lower()
    like = next((each for each in _GPUS if each in name), "h100")
    return {"like": like, "devices_per_host": devices_per_host}
