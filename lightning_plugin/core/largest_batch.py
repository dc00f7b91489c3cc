"""Finds the largest batch with which a Trainer's run fits into the memory of a device."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from weft._plugin.dry_run_options import FirstBatch, memory_limit_of, options_of_training, unattached

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft._plugin.options import Options
    from weft._plugin.stock_strategies import StockTrainerStrategy

# The share of the limit that a prediction may take: predictions are up to 2 % below the bytes under the Trainer, which
# also has buffers of its own.
_USED = 0.97
_USED_OF_HOST = 0.8  # of the memory of CPU ranks, where interpreters, data sets and loaders need some


class LargestBatch(NamedTuple):
    """The result of a search.

    Attributes:
        num_rows: of the batch of a data-parallel rank.
        predicted_bytes: of the rank with the most, with the next batch, which the Trainer loads ahead.
        memory_limit: in bytes.
        num_dry_runs: that the search has needed.
        error: why no more rows were tried; "": memory, or `max_rows`, is the reason.
    """

    num_rows: int
    predicted_bytes: int
    memory_limit: int
    num_dry_runs: int
    error: str


def find_largest_batch(
    engine: Engine, strategy: StockTrainerStrategy, memory_limit: str | int | None, given_rows: int, max_rows: int
) -> LargestBatch:
    """See `TrainerMixin.largest_batch`; collective."""
    _check_options(engine.name, engine.options)
    answer: list[Any] = [None]
    if strategy.global_rank == 0:
        answer = [_search(engine, strategy, memory_limit, given_rows, max_rows)]
    dist.broadcast_object_list(answer, src=0, device=engine.device)
    if isinstance(answer[0], Exception):
        raise answer[0]
    found: LargestBatch = answer[0]
    return found


def _check_options(owner: str, options: Options) -> None:
    if options.is_stock:
        raise ValueError(f"{owner} got no plan, which a search for the largest batch needs; pass plan='auto'.")
    unsupported = {
        "context-parallel ranks": options.has_context,
        "offload": options.offload is not None,
        "activation_offload": options.activation_offload,
        "join_gate_up": options.join_gate_up,
        "micro_batch_shares": options.micro_batch_shares is not None,
        "split_batch": options.split_batch is not None,
        "AutoCuts as pipeline_cuts": not isinstance(options.pipeline_cuts, (str, list, tuple, type(None))),
    }
    for name, is_given in unsupported.items():
        if is_given:
            raise ValueError(
                f"{owner} got {name}, which no dry run has; set the batch size yourself, or leave the option out."
            )


def _search(
    engine: Engine, strategy: StockTrainerStrategy, memory_limit: str | int | None, given_rows: int, max_rows: int
) -> LargestBatch | Exception:
    """Return the result, or the error: one that only rank 0 raises would leave the other ranks waiting."""
    from weft.strategy.tuning.batch_size import largest_batch
    from weft.strategy.tuning.request import read_bytes
    from weft.strategy.tuning.result import layout_text

    options, trainer = engine.options, strategy.lightning_module.trainer
    sizes = engine.sizes_of_mesh()
    assert sizes is not None
    in_stages: dict[str, Any] = {}
    if options.has_stages:
        names = ("pipeline_cuts", "pipeline_schedule", "num_micro_batches", "pipeline_module")
        in_stages = {name: getattr(options, name) for name in names}
    try:
        given = options.memory_limit if memory_limit is None else memory_limit
        limit = read_bytes(memory_limit_of(engine, given, strategy.num_processes))
        if given is None and engine.device.type == "cpu":
            limit = int(_USED_OF_HOST * limit)
        found = largest_batch(
            unattached(strategy.lightning_module),
            int(_USED * limit),
            given_rows=given_rows,
            max_rows=max_rows,
            num_waiting_batches=1,
            batch=_batch_of(trainer.fit_loop._data_source.instance),
            layout=layout_text(sizes._asdict()),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            **{**options_of_training(engine), "zero_stage": engine.sharding_stage},
            **in_stages,
        )
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        return kind(f"{engine.name}: {str(error).removeprefix('tune: ').removeprefix('estimate: ')}")
    if found.num_rows == 0:
        return ValueError(
            f"{engine.name}: no batch fits into {limit / 1e9:.4g} GB, and the smallest takes "
            f"{found.peak_bytes / 1e9:.4g} GB; pass activation_checkpointing='full', or train on more devices."
        )
    return LargestBatch(found.num_rows, found.peak_bytes, limit, found.num_dry_runs, found.error)


def _batch_of(source: Any) -> Any:
    """Return the first batch of a LightningDataModule; for a LightningModule, what makes it in another process.

    At this point of a run, Lightning has set up the data module, which may hold open files, but not the module.
    """
    if isinstance(source, torch.nn.Module):
        return FirstBatch(source)
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()
    try:
        return FirstBatch(source.train_dataloader())()
    finally:  # as if rank 0 had made no loader
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])
