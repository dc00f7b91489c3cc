"""Shards a module for one strategy.

The order is: stages, experts, layers, sequences, activation checkpoints, compiled blocks, data axes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from weft._plugin.compile_option import check_blocks, compile_model
from weft._plugin.meshes import TENSOR_AXIS
from weft._plugin.metrics import synchronize_metrics_over
from weft._plugin.read_bar import ReadBar
from weft._plugin.replicas import has_meta_tensors, materialized_bytes

if TYPE_CHECKING:
    from weft._plugin.engine import Engine

_LARGE_BYTES = 10**6
_LOADED = "_weft_pretrained"  # on the user's module: the path of the weights that it was filled with


def apply_plan(
    engine: Engine,
    module: Module,
    divide: Callable[[Module], None],
    *,
    shows_progress: bool = False,
    **shard_options: Any,
) -> bool:
    """Make the ranks' values equal, then shard if there is a plan; return whether the module had meta tensors.

    Args:
        engine: an engine on which `begin_run` has run.
        module: the user's module, with all its layers.
        divide: divides the module into stages; called only with pipeline_cuts.
        shows_progress: show a bar of the bytes that this rank reads from files.
        shard_options: `entry_points` and `root_is_unit` of `DataAxes.shard`.
    """
    if engine.options.compile is not None:
        check_blocks(engine, module)
    if engine.plan is not None:
        synchronize_metrics_over(engine.data_group, module)
    bar = ReadBar(shows_progress)
    with bar.shown():
        _load_pretrained(engine, module)
        engine.broadcast_values(module)
        has_meta = has_meta_tensors(module)
        if engine.plan is not None:
            _log_building_advice(engine, module)
            engine.check_offload_device("a rule of its plan with offload", engine.plan.offloads(module))
        if engine.options.has_stages:
            _store_rehearsal(engine, module)
            _check_experts(engine, module)
            divide(module)
        bar.expect(module)  # after the division: a rank reads nothing of the layers of other stages
        if engine.plan is not None:
            _shard_experts(engine, module)
            _shard_layers(engine, module)
            _check_gated_mlps(engine, module)
        _shard_sequences(engine, module)
        _checkpoint_activations(engine, module)
        if engine.options.compile is not None:
            compile_model(engine, module)
        if engine.plan is not None:
            _shard_over_data_axes(engine, module, **shard_options)
    if engine.plan is not None:
        engine.start_summary.log(module)
    return has_meta


def _load_pretrained(engine: Engine, module: Module) -> None:
    """Load the option's weights into a module that has not been sharded yet; a later run keeps the trained weights."""
    path = engine.options.pretrained
    if path is None or module.__dict__.get(_LOADED) == os.fspath(path):
        return
    from weft.strategy import load_pretrained

    report = load_pretrained(module, path)
    module.__dict__[_LOADED] = os.fspath(path)
    engine.console.log(f"weft fills {len(report.loaded)} tensors of the model from {os.fspath(path)}.")


def _store_rehearsal(engine: Engine, module: Module) -> None:
    from weft.strategy.verification.evidence import store_rehearsal

    if engine.plan is not None and engine.tensor_parallel_group.size() > 1:
        # The plan's verification calls the full model, which no rank can do after the division into stages.
        store_rehearsal(module, engine.plan.example)


def _check_experts(engine: Engine, module: Module) -> None:
    """Raise the errors of sharding experts on all ranks, while each has the layers of all stages."""
    experts = engine.groups.experts
    if experts is None or engine.plan is None:
        return
    from weft.strategy.experts.entry import check_experts
    from weft.strategy.pipeline import find_staged

    if find_staged(module) is None:
        check_experts(module, experts.mesh)


def _shard_experts(engine: Engine, module: Module) -> None:
    """Shard the module's experts over the expert-parallel ranks."""
    experts = engine.groups.experts
    if experts is None:
        _check_experts_are_full(engine, module)
        return
    from weft.strategy.experts import find_expert_lists, find_experts, parallelize_experts

    _check_lists(engine, find_expert_lists(module))
    if engine.options.has_stages and not find_experts(module):
        return  # all layers of this rank's stages are dense
    # The plan's verification calls the full model.
    _store_rehearsal(engine, module)
    tensor = engine.mesh[TENSOR_AXIS]
    keeps_deferred = engine.data_axes.shards_parameters
    parallelize_experts(module, experts.mesh, tensor_mesh=tensor, keeps_deferred=keeps_deferred)


def _check_lists(engine: Engine, names: list[str]) -> None:
    """Raise ValueError for options that lists of experts, which are to be sharded, do not support."""
    if not names:
        return
    options = engine.options
    unsupported = {
        "context-parallel ranks": engine.context_group is not None,
        "pipeline stages": options.has_stages,
        "compile": options.compile is not None,
        f"optimizer_state={options.optimizer_state!r}": options.optimizer_state != "float32",
        f"master_weights={options.master_weights!r}": options.master_weights != "float32",
        # A block's recomputation gathers the experts, which FSDP2 does not expect before their own backward.
        "activation_checkpointing='selective' with zero_stage 2 or 3": (
            options.activation_checkpointing == "selective" and engine.data_axes.shards_parameters
        ),
    }
    found = next((option for option, is_given in unsupported.items() if is_given), None)
    if found is not None:
        raise ValueError(
            f"{engine.name} got {found} for a model with the list of experts '{names[0]}', and shards experts in an "
            "nn.ModuleList only without that option; leave it out, or do not shard the experts."
        )


