"""Stages whose blocks shard the sequence over tensor-parallel ranks, compared with one device."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ops.collectives.profiled import collectives_of
from strategy.sequence_models import ATTENTION, ROWS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import SequenceParallel
from torch.utils.checkpoint import checkpoint

import weft
from support.extended import extended_unless
from support.hugging_face import VOCAB, language_model
from support.models import Gpt2, Llama, LlamaArgs, LlamaBlock, token_batches
from support.parity import assert_close
from support.ranks import on_ranks
from weft.strategy import Plan, checkpoint_activations, report
from weft.strategy._plan import default_stages_per_rank
from weft.strategy.pipeline import SCHEDULES, Pipeline, Schedule

TOLERANCE = 1e-9
NAMES = ("pipeline_parallel", "data_parallel", "tensor_parallel")
BATCHES = token_batches(3, 37)  # four sequences of nine tokens: uneven shards
RULES = {"tok_embeddings": "vocab_embedding", "output": "column_gather_output", **ROWS, **ATTENTION}
FUSED = {
    **{name: style for name, style in RULES.items() if name not in ROWS},
    "layers.*.feed_forward": "column_row_mlp",
}
# Rank 0 has the stages 0 and 3, rank 1 the stages 1 and 2, whose blocks are neighbours in the list.
V_SHAPED = "0F0,0F1,0F2,3F0,3B0,3F1,3B1,3F2,3B2,0B0,0B1,0B2\n1F0,2F0,1F1,2F1,1F2,2F2,2B0,1B0,2B1,1B1,2B2,1B2"

Batch = tuple[Tensor, Tensor]


def mesh_of(world_size: int, data_size: int = 1) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size // (2 * data_size), data_size, 2), mesh_dim_names=NAMES)


def llama(num_layers: int = 4, tie_head: bool = False) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaArgs(n_layers=num_layers, tie_head=tie_head, dtype=torch.float64))


def cuts_for(kind: str) -> list[str]:
    """Return the cuts of a Llama of four layers for two ranks."""
    return ["layers.1", "layers.2", "layers.3"] if default_stages_per_rank(kind) == 2 else ["layers.2"]


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def varying_lengths(batch: Batch, count: int) -> list[Batch]:
    """Split a batch into micro-batches of 9, 4 and 7 tokens, with 1, 2 and 1 sequences."""
    bounds = ((slice(0, 1), 9), (slice(1, 3), 4), (slice(3, 4), 7))
    return [(batch[0][rows, :length], batch[1][rows, :length]) for rows, length in bounds]


def num_tokens(batch: Batch) -> int:
    return batch[1].numel()


def assert_matches_one_device(
    reference: nn.Module,
    mesh: DeviceMesh,
    cuts: Sequence[str],
    plan: Any = FUSED,
    *,
    schedule: str | Schedule = "1f1b",
    num_micro_batches: int | None = 3,
    layer_stages: dict[str, int] | None = None,
    split: Callable[[Batch, int], list[Batch]] | None = None,
    change: Callable[[nn.Module], object] | None = None,
    is_fully_sharded: bool = False,
    loss_of: Callable[[nn.Module, Any], Tensor] = next_token,
    batches: Sequence[Any] = BATCHES,
    tolerance: float = TOLERANCE,
) -> nn.Module:
    """Train steps of SGD in stages; compare losses, gradients and weights; return the model in stages."""
    model = copy.deepcopy(reference)
    options = {"schedule": schedule, "num_micro_batches": num_micro_batches, "layer_stages": layer_stages}
    pipeline = Pipeline(model, mesh, cuts, **options)
    weft.parallelize(model, mesh, plan if isinstance(plan, Plan) else Plan(plan, sequence_parallel=True))
    if change is not None:
        change(model)
    data_axis = mesh["data_parallel"]
    if is_fully_sharded:
        pipeline.fully_shard(data_axis)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    expected = dict(reference.named_parameters(remove_duplicate=False))
    step_options = {} if split is None else {"split": split, "weight": num_tokens}
    for batch in batches:
        local = batch
        if data_axis.size() > 1:
            local = tuple(tensor.chunk(data_axis.size())[data_axis.get_local_rank()] for tensor in batch)
        loss = pipeline.step(local, lambda micro_batch: loss_of(model, micro_batch), **step_options)
        parts = [batch] if split is None else split(batch, 0)
        total = sum(map(num_tokens, parts)) if split is not None else 1
        theirs = sum(loss_of(reference, part) * (num_tokens(part) / total if split else 1) for part in parts)
        theirs.backward()
        if data_axis.size() == 1:
            assert abs(loss - theirs) <= tolerance * abs(theirs)
        for name, parameter in model.named_parameters():
            gradient = expected[name].grad
            assert_close(name, parameter.grad.full_tensor(), gradient, tolerance * (gradient.norm().item() + 1e-3))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.full_tensor(), expected[name], tolerance * expected[name].norm().item())
    return model


def shards_sequence(model: nn.Module) -> bool:
    return "activations between the blocks' layers are sharded along the sequence" in report(model).notes


def _is_usual(tie_head: bool, kind: str) -> bool:
    return not tie_head or kind in ("1f1b", "interleaved", "zero_bubble")


@on_ranks(4)
@pytest.mark.parametrize(("tie_head", "kind"), extended_unless(_is_usual, itertools.product((False, True), SCHEDULES)))
def test_every_schedule_matches_one_device(world_size: int, kind: str, tie_head: bool) -> None:
    """Micro-batches of 2, 1 and 1 sequences."""
    cuts = cuts_for(kind)
    plan = RULES if tie_head else FUSED
    model = assert_matches_one_device(llama(tie_head=tie_head), mesh_of(world_size), cuts, plan, schedule=kind)
    assert shards_sequence(model)


@on_ranks(4)
def test_neighbouring_stages_on_one_rank_match_one_device(world_size: int) -> None:
    cuts = ["layers.2", "layers.4", "layers.6"]
    schedule = Schedule.parse(V_SHAPED)
    assert_matches_one_device(llama(num_layers=8), mesh_of(world_size), cuts, schedule=schedule, num_micro_batches=None)


@on_ranks(8, timeout=300)
@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble", "interleaved"])
def test_fully_sharded_stages_match_one_device(world_size: int, kind: str) -> None:
    if not hasattr(FSDPModule, "finalize_backward"):
        pytest.skip("this torch's FSDP2 has no finalize_backward")
    cuts = cuts_for(kind)
    assert_matches_one_device(
        llama(tie_head=True),
        mesh_of(world_size, data_size=2),
        cuts,
        "auto",
        schedule=kind,
        num_micro_batches=2,
        is_fully_sharded=True,
    )


class CheckpointingBlock(LlamaBlock):
    """Recomputes itself, by its own code."""

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(super().forward, *args, use_reentrant=False)


def checkpointing_llama() -> Llama:
    model = llama()
    for layer in model.layers:
        layer.__class__ = CheckpointingBlock
    return model


CHECKPOINTS = ("none", "full", "selective", "layers.*.attention", "own code")


@on_ranks(4)
@pytest.mark.parametrize(
    ("what", "kind"),
    extended_unless(
        lambda what, kind: what == "full" or kind in ("1f1b", "zbv"),
        itertools.product(CHECKPOINTS, ("1f1b", "interleaved", "zero_bubble", "zbv")),
    ),
)
def test_micro_batches_of_several_lengths_match_one_device(world_size: int, what: str, kind: str) -> None:
    """A backward recomputes with the lengths of its own forward, after forwards of other lengths."""
    model = checkpointing_llama() if what == "own code" else llama()
    cuts = cuts_for(kind)
    assert_matches_one_device(
        model,
        mesh_of(world_size),
        cuts,
        schedule=kind,
        split=varying_lengths,
        change=None if what == "own code" else lambda m: checkpoint_activations(m, what),
    )


@on_ranks(4)
@pytest.mark.parametrize("length", [1, 2, 9])
def test_evaluation_matches_one_device(world_size: int, length: int) -> None:
    """With one token, the second tensor-parallel rank has none."""
    reference = llama()
    model = copy.deepcopy(reference)
    pipeline = Pipeline(model, mesh_of(world_size), ["layers.2"], num_micro_batches=3)
    weft.parallelize(model, mesh_of(world_size), Plan("auto", sequence_parallel=True))
    tokens = BATCHES[0][0][:, :length]
    outputs = pipeline.evaluate(tokens, model)
    if pipeline.has_last_stage:
        torch.testing.assert_close(torch.cat(outputs), reference(tokens).detach(), rtol=1e-10, atol=1e-12)


@on_ranks(4)
@pytest.mark.parametrize("plan", ["auto", "rules"])
@pytest.mark.parametrize(
    ("cut", "layer_stages", "sharded_on"),
    [
        ("layers.0", {}, (False, True)),  # the first stage has no block, nor has the last one in the next case
        ("norm", {}, (True, False)),
        ("layers.1", {}, (True, True)),  # one block, and three
        # A block whose layers are on two stages gets all tokens.
        ("layers.2.feed_forward", {"layers.2.attention_norm": 0}, (True, True)),
        ("layers.0.feed_forward", {"layers.0.attention_norm": 0}, (False, True)),
    ],
    ids=str,
)
def test_any_cut_matches_one_device(
    world_size: int, cut: str, layer_stages: dict[str, int], sharded_on: tuple[bool, bool], plan: str
) -> None:
    mesh = mesh_of(world_size)
    rules = "auto" if plan == "auto" else FUSED
    model = assert_matches_one_device(llama(), mesh, [cut], rules, layer_stages=layer_stages)
    assert shards_sequence(model) == sharded_on[mesh["pipeline_parallel"].get_local_rank()]


class InSequential(nn.Module):
    """Blocks in an nn.Sequential, of which each stage has one."""

    def __init__(self) -> None:
        super().__init__()
        gpt2 = Gpt2(dtype=torch.float64)
        self.wte = gpt2.wte
        self.h = nn.Sequential(*gpt2.h)
        self.head = nn.Linear(16, 37, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.h(self.wte(tokens)))


@on_ranks(4)
def test_one_block_of_sequential_per_stage_matches_one_device(world_size: int) -> None:
    torch.manual_seed(0)
    model = assert_matches_one_device(InSequential(), mesh_of(world_size), ["h.1"], "auto", schedule="zero_bubble")
    assert shards_sequence(model)


class WithDropout(LlamaBlock):
    def forward(self, *args: Tensor) -> Tensor:
        return self.dropout(super().forward(*args))


@on_ranks(4)
def test_blocks_of_several_stages_may_share_a_module(world_size: int) -> None:
    model, dropout = llama(), nn.Dropout(0.0)
    for layer in model.layers:
        layer.__class__, layer.dropout = WithDropout, dropout
    cuts = ["layers.1", "layers.2", "layers.3"]
    assert_matches_one_device(model, mesh_of(world_size), cuts, schedule="interleaved")


@on_ranks(4)
def test_unsharded_blocks_get_all_tokens(world_size: int) -> None:
    """Rules shard the second and the last block."""
    rules = {name.replace("*", str(i)): style for i in (1, 3) for name, style in {**ROWS, **ATTENTION}.items()}
    for cuts, kind in ((["layers.2"], "1f1b"), (["layers.1", "layers.2", "layers.3"], "interleaved")):
        assert_matches_one_device(llama(), mesh_of(world_size), cuts, rules, schedule=kind)


@on_ranks(4)
def test_rule_of_another_stage_shards_sequence(world_size: int) -> None:
    """A rule with the style sequence_parallel makes the plan of all stages sequence-parallel."""
    for style in ("sequence_parallel", SequenceParallel()):
        plan = Plan({**FUSED, "layers.3.ffn_norm": style})
        model = assert_matches_one_device(llama(), mesh_of(world_size), ["layers.2"], plan)
        assert shards_sequence(model)


@on_ranks(4)
def test_hugging_face_llama_matches_one_device(world_size: int) -> None:
    """Its own code checkpoints its blocks, and micro-batches have several lengths."""
    pytest.importorskip("transformers")

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(input_ids=batch[0], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    torch.manual_seed(0)
    reference = language_model("llama", num_hidden_layers=4).train()
    reference.gradient_checkpointing_enable({"use_reentrant": False})
    cuts = ["model.layers.1", "model.layers.2", "model.layers.3"]
    for kind, names in (("1f1b", cuts[1:2]), ("interleaved", cuts)):
        assert_matches_one_device(
            copy.deepcopy(reference),
            mesh_of(world_size),
            names,
            "auto",
            schedule=kind,
            split=varying_lengths,
            loss_of=loss_of,
            batches=token_batches(2, VOCAB),
            tolerance=1e-6,  # its norms compute in float32
        )


@on_ranks(4)
def test_dropout_differs_between_token_shards(world_size: int) -> None:
    """Stages draw masks for the tokens of the full sequence, so that replicated gradients agree and steps repeat."""
    torch.manual_seed(0)
    mesh = mesh_of(world_size)
    model = Gpt2(n_layer=4, dropout=0.5, dtype=torch.float64)
    pipeline = Pipeline(model, mesh, ["h.2"], num_micro_batches=2)
    weft.parallelize(model, mesh, Plan("auto", sequence_parallel=True))
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        losses.append(pipeline.step(BATCHES[0], lambda micro_batch: next_token(model, micro_batch)))
        weft.strategy.check_replicated_gradients(model)
    assert losses[0] == losses[1] and torch.isfinite(losses[0])


# One block: an all-gather before and a reduce-scatter after its attention and its MLP, and the same in the backward,
# where the fused MLP gathers its input again and the gradients of two norms are summed.
BLOCK = Counter({"all_gather_into_tensor": 2 + 3, "reduce_scatter_tensor": 2 + 2, "all_reduce": 2})
# One region: its last block gathers the tokens, and the backward of its first block the gradient.
REGION = Counter({"all_gather_into_tensor": 2})
# The second half of a split backward gathers the gradient of a row layer and of an MLP's output once more.
SPLIT_BLOCK = Counter({"all_gather_into_tensor": 2})


@on_ranks(4)
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_stage_adds_one_gather_and_one_scatter(world_size: int, kind: str) -> None:
    """A stage communicates as its blocks do in the full model, and gathers once in the forward and in the backward."""
    mesh = mesh_of(world_size)
    blocks = {name: style for name, style in FUSED.items() if name.startswith("layers")}
    cuts = cuts_for(kind)
    model = llama()
    pipeline = Pipeline(model, mesh, cuts, schedule=kind, num_micro_batches=2)
    weft.parallelize(model, mesh, Plan(blocks, sequence_parallel=True))
    expected = Counter({"broadcast": 1})  # of the loss
    for part, times in ((BLOCK, 2), (REGION, len(pipeline.stages))):
        expected.update({name: 2 * times * count for name, count in part.items()})
    actions = pipeline.schedule(2).ranks[mesh["pipeline_parallel"].get_local_rank()]
    # The first half does nothing on the first stage, which needs no input gradient.
    split = sum(action.kind == "W" and action.stage > 0 for action in actions)
    num_blocks = split * 2 // len(pipeline.stages)
    expected.update({name: num_blocks * count for name, count in SPLIT_BLOCK.items()})
    # A message is a header and one tensor.
    expected["send"] = 2 * sum(action.kind in ("SEND_F", "SEND_B") for action in actions)
    expected["recv"] = 2 * sum(action.kind in ("RECV_F", "RECV_B") for action in actions)
    collectives_of(lambda: pipeline.step(BATCHES[0], lambda part: next_token(model, part)), dict(expected))


class Skipping(Llama):
    """Adds the output of the first block to that of the last one."""

    def forward(self, tokens: Tensor) -> Tensor:
        outputs = list(
            itertools.accumulate(
                self.layers, lambda x, layer: layer(x, self.cos, self.sin), initial=self.tok_embeddings(tokens)
            )
        )
        return self.output(self.norm(outputs[-1] + outputs[1]))


@on_ranks(4)
def test_sharded_tokens_that_skip_a_stage_raise(world_size: int) -> None:
    mesh = mesh_of(world_size)
    model = Skipping(LlamaArgs(n_layers=4))
    pipeline = Pipeline(model, mesh, ["layers.2"], num_micro_batches=2)
    weft.parallelize(model, mesh, Plan(FUSED, sequence_parallel=True))
    if pipeline.has_last_stage:
        return
    with pytest.raises(ValueError, match=r"the output of 'layers.0' is used on a later stage, but the plan shards"):
        pipeline.step(BATCHES[0], lambda micro_batch: next_token(model, micro_batch))


@on_ranks(4)
def test_gathered_tokens_may_skip_a_stage(world_size: int) -> None:
    torch.manual_seed(0)
    reference = Skipping(LlamaArgs(n_layers=4, dtype=torch.float64))
    assert_matches_one_device(reference, mesh_of(world_size), ["layers.1"], schedule="zero_bubble")


@on_ranks(4)
@pytest.mark.parametrize("plan", [{"tok_embeddings": "vocab_embedding"}, {"output": "column_gather_output"}])
def test_plan_without_sharded_blocks_raises_on_all_stages(world_size: int, plan: dict[str, str]) -> None:
    model = llama()
    Pipeline(model, mesh_of(world_size), ["layers.2"])
    with pytest.raises(ValueError, match="finds no repeated blocks with layers that the plan shards"):
        weft.parallelize(model, mesh_of(world_size), Plan(plan, sequence_parallel=True))
    dist.barrier()
