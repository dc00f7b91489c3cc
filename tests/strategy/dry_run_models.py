"""Models, batches and a training loop with values, for the comparison of dry runs with measured ranks."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft
from support.example_modules import load_example
from support.hugging_face import language_model
from weft.strategy import Plan, StepInBackward, checkpoint_activations, deferred_init, fuse
from weft.strategy.context import carry_through_fsdp, parallelize_context
from weft.strategy.context.groups import context_groups
from weft.strategy.data_parallel import GradientReducer, ShardedStates, apply_fsdp
from weft.strategy.data_parallel.fully_sharded import free_gathered, mixed_precision_policy, set_gradient_sync
from weft.strategy.data_parallel.reducer import average_gradient
from weft.strategy.data_parallel.replica_groups import ReplicaGroups
from weft.strategy.experts import find_experts, parallelize_experts
from weft.strategy.pipeline import Pipeline, find_staged
from weft.strategy.pipeline.last_stage_modules import LastStageModules
from weft.strategy.planning.layout import Sizes
from weft.strategy.verification.evidence import store_rehearsal

SEQUENCES, TOKENS = 4, 64
NUM_STEPS = 3


class TextModel(nn.Module):
    """The model of the examples with its loss; has `training_step` as a LightningModule has it."""

    def __init__(self) -> None:
        super().__init__()
        example = load_example("model")
        self.model = example.Transformer(example.ModelArgs(dim=128, n_layers=3, n_heads=8, hidden_dim=384))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def text_batch() -> Tensor:
    return torch.arange(SEQUENCES * (TOKENS + 1)).remainder(251).view(SEQUENCES, TOKENS + 1)


def long_text_batch() -> Tensor:
    """Return a batch whose messages between stages are large enough for receive buffers that are used again."""
    return torch.arange(32 * (2 * TOKENS + 1)).remainder(251).view(32, 2 * TOKENS + 1)


_SIZES = {"vocab_size": 512, "max_position_embeddings": 128}
_LLAMA = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8}
_GPT2 = {"vocab_size": 512, "n_embd": 128, "n_layer": 3, "n_head": 8, "n_positions": 128}


def llama(num_heads: int = 8) -> nn.Module:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    return language_model("llama", torch.float32, **_SIZES, **_LLAMA | heads, use_cache=False)


def gpt2() -> nn.Module:
    return language_model("gpt2", torch.float32, **_GPT2, use_cache=False)


_EXPERTS = {"hidden_size": 64, "num_hidden_layers": 2, "use_cache": False}


def experts_of(family: str, implementation: str = "eager", **changes: Any) -> nn.Module:
    """Return a mixture of experts of Hugging Face that chooses all experts equally often."""
    model: Any = language_model(family, torch.float32, **{**_SIZES, **_EXPERTS, **changes})
    model.set_experts_implementation(implementation)
    for name in find_experts(model):
        model.get_submodule(name).register_forward_pre_hook(_balance_choices)
    return model


def _balance_choices(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
    """Overwrite the router's choices, whose memory stays that of the router's choices."""
    choices = args[1]
    if type(choices) is Tensor:  # a dry run chooses by itself
        choices.data.copy_(torch.arange(choices.numel()).remainder(module.num_experts).view(choices.shape))


def mixtral() -> nn.Module:
    return experts_of("mixtral", num_local_experts=8)


def grouped_mixtral() -> nn.Module:
    return experts_of("mixtral", "grouped_mm", num_local_experts=8)


def uneven_mixtral() -> nn.Module:
    return experts_of("mixtral", num_local_experts=7)


def qwen3_moe() -> nn.Module:
    return experts_of("qwen3_moe", num_experts=8, num_hidden_layers=1)


def olmoe() -> nn.Module:
    return experts_of("olmoe", num_experts=8, num_hidden_layers=1)


def gpt_oss() -> nn.Module:
    return experts_of("gpt_oss", num_local_experts=8, num_hidden_layers=1)


def deepseek() -> nn.Module:
    return experts_of("deepseek_v3")


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(SEQUENCES * TOKENS).remainder(512).view(SEQUENCES, TOKENS)
    return {"input_ids": ids, "labels": ids.clone()}


class ImageModel(nn.Module):
    """A ResNet of torchvision, with its loss."""

    def __init__(self, name: str = "resnet18") -> None:
        super().__init__()
        import torchvision

        self.net = getattr(torchvision.models, name)(num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def resnet50() -> nn.Module:
    return ImageModel("resnet50")


def images() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 3, 64, 64), torch.arange(2)


_fresh_groups: list[dist.ProcessGroup] = []


def _group_of_model() -> dist.ProcessGroup:
    """Return the last new group of all ranks; in a dry run, which makes none, the default group.

    The default group of ranks that train has staging buffers that earlier cases have touched.
    """
    return _fresh_groups[-1] if _fresh_groups else dist.group.WORLD


class RingBlock(nn.Module):
    """Attention over a sequence whose tokens are sharded over all ranks."""

    def __init__(self, window: int | None, documents: list[int] | None) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 4 * 64)
        self.out = nn.Linear(128, 64)
        self.window = window
        self.documents = documents

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (16, 16)).transpose(1, 2).split((8, 4, 4), 1)
        group_name = _group_of_model().group_name
        mask: dict[str, Any] = {"is_causal": True, "window": self.window}
        if self.documents is not None:
            mask["document_offsets"] = torch.tensor(self.documents)
        y = weft.ops.ring_attention(query, key, value, group_name=group_name, **mask)
        return self.out(y.transpose(1, 2).flatten(2))


class RingModel(nn.Module):
    """Blocks of ring attention, with a loss."""

    def __init__(self, window: int | None = None, documents: list[int] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RingBlock(window, documents) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def masked_ring() -> RingModel:
    return RingModel(window=200, documents=[0, 300, 700])


class MoeBlock(nn.Module):
    """A mixture of two experts on each rank, all of which are chosen equally often."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 96, 64))
        self.down = nn.Parameter(torch.randn(2, 64, 96))

    def forward(self, x: Tensor) -> Tensor:
        num_experts = 2 * dist.get_world_size()
        scores = (x @ x.t()).sum(1, keepdim=True).sigmoid()
        expert_ids = torch.arange(2 * len(x), device=x.device).view(-1, 2) % num_experts
        group = _group_of_model().group_name
        rows, counts, *routes = weft.ops.moe_dispatch(x, expert_ids, num_experts=num_experts, group_name=group)
        rows = weft.ops.grouped_linear(weft.ops.grouped_linear(rows, self.up, counts).relu(), self.down, counts)
        return weft.ops.moe_combine(rows, scores.expand(-1, 2), *routes, group_name=group)