def _check_experts_are_full(engine: Engine, module: Module) -> None:
    if "weft.strategy.experts" not in sys.modules:
        return
    from weft.strategy.experts.layer import state_of_experts

    for name, inner in module.named_modules():
        state = state_of_experts(inner)
        if state is not None:
            raise ValueError(
                f"{engine.name} got a layout without expert-parallel ranks for a model whose experts in '{name}' are "
                f"sharded over {state.num_data} of them already; pass the layout of the earlier run, or build the "
                "model anew."
            )


def _shard_layers(engine: Engine, module: Module) -> None:
    from weft.strategy import parallelize

    assert engine.plan is not None
    shards_further = engine.data_axes.shards_parameters
    stays_plain = shards_further and not engine.options.has_stages
    parallelize(module, engine.mesh, engine.plan, keeps_plain_on_one_rank=stays_plain, keeps_deferred=shards_further)
    if "weft.strategy.experts" in sys.modules:
        from weft.strategy.experts.lists import ExpertList

        _check_lists(engine, [name for name, each in module.named_modules() if isinstance(each, ExpertList)])


def _shard_sequences(engine: Engine, module: Module) -> None:
    """Shard the module's sequences over the context-parallel ranks; without any, undo what an earlier run has done."""
    if engine.context_group is None and "weft.strategy.context" not in sys.modules:
        return
    from weft.strategy.context import parallelize_context, remove_context
    from weft.strategy.pipeline import find_staged

    if engine.context_group is None:
        remove_context(module)
    else:
        found = find_staged(module)
        parallelize_context(
            module,
            engine.context_group,
            attention=engine.options.context_attention,
            skeleton=None if found is None else found[1].skeleton,
        )


def _check_gated_mlps(engine: Engine, module: Module) -> None:
    from weft.strategy.modules.gate_up import gate_up_of

    if not engine.options.join_gate_up:
        return
    precision = str(engine.precision.precision)
    if precision.endswith("-mixed"):
        raise ValueError(
            f"{engine.name} got join_gate_up=True with precision={precision!r}, which multiplies with separate copies "
            "of the weights; use another precision, or leave join_gate_up out."
        )
    # A stage of a pipeline may have no MLP.
    if not engine.options.has_stages and all(gate_up_of(each) is None for each in module.modules()):
        raise ValueError(
            f"{engine.name} got join_gate_up=True, but none of the model's MLPs can be joined: an MLP must be gated, "
            "have no biases of gate and up, and be one operator (column_row_mlp in weft.strategy.report, which says "
            "why an MLP is not); leave join_gate_up out."
        )


def join_weights(engine: Engine, module: Module) -> None:
    """Join the weights of gated MLPs if the option asks for it, once they are on their device."""
    from weft.strategy import join_gate_up

    if engine.options.join_gate_up:
        engine.console.log(f"weft joins the gate and up weights of {join_gate_up(module)} MLPs.")


def _shard_over_data_axes(engine: Engine, module: Module, **shard_options: Any) -> None:
    from weft.strategy.data_parallel.fully_sharded import mixed_precision_policy

    policy = mixed_precision_policy(str(engine.precision.precision))
    if engine.pipeline is None:
        engine.data_axes.shard(module, policy, offload_policy=engine.parameter_offload, **shard_options)
    elif engine.data_axes.shards_parameters and not engine.pipeline.is_fully_sharded:
        axes = engine.data_axes
        engine.pipeline.fully_shard(axes.sharding_mesh, mp_policy=policy, expert_mesh=axes.expert_sharding_mesh)
    if engine.context_group is not None:
        from weft.strategy.context import carry_through_fsdp

        carry_through_fsdp(module)


def move_unsharded(module: Module, device: torch.device) -> None:
    """Move the buffers of a module, and the parameters that FSDP2 does not shard, to a device."""
    from weft.strategy.data_parallel.fully_sharded import fsdp_roots

    roots: list[Any] = fsdp_roots(module)
    sharded = {parameter for root in roots for parameter in root.parameters()}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
        for parameter in owner._parameters.values():
            if parameter is not None and parameter not in sharded:
                parameter.data = parameter.data.to(device)


def is_on(module: Module, device: torch.device) -> bool:
    """Return whether all parameters and buffers of a module are on a device."""
    return all(tensor.device == device for tensor in (*module.parameters(), *module.buffers()))


def _log_building_advice(engine: Engine, module: Module) -> None:
    """Log advice if every rank has built the full model and keeps only a shard of it."""
    num_bytes = materialized_bytes(module)
    is_worth_logging = num_bytes >= max(_LARGE_BYTES, sum(p.nbytes for p in module.parameters()) // 2)
    shards_parameters = engine.data_axes.shards_parameters
    num_shards = engine.mesh.size() if shards_parameters else engine.tensor_parallel_group.size()
    if is_worth_logging and num_shards > 1 and engine.options.empty_init:
        engine.console.log(
            f"weft got a model that was built in full, {num_bytes / 1e9:.3f} GB on every rank: build it in "
            f"{engine.building_context}, and each rank materializes only its shards."
        )


def _checkpoint_activations(engine: Engine, module: Module) -> None:
    from weft.strategy import checkpoint_activations

    options = engine.options
    names = checkpoint_activations(module, options.activation_checkpointing, offload=options.activation_offload)
    if names:
        shown = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
        engine.console.log(f"weft recomputes the activations of {len(names)} modules in the backward: {shown}.")
