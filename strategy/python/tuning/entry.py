"""Searches the layouts of a training that a configuration of `weft estimate` describes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.strategy import _plan
from weft.strategy.estimate.config import Training, load_file, read_config
from weft.strategy.tuning.formats import combinations_of, merged
from weft.strategy.tuning.offload import CPU, NONE, offload_if_nothing_fits
from weft.strategy.tuning.request import memory_limit_of, read_cluster, read_fixed
from weft.strategy.tuning.result import FoundLayout, Tuning, layout_text

# The search chooses the layout, and ignores these keys of a file.
_CHOSEN = ("mesh", "layout", "pipeline_cuts", "pipeline_schedule", "num_micro_batches")
_ZERO_STAGES = (3, 2, 1)  # replicas are another axis
_CHECKPOINTING = ("none", "selective", "full")
_NUM_RESULTS = 5
_NOT_PRINTED = ("precision", "optimizer", "empty_init")  # of the Trainer, of the model, and the default


def tune_file(path: str | Path, num_devices: int, **options: Any) -> Tuning:
    """Search the layouts for a YAML or JSON configuration, as docs/tune.md describes it.

    If `optimizer_state` or `master_weights` is a list, all its values are tried. `offload` may be a list, too.

    Args:
        num_devices: of all hosts.
        options: those of `tune_training`.

    Raises:
        ValueError: the file does not exist, its content is not a valid configuration, or no layout is possible.
    """
    config = _config_of(path)
    if isinstance(config, Mapping) and isinstance(config.get("offload"), list):
        options = {"offload": tuple(config["offload"]), **options}
        config = _without(config, ("offload",))
    search = functools.partial(_tune_formats, config, Path(path).parent, num_devices, **options)
    if options.get("offload") is not None or (isinstance(config, Mapping) and "offload" in config):
        return search()
    return offload_if_nothing_fits(lambda offload: search(offload=offload))


def _tune_formats(config: Any, folder: Path, num_devices: int, **options: Any) -> Tuning:
    """Search all combinations of the formats that are lists."""
    searches: list[tuple[dict[str, Any], Tuning]] = []
    errors = []
    for formats in combinations_of(config):
        try:
            training = read_config(_with(config, formats), folder, "tp1")
            searches.append((formats, tune_training(training, num_devices, **options)))
        except ValueError as error:
            errors.append((formats, error))
    if not searches:
        raise errors[0][1]
    rejections = {", ".join(map(" ".join, formats.items())): str(error) for formats, error in errors}
    return merged(searches, options.get("max_results", _NUM_RESULTS), rejections)


def read_training(path: str | Path) -> Training:
    """Return the training of a YAML or JSON configuration on one device, whatever the file's layout is.

    Lists of formats count as their first values; `offload` is left out.

    Raises:
        ValueError: the file does not exist, or its content is not a valid configuration.
    """
    config = _without(_config_of(path), ("offload",))
    return read_config(_with(config, next(combinations_of(config))), Path(path).parent, "tp1")


def _config_of(path: str | Path) -> Any:
    """Return the content of a file, without what the search chooses."""
    return _without(load_file(Path(path)), _CHOSEN)


def _without(config: Any, keys: Sequence[str]) -> Any:
    return {key: value for key, value in config.items() if key not in keys} if isinstance(config, Mapping) else config


def _with(config: Any, formats: Mapping[str, Any]) -> Any:
    return {**config, **formats} if formats else config


def tune_training(
    training: Training,
    num_devices: int,
    *,
    cluster: str | Mapping[str, Any] = "h100",
    memory: str | int | None = None,
    global_sequences: int | None = None,
    fixed: str = "",
    max_results: int = _NUM_RESULTS,
    finds_front: bool = False,
    offload: Sequence[str] | None = None,
) -> Tuning:
    """Return the layouts with the shortest predicted steps that fit.

    Options of the training are not changed. The ZeRO stage, activation checkpointing, sequence parallelism and steps in
    the backward are chosen, unless the training has them; so is offload, if no layout fits without.

    Args:
        cluster: the name of a cluster, or the mapping or file of one (see `read_cluster`).
        memory: the most bytes of a device, such as "72GB"; None: nine tenths of a GPU's memory, or all of a CPU rank's.
        global_sequences: of a step, over all ranks; None: the batch's sequences times the devices.
        fixed: sizes that are not chosen, such as "tp=2".
        finds_front: also find the layouts, with checkpoints of all blocks or none, that no other beats in both time and
            memory.
        offload: the values that are tried in place of the training's, of "none" and "cpu". With both, states are
            offloaded in those layouts that do not fit without.

    Raises:
        ValueError: an argument is not valid, the memory model does not describe the training, the cluster has layer
            times of another training, or no layout is possible.
    """
    plan = training.plan
    if training.model is None or isinstance(plan, str) or training.pipeline is not None:
        raise ValueError(
            "tune: step times are predicted for llama, mistral, qwen2 and feed_forward with plan: auto or rules; give "
            "such a configuration, without a pipeline of its own."
        )
    options = dict(training.options)
    wanted_offload = options.pop("offload", None)
    if offload is None and wanted_offload is None:
        search = functools.partial(
            tune_training,
            training,
            num_devices,
            cluster=cluster,
            memory=memory,
            global_sequences=global_sequences,
            fixed=fixed,
            max_results=max_results,
            finds_front=finds_front,
        )
        return offload_if_nothing_fits(lambda values: search(offload=values))
    tried = (wanted_offload,) if offload is None else tuple(offload)
    if not tried or set(tried) - {NONE, CPU}:
        raise ValueError(f"tune: got offload = {list(tried)!r}; give none, cpu or a list of both.")
    rates = read_cluster(cluster)
    limit = memory_limit_of(rates, memory)
    wanted_checkpointing = options.pop("activation_checkpointing", None)
    wanted_in_backward = options.pop("optimizer_in_backward", None)
    wanted_sequence_parallel = options.pop("sequence_parallel", None)
    if wanted_in_backward is None and options.get("precision") == "16-mixed":
        wanted_in_backward = False  # the gradient scaler decides after the backward whether to step
    sizes = read_fixed(fixed)
    for name in ("accumulate_grad_batches", "zero_stage"):
        if (wanted := options.pop(name, None)) is not None:
            sizes.setdefault(name, wanted)
    zero_stage = sizes.pop("zero_stage", None)
    if wanted_in_backward == "rows":
        raise ValueError(
            "tune: got optimizer_in_backward: rows, which excludes data-parallel ranks; use true, or leave it out."
        )
    device = options.pop("device", "cpu" if rates.name == "cpu" else "cuda")
    spec = _plan.TrainingSpec(
        training.model,
        _plan.Mesh(),
        plan=plan,
        tokens=training.batch["tokens"],
        device=device,
        **options,
    )
    sequences = training.batch["sequences"] * num_devices if global_sequences is None else global_sequences
    found = _plan.search_layouts(
        spec,
        rates,
        num_devices=num_devices,
        global_sequences=sequences,
        memory_limit=limit,
        zero_stages=_ZERO_STAGES if zero_stage is None else (zero_stage,),
        activation_checkpointing=_CHECKPOINTING if wanted_checkpointing is None else (wanted_checkpointing,),
        optimizer_in_backward=(False, True) if wanted_in_backward is None else (bool(wanted_in_backward),),
        sequence_parallel=(False, True) if wanted_sequence_parallel is None else (wanted_sequence_parallel,),
        offload=tried,
        max_results=max_results,
        finds_front=finds_front,
        **sizes,
    )
    is_half = options.get("precision", "32-true") != "32-true"
    flops = rates.half_flops if is_half else rates.float32_flops
    tokens = sequences * training.batch["tokens"]
    layouts = tuple(_layout(each, tokens, flops) for each in found["layouts"])
    return Tuning(
        layouts=layouts,
        smallest=None if found["smallest"] is None else _layout(found["smallest"], tokens, flops),
        num_devices=num_devices,
        devices_per_host=rates.devices_per_host,
        memory_limit=limit,
        global_sequences=sequences,
        tokens=training.batch["tokens"],
        cluster=rates.name,
        num_candidates=found["num_candidates"],
        num_above_limit=found["num_above_limit"],
        rejections=tuple((f"tp{size}", reason) for size, reason in found["rejections"]),
        plan="auto" if plan is None else plan.to_json(),
        precision=options.get("precision", "32-true"),
        options={name: value for name, value in options.items() if name not in _NOT_PRINTED},
        front=tuple(_layout(each, tokens, flops) for each in found["front"]),
        has_measured_layers=rates.layer_times is not None,
        offload=tried,
    )


def _layout(found: Mapping[str, Any], num_tokens: int, flops: float) -> FoundLayout:
    seconds = dict(found["seconds"])
    step_seconds = sum(seconds.values())
    return FoundLayout(
        layout=layout_text(dict(found["mesh"].axes)),
        sequences=found["sequences"],
        accumulate_grad_batches=found["accumulate_grad_batches"],
        activation_checkpointing=found["activation_checkpointing"],
        optimizer_in_backward=found["optimizer_in_backward"],
        sequence_parallel=found["sequence_parallel"],
        offload=found["offload"],
        seconds=seconds,
        bytes=dict(found["bytes"]),
        sent_bytes=round(found["sent_bytes"]),
        throughput=num_tokens / step_seconds,
        flops_share=found["model_flops"] / flops / step_seconds,
        zero_stage=found["zero_stage"],
        pipeline_cuts=tuple(f"model.layers.{block}" for block in found["first_blocks"]),
        pipeline_schedule=found["pipeline_schedule"],
        num_micro_batches=found["num_micro_batches"],
    )
