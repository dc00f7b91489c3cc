"""compile_blocks: one graph for equal blocks, without breaks, with weft's operators in it, and unchanged results."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from support.hugging_face import VOCAB, language_model
from support.models import Gpt2, Llama, LlamaArgs
from support.parity import assert_close, assert_gradients_agree, full, tensor_parallel
from support.ranks import on_ranks
from weft.strategy import checkpoint_activations, compile_blocks, local_parameters
from weft.strategy._plan import shard_range
from weft.strategy.data_parallel import apply_fsdp
from weft.strategy.modules.compiled_blocks import CompiledBlock, CompiledBlockError
from weft.strategy.sharding.shard_dropout import range_of_shard

NUM_LAYERS = 3
SIZES = [(4, 8), (4, 8), (2, 8), (4, 10), (6, 12), (3, 14)]  # (rows, tokens); a new number of each comes alone at first
MAX_GRAPHS = 3  # all sizes static; rows dynamic; tokens dynamic, too
AOT = {"backend": "aot_eager", "fullgraph": True}


class Recorder:
    """A backend like aot_eager that keeps the names of the functions in each graph that it compiles."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
        nodes = [node for each in graphs for node in each.graph.nodes if node.op == "call_function"]
        self.graphs.append([str(node.target) for node in nodes])
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return compiled

    def weft_operators(self) -> list[str]:
        """Return the names of weft's operators in the only graph, in order."""
        [names] = self.graphs
        return [name.removeprefix("weft.") for name in names if name.startswith("weft.")]