class MoeModel(nn.Module):
    """Blocks with a mixture of experts, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoeBlock() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def many_rows() -> Tensor:
    return torch.zeros(512, 64)


def long_sequence() -> Tensor:
    return torch.zeros(2, 512, 64)


# By name: the function that builds the model, the function that makes the batch, whether it is for training_step.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "text": (TextModel, text_batch),
    "long text": (TextModel, long_text_batch),
    "llama": (llama, tokens),
    "llama_of_two_heads": (partial(llama, 2), tokens),
    "gpt2": (gpt2, tokens),
    "ring": (RingModel, long_sequence),
    "ring_masked": (masked_ring, long_sequence),
    "moe": (MoeModel, many_rows),
    "mixtral": (mixtral, tokens),
    "grouped mixtral": (grouped_mixtral, tokens),
    "uneven mixtral": (uneven_mixtral, tokens),
    "qwen3_moe": (qwen3_moe, tokens),
    "olmoe": (olmoe, tokens),
    "gpt_oss": (gpt_oss, tokens),
    "deepseek": (deepseek, tokens),
    "resnet18": (ImageModel, images),
    "resnet50": (resnet50, images),
}


def measured(rank: int, world_size: int, name: str, layout: str, **options: Any) -> dict[str, dict[str, int]]:
    """Train a model of `MODELS` on this rank; return the peak of each phase by category, as a dry run does."""
    from ops.memory.counting import counted

    with counted():
        gc.collect()  # what earlier cases have left would be freed while memory is counted
        before = weft.memory.by_category()
        phases = _train(name, layout, **options)
    result: dict[str, dict[str, int]] = {}
    for phase in phases:
        usage = {category: size - before[category] for category, size in phase.peak.items()}
        if phase.name in ("forward", "backward", "step"):
            largest = result.get(phase.name)
            if largest is None or sum(usage.values()) > sum(largest.values()):
                result[phase.name] = usage
    return result


def _mesh_of_experts(mesh: DeviceMesh, axes: dict[str, int]) -> DeviceMesh:
    """Return a mesh with these axes; if an axis has all ranks, like data_parallel in `mesh`, with the group of that."""
    names = tuple(axes)
    if axes["expert_parallel"] < mesh["data_parallel"].size() or mesh["data_parallel"].size() < mesh.size():
        groups = dict.fromkeys(names, "cpu:weft")
        return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=names, backend_override=groups)
    alone, _ = dist.new_subgroups(1)
    groups = [*[alone] * (len(axes) - 1), mesh["data_parallel"].get_group()]
    return DeviceMesh.from_group(groups, "cpu", mesh.mesh.view(tuple(axes.values())), mesh_dim_names=names)


def _train(
    name: str,
    layout: str,
    *,
    plan: Any = "auto",
    precision: str = "32-true",
    activation_checkpointing: str = "none",
    optimizer_state: str = "float32",
    master_weights: str = "float32",
    optimizer_in_backward: bool | str = False,
    sequence_parallel: bool = False,
    context_attention: str = "ring",
    zero_stage: int = 3,
    pipeline_cuts: Sequence[str] = (),
    pipeline_schedule: str = "1f1b",
    num_micro_batches: int | None = None,
    accumulate_grad_batches: int = 1,
) -> list[weft.memory.Phase]:
    build, make_batch = MODELS[name]
    num_ranks = dist.get_world_size()
    sizes = Sizes.parse(layout).resolve(num_ranks, num_ranks)
    shape = {"data_replicate": sizes.data_replicate, "data_parallel": sizes.sharding_ranks}
    if sizes.pipeline_parallel > 1:
        shape = {"pipeline_parallel": sizes.pipeline_parallel, **shape}
    names = (*shape, "tensor_parallel")
    # New groups for all axes, and for models that communicate themselves.
    _fresh_groups[:] = [dist.new_group(backend="cpu:weft")]
    new_groups = dict.fromkeys(names, "cpu:weft")
    mesh_shape = (*shape.values(), sizes.tensor_parallel)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names, backend_override=new_groups)
    shards = sizes.sharding_ranks > 1 and zero_stage >= 2
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    with deferred_init():
        model = build().to(dtype).train()
    steps = hasattr(model, "training_step")
    plan = Plan(plan, sequence_parallel=sequence_parallel)
    pipeline = None
    if sizes.pipeline_parallel > 1:
        [(divided_name, divided)] = model.named_children() if steps else [("", model)]
        options = {"schedule": pipeline_schedule, "num_micro_batches": num_micro_batches}
        if sizes.tensor_parallel > 1:  # for the verification of the plan, as under the Trainer
            store_rehearsal(model)
        pipeline = Pipeline(divided, mesh, pipeline_cuts, **options)
        if steps:
            LastStageModules(model, divided_name, pipeline.has_last_stage)
    expert_mesh = None
    if sizes.expert_parallel > 1:
        num_experts = sizes.expert_parallel * sizes.tensor_parallel
        outer = {name: size for name, size in zip(names, mesh_shape, strict=True) if name not in names[-2:]}
        axes = {**outer, "data_parallel": mesh.size() // math.prod(outer.values()) // num_experts}
        axes["expert_parallel"] = num_experts
        expert_mesh = _mesh_of_experts(mesh, axes)
        parallelize_experts(model, expert_mesh, tensor_mesh=mesh["tensor_parallel"], keeps_deferred=shards)
    holders = None if expert_mesh is None else expert_mesh["data_parallel"]
    of_experts = None if holders is None else holders.get_group()  # without replicas
    stays_plain = shards and pipeline is None
    weft.parallelize(model, mesh["tensor_parallel"], plan, keeps_plain_on_one_rank=stays_plain, keeps_deferred=shards)
    if sizes.context_parallel > 1:
        context = context_groups(mesh.mesh, sizes.context_parallel).context
        skeleton = None if pipeline is None else find_staged(model)[1].skeleton
        parallelize_context(model, context, attention=context_attention, skeleton=skeleton)
    checkpoint_activations(model, activation_checkpointing)
    if pipeline is not None and shards:
        policy = mixed_precision_policy(precision)
        pipeline.fully_shard(mesh["data_parallel"], mp_policy=policy, expert_mesh=holders)
        carry_through_fsdp(model)
    elif shards:
        axes = mesh["data_replicate", "data_parallel"] if sizes.data_replicate > 1 else mesh["data_parallel"]
        policy, entry_points = mixed_precision_policy(precision), ["training_step"] if steps else None
        options = {"mp_policy": policy, "entry_points": entry_points, "expert_mesh": holders}
        apply_fsdp(model, axes, reshard_after_forward=zero_stage == 3, **options)
        carry_through_fsdp(model)
    optimizer = model.configure_optimizers() if steps else torch.optim.AdamW(model.parameters())
    fuse(optimizer, model, optimizer_state=optimizer_state, master_weights=master_weights)
    reducer = None
    if not shards and sizes.sharding_ranks * sizes.data_replicate > 1 and not optimizer_in_backward:
        reducer = GradientReducer(model, mesh["data_parallel"].get_group(), experts=of_experts)
    if zero_stage == 1:
        ShardedStates(optimizer, mesh["data_parallel"].get_group(), experts=of_experts)
    watch = weft.memory.watch(model, optimizer)
    stepper = None
    if optimizer_in_backward:
        replicas = ReplicaGroups(mesh["data_parallel"].get_group(), of_experts)

        def average(parameter: Tensor) -> None:
            if not shards and replicas.group.size() > 1:
                average_gradient(parameter, replicas.of(parameter))

        stepper = StepInBackward(model, optimizer, average, optimizer_in_backward == "rows")
    batch: Any = make_batch()
    if isinstance(batch, tuple):
        batch = tuple(each.to(dtype) if each.is_floating_point() else each for each in batch)
    gc.collect()
    weft.memory.begin_phase("init")
    weft.memory.reset_peak()
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")

    def loss_fn(batch: Any) -> Tensor:
        with weft.strategy.local_parameters():
            loss: Tensor = model.training_step(batch, 0) if steps else model(**batch).loss
        return loss

    for _ in range(NUM_STEPS):
        watch.forward_begins(batch)
        if pipeline is not None:
            optimizer.zero_grad()
            with mixed, nullcontext() if reducer is None else reducer.paused():
                pipeline.step(batch, loss_fn, stepper=stepper)
            if reducer is not None:
                reducer.finish()
            optimizer.step()
            continue
        for micro_batch in range(accumulate_grad_batches):
            if micro_batch > 0:
                watch.forward_begins(batch)
            default, _ = torch.get_default_dtype(), torch.set_default_dtype(dtype)
            with mixed:
                loss = loss_fn(batch)
            torch.set_default_dtype(default)
            if micro_batch == 0:
                optimizer.zero_grad()
            watch.backward_begins()
            if shards and accumulate_grad_batches > 1:  # as the Trainer does
                set_gradient_sync(model, micro_batch == accumulate_grad_batches - 1)
            loss.backward()
            del loss
        if reducer is not None:
            reducer.finish()
        optimizer.step()
        if shards:
            free_gathered(model)
    watch.remove()
    return weft.memory.timeline()