def _tokens(size: tuple[int, int], vocab: int = 37) -> Tensor:
    return torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(sum(size)))


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return getattr(output, "logits", output)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = _logits(model, tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _train(model: nn.Module, sizes: list[tuple[int, int]]) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for size in sizes:
        optimizer.zero_grad()
        loss = _loss(model, _tokens(size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _assert_same(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(name, full(parameter), expected[name], 1e-10 * expected[name].norm().item())


def _llama(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return Llama(LlamaArgs(dtype=torch.float64, n_layers=NUM_LAYERS, hidden_dim=40, **changes))


# Whether tokens are sharded, and the checkpoints.
CASES = {
    "plan": (False, "none"),
    "selective": (False, "selective"),
    "sequence, full": (True, "full"),
}
CHANGES_SIZES = ("plan", "sequence, full")


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_training_matches_unsharded_with_few_graphs(world_size: int, case: str) -> None:
    shards_sequence, checkpoints = CASES[case]
    reference = _llama()
    model = copy.deepcopy(reference)
    names = list(model.state_dict())
    weft.parallelize(model, tensor_parallel(world_size), weft.strategy.Plan("auto", sequence_parallel=shards_sequence))
    classes = [type(each).__name__ for each in model.modules()]
    checkpoint_activations(model, checkpoints)
    recorder = Recorder()
    assert compile_blocks(model, {"backend": recorder, "fullgraph": True}) == [f"layers.{i}" for i in range(NUM_LAYERS)]
    assert list(model.state_dict()) == names and [type(each).__name__ for each in model.modules()] == classes
    assert recorder.graphs == []

    assert _train(model, SIZES[:1]) == pytest.approx(_train(reference, SIZES[:1]), rel=1e-12)
    assert_gradients_agree(model, reference, 1e-10)
    layers = ["column_linear"] * 3 + ["row_linear"]
    if shards_sequence:
        layers = ["copy_to_group", "gather_from_sequence", "linear_reduce_scatter", "copy_to_group"]
    assert recorder.weft_operators() == [*layers, "column_row_mlp"]  # once for all blocks

    if case not in CHANGES_SIZES:
        assert _train(model, SIZES[:1]) == pytest.approx(_train(reference, SIZES[:1]), rel=1e-10)
        assert len(recorder.graphs) == 1
        return
    assert _train(model, SIZES[1:]) == pytest.approx(_train(reference, SIZES[1:]), rel=1e-10)
    _assert_same(model, reference)
    assert len(recorder.graphs) == MAX_GRAPHS
    for size in SIZES[2:]:  # without gradients, one more graph
        with torch.no_grad():
            torch.testing.assert_close(_logits(model, _tokens(size)), _logits(reference, _tokens(size)))
    assert len(recorder.graphs) <= MAX_GRAPHS + 1


@on_ranks(2)
def test_communication_is_that_of_eager_blocks(world_size: int) -> None:
    mesh, backend = tensor_parallel(world_size), dist.group.WORLD._get_backend(torch.device("cpu"))
    counts: dict[bool, list[int]] = {}
    for is_compiled in (False, True):
        model = weft.parallelize(_llama(), mesh, weft.strategy.Plan("auto", sequence_parallel=True))
        if is_compiled:
            compile_blocks(model, AOT)
        counts[is_compiled] = []
        for _ in range(2):  # the first step compiles
            numbers = [backend._get_sequence_number_for_group()]
            loss = _loss(model, _tokens(SIZES[0]))
            numbers.append(backend._get_sequence_number_for_group())
            loss.backward()
            numbers.append(backend._get_sequence_number_for_group())
            counts[is_compiled] += [after - before for before, after in itertools.pairwise(numbers)]
    assert counts[True] == counts[False] and counts[True][0] > 2 * NUM_LAYERS


@on_ranks(2)
@pytest.mark.parametrize("reshards", [True, False], ids=["zero3", "zero2"])
def test_fsdp_hooks_run_outside_of_the_graph(rank: int, world_size: int, reshards: bool) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    reference = _llama()
    model = weft.parallelize(copy.deepcopy(reference), mesh, "auto", keeps_plain_on_one_rank=True)
    recorder = Recorder()
    compile_blocks(model, {"backend": recorder, "fullgraph": True})
    units = apply_fsdp(model, mesh["data_parallel"], reshard_after_forward=reshards)
    assert "layers.0" in units
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, reference)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        tokens = _tokens((4, 8))
        _loss(model, tokens.chunk(world_size)[rank]).backward()
        (sum(_loss(reference, each) for each in tokens.chunk(world_size)) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
    _assert_same(model, reference)
    [names] = recorder.graphs
    assert not any("all_gather" in name or "c10d" in name for name in names), names


@on_ranks(2)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_decoders_of_hugging_face(world_size: int, family: str) -> None:
    torch.manual_seed(0)
    reference = language_model(family, use_cache=False)
    model = weft.parallelize(copy.deepcopy(reference), tensor_parallel(world_size), "auto")
    checkpoint_activations(model, "full")
    recorder = Recorder()
    assert len(compile_blocks(model, {"backend": recorder, "fullgraph": True})) == 2
    tokens = _tokens((2, 9), VOCAB)
    for each in (model, reference):
        _loss(each, tokens).backward()
    assert_gradients_agree(model, reference, 1e-9)
    assert any(name.startswith(("row_linear", "column_row_mlp")) for name in recorder.weft_operators())


class ShardDropout(nn.Module):
    """Drops features that tensor-parallel ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(self.up(x).relu()).sin())


class ShardDropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.Sequential(ShardDropout(), ShardDropout())
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


DROPOUTS = {
    "tokens": (functools.partial(Gpt2, dropout=0.3), True, "none"),
    "tokens, full": (functools.partial(Gpt2, dropout=0.3), True, "full"),
    "selective": (functools.partial(Gpt2, dropout=0.3), False, "selective"),
    "features, full": (ShardDropouts, False, "full"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", DROPOUTS)
def test_dropout_is_that_of_eager_blocks(world_size: int, case: str) -> None:
    """The masks of a forward are those of its recomputation, and those of other tensor-parallel ranks."""
    make, shards_sequence, checkpoints = DROPOUTS[case]
    gradients = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        plan = weft.strategy.Plan("auto", sequence_parallel=shards_sequence)
        model = weft.parallelize(make(), tensor_parallel(world_size), plan)
        checkpoint_activations(model, checkpoints)
        if is_compiled:
            compile_blocks(model, AOT)
        torch.manual_seed(5)
        _loss(model, _tokens((4, 8), 20)).backward()
        gradients.append([full(parameter.grad) for parameter in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_ranges_of_shards_are_those_of_plans() -> None:
    for size, num_ranks in itertools.product(range(12), range(1, 8)):
        for rank in range(num_ranks):
            assert range_of_shard(size, num_ranks, rank) == tuple(shard_range(size, num_ranks, rank))


@on_ranks(2)
def test_inductor_matches_unsharded(world_size: int) -> None:
    reference = _llama()
    model = weft.parallelize(copy.deepcopy(reference), tensor_parallel(world_size), "auto")
    torch._dynamo.utils.counters.clear()
    compile_blocks(model)
    assert _train(model, SIZES[:2]) == pytest.approx(_train(reference, SIZES[:2]), rel=1e-10)
    _assert_same(model, reference)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@on_ranks(2)
def test_blocks_called_by_code_around_the_model(world_size: int) -> None:
    """Inside of local_parameters, a mode reads parameters; it is no part of the graph."""
    reference = _llama()
    model: Any = weft.parallelize(copy.deepcopy(reference), tensor_parallel(world_size), "auto")
    recorder = Recorder()
    compile_blocks(model, {"backend": recorder, "fullgraph": True})
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outputs = []
    with local_parameters():
        for each in (model, reference):
            y = x
            for layer in each.layers:
                y = layer(y * each.norm.weight, each.cos, each.sin)
            outputs.append(y)
    torch.testing.assert_close(*outputs)
    assert len(recorder.graphs) == 1


class Block(nn.Module):
    """Adds a layer's result; `broken`: prints between two layers, which no graph holds."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(x).relu()
        if self.broken:
            torch._dynamo.graph_break()
        return x.sin()


def _failing(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    raise ArithmeticError("no code for this graph")


@on_ranks(1)
def test_errors_of_the_compiler_name_the_block(rank: int) -> None:
    x = torch.ones(2, 4)
    model = nn.Sequential(Block(), Block())
    compile_blocks(model, {"backend": _failing})
    with pytest.raises(
        CompiledBlockError, match=r"^torch\.compile failed in the block '0', a Block .*no code for this"
    ):
        model(x)
    model = nn.Sequential(Block(), Block(broken=True))
    expected = model(x)
    compile_blocks(model, AOT)
    with pytest.raises(CompiledBlockError, match=r"in the block '1', a Block \(Unsupported: "):
        model(x)
    model = nn.Sequential(Block(), Block(broken=True))
    model.load_state_dict(model.state_dict())
    compile_blocks(model, {"backend": "aot_eager"})  # without fullgraph, the graph breaks where the user's code does
    assert model(x).shape == expected.shape


@on_ranks(1)
def test_errors_of_a_block_keep_their_type(rank: int) -> None:
    model = nn.Sequential(Block(), Block())
    compile_blocks(model, {"backend": "aot_eager"})
    with pytest.raises(AttributeError, match="missing"):
        _ = model[0].missing
    handle = model[1].register_forward_pre_hook(_raise)
    with pytest.raises(KeyError, match="a hook"):
        model(torch.ones(2, 4))
    handle.remove()
    assert model(torch.ones(2, 4)).shape == (2, 4)


def _raise(module: nn.Module, args: Any) -> None:
    raise KeyError("a hook")


@on_ranks(1)
def test_second_call_and_wrong_order(rank: int) -> None:
    model = nn.Sequential(Block(), Block())
    compile_blocks(model, AOT)
    cls = type(model[0])
    assert type(model[1]) is cls and cls.__name__ == "Block" and isinstance(model[0], (Block, CompiledBlock))
    assert compile_blocks(model, AOT) == ["0", "1"]  # found again, and not changed
    assert type(model[0]) is cls
    with pytest.raises(
        ValueError, match=r"'0' is compiled with \{'backend': 'aot_eager'.*not with \{\}; pass the same"
    ):
        compile_blocks(model)
    with pytest.raises(ValueError, match=r"'0' is compiled already, and a checkpoint belongs inside"):
        checkpoint_activations(model, "full")
    with pytest.raises(ValueError, match=r"parallelize: '0' is compiled already, .* call compile_blocks"):
        weft.parallelize(model, tensor_parallel(1), {"0.layer": "column_gather_output"})
    again = copy.deepcopy(model)
    torch.testing.assert_close(again(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert compile_blocks(nn.Linear(2, 2)) == []
    replaced = nn.Sequential(Block(), Block())
    replaced[1].forward = lambda x: x
    with pytest.raises(ValueError, match="'1' is to be compiled, but its forward was replaced on the instance"):
        compile_blocks(replaced)
    assert not isinstance(replaced[0], CompiledBlock)


@on_ranks(1)
def test_blocks_of_two_classes_have_graphs_of_their_own(rank: int) -> None:
    class Other(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).cos()

    model = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Other(), Other())])
    model = nn.ModuleDict({"first": model[0], "second": model[1]})
    recorder = Recorder()
    assert compile_blocks(model, {"backend": recorder}) == ["first.0", "first.1", "second.0", "second.1"]
    x = torch.ones(2, 4, requires_grad=True)
    model["second"](model["first"](x)).sum().backward()
    assert len(recorder.graphs) == 2 and type(model["first"][0]) is not type(model["second"][0])


@on_ranks(1)
def test_compiled_model_around_compiled_blocks(rank: int) -> None:
    """A module that the user compiles as a whole traces through its blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.ones(2, 4)
    expected = model(x)
    inner, outer = Recorder(), Recorder()
    compile_blocks(model, {"backend": inner})
    torch.testing.assert_close(torch.compile(model, backend=outer, fullgraph=True)(x), expected)
    assert (len(inner.graphs), len(outer.graphs)) == (0, 1)
