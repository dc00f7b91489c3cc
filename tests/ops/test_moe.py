"""moe_dispatch, moe_combine and a layer made of them: values, gradients, messages, memory, tracing, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from ops.collectives.profiled import collectives_of
from ops.experts import LAYERS, TOKENS, Layer, Parameters, check_close, group, moe, moe_reference, tokens_of
from support.ranks import on_ranks
from weft import flight
from weft.nn.shard import shard_range

Result = TypeVar("Result")


def _ids_of(layer: Layer, world_size: int) -> list[Tensor]:
    """Return the experts of each rank's tokens; choices of a token may be equal."""
    torch.manual_seed(layer.num_experts)
    candidates = torch.tensor(layer.chosen or range(layer.num_experts))
    return [candidates[torch.randint(len(candidates), (number, layer.top_k))] for number in TOKENS[:world_size]]


@on_ranks(1, 2, 3, 4)
def test_rows_are_sorted_by_expert_rank_and_pair(rank: int, world_size: int) -> None:
    for layer in LAYERS:
        tokens, ids = tokens_of(layer, world_size), _ids_of(layer, world_size)
        start, length = shard_range(layer.num_experts, world_size, rank)
        expected = [
            [
                (source, token)
                for source in range(world_size)
                for token, choices in enumerate(ids[source].tolist())
                for choice in choices
                if choice == expert
            ]
            for expert in range(start, start + length)
        ]
        for own_ids in (ids[rank], ids[rank].int()):
            result = weft.ops.moe_dispatch(tokens[rank], own_ids, num_experts=layer.num_experts, group_name=group())
            rows = [tokens[source][token] for of_expert in expected for source, token in of_expert]
            assert result.rows.tolist() == [row.tolist() for row in rows]
            assert result.counts.tolist() == [len(of_expert) for of_expert in expected]
            assert result.order.tolist() == ids[rank].flatten().argsort(stable=True).tolist()
            ranges = [shard_range(layer.num_experts, world_size, each) for each in range(world_size)]
            sent = [((ids[rank] >= first) & (ids[rank] < first + number)).sum().item() for first, number in ranges]
            assert result.sent.tolist() == sent
            received = [[sum(source == each for source, _ in of) for of in expected] for each in range(world_size)]
            assert result.received.tolist() == received
            assert all(not each.requires_grad and each.dtype is torch.int64 for each in result[1:])


@on_ranks(1, 2, 3, 4)
def test_combine_inverts_dispatch(rank: int, world_size: int) -> None:
    """Experts that multiply by their number: results and gradients are those of a sum over the choices."""
    for layer in LAYERS:
        x, ids = tokens_of(layer, world_size)[rank], _ids_of(layer, world_size)[rank]
        weights = torch.rand(ids.shape).double().requires_grad_()
        rows, counts, *routes = weft.ops.moe_dispatch(x, ids, num_experts=layer.num_experts, group_name=group())
        start, length = shard_range(layer.num_experts, world_size, rank)
        factors = torch.arange(start + 1, start + 1 + length).repeat_interleave(counts)
        y = weft.ops.moe_combine(rows * factors[:, None], weights, *routes, group_name=group())
        expected = ((weights * (ids + 1)).sum(1, keepdim=True)) * x
        check_close(y, expected, "result")
        grad = torch.randn_like(y)
        grads = torch.autograd.grad(y, [x, weights], grad)
        for ours, wanted in zip(grads, torch.autograd.grad(expected, [x, weights], grad), strict=True):
            check_close(ours, wanted, "gradient")


def _check_layer(rank: int, world_size: int, layer: Layer, group_name: str) -> None:
    parameters, tokens = Parameters(layer), tokens_of(layer, world_size)
    x = torch.cat(tokens).detach().requires_grad_()
    expected = moe_reference(x, parameters.values, layer)
    torch.manual_seed(1)
    grad = torch.randn(expected.shape).double()
    expected.backward(grad)

    own, own_x = parameters.on_rank(world_size, rank), tokens[rank].detach().requires_grad_()
    start, number = sum(TOKENS[:rank]), TOKENS[rank]
    y = moe(own_x, own, layer, group_name)
    y.backward(grad[start : start + number])
    check_close(y, expected[start : start + number], "result")
    check_close(own_x.grad, x.grad[start : start + number], "gradient of x")
    dist.all_reduce(own["router"].grad)
    with torch.no_grad():
        for name, value in own.items():
            full = parameters.values[name]
            first, length = (0, len(full)) if name == "router" else shard_range(len(full), world_size, rank)
            check_close(value.grad, full.grad[first : first + length], f"gradient of {name}")
            torch._foreach_add_([value, full], [value.grad, full.grad], alpha=-0.1)
            check_close(value, full[first : first + length], f"{name} after a step")


@on_ranks(1, 2, 4)
def test_layer_matches_a_loop_over_tokens_and_experts(rank: int, world_size: int) -> None:
    for layer in LAYERS:
        _check_layer(rank, world_size, layer, group())


@on_ranks(2, 4)
def test_gloo(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend="gloo").group_name
    for layer in LAYERS[:3]:
        _check_layer(rank, world_size, layer, gloo)


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(rank: int, world_size: int, dtype: torch.dtype) -> None:
    x = torch.full((1, 1), 1.0, dtype=dtype, requires_grad=True)
    many = torch.zeros(1, 300, dtype=torch.int64)
    for weight_dtype in (dtype, torch.float32):
        weights = torch.ones(1, 300, dtype=weight_dtype, requires_grad=True)
        rows, _, *routes = weft.ops.moe_dispatch(x, many, num_experts=2, group_name=group())
        y = weft.ops.moe_combine(rows, weights, *routes, group_name=group())
        assert y.dtype is dtype and y.item() == 300
        y.backward(torch.ones_like(y))
        assert x.grad.dtype is dtype and x.grad.item() == 300
        assert weights.grad.dtype is weight_dtype and weights.grad.eq(1).all()
        x.grad = None


def _calls(run: Callable[[], Result]) -> tuple[Counter[tuple[str, int]], Result]:
    """Return the collectives of a call, by name and bytes, and its result."""
    before = max((each["begin"] for each in flight.calls()), default=0.0)
    result = run()
    calls = [each for each in flight.calls() if each["begin"] > before]
    return Counter((each["call"].partition("(")[0], each["bytes"]) for each in calls), result


@on_ranks(2, 4)
def test_number_and_bytes_of_collectives(rank: int, world_size: int) -> None:
    layer = Layer(6, 2)
    x, ids = tokens_of(layer, world_size)[rank], _ids_of(layer, world_size)[rank]
    weights = torch.rand(ids.shape).double().requires_grad_()
    own_experts = -(-6 // world_size)
    forward, (rows, _, *routes) = _calls(lambda: weft.ops.moe_dispatch(x, ids, num_experts=6, group_name=group()))
    row_bytes, counts_bytes = 8 * layer.features, 8 * world_size * (own_experts + 2)
    in_pairs, in_rows = ids.numel() * row_bytes, rows.size(0) * row_bytes
    name = next(iter(forward))[0]
    assert name.startswith("all_to_all")
    assert forward == Counter([(name, counts_bytes), (name, in_pairs)])
    calls, y = _calls(lambda: weft.ops.moe_combine(rows, weights, *routes, group_name=group()))
    assert calls == {(name, in_rows): 1}
    backward, _ = _calls(y.sum().backward)
    assert backward == Counter([(name, in_pairs), (name, in_rows)])  # of combine, then of dispatch
    frozen = weft.ops.moe_combine(rows.detach(), weights, *routes, group_name=group())
    collectives_of(frozen.sum().backward, expected={})


@on_ranks(1, 2)
def test_saves_returned_rows_for_the_gradient_of_weights_only(rank: int, world_size: int) -> None:
    x, ids = torch.randn(6, 4), torch.arange(12).reshape(6, 2) % 4
    rows, _, *routes = weft.ops.moe_dispatch(x, ids, num_experts=4, group_name=group())
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (saved.append(each), each)[1], lambda each: each):
        for needs_weights in (False, True):
            saved.clear()
            weights = torch.rand(6, 2, requires_grad=needs_weights)
            weft.ops.moe_combine(rows.detach().requires_grad_(), weights, *routes, group_name=group())
            floats = [list(each.shape) for each in saved if each.is_floating_point()]
            assert floats == [[6, 2], *([[12, 4]] if needs_weights else [])]


class Block(nn.Module):
    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name
        size = weft.nn.shard.group_size_and_rank(group_name)[0]
        self.weight = nn.Parameter(torch.randn(4 // size, 6, 6))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        rows, counts, order, sent, received = torch.ops.weft.moe_dispatch(
            x.sin(), ids, num_experts=4, group_name=self.group_name
        )
        rows = torch.ops.weft.grouped_linear(rows, self.weight, counts).sin()
        return torch.ops.weft.moe_combine(rows, weights, order, sent, received, group_name=self.group_name).sin()


def _inputs(num_tokens: int) -> list[Tensor]:
    return [
        torch.randn(num_tokens, 6, requires_grad=True),
        torch.rand(num_tokens, 2, requires_grad=True),
        torch.randint(4, (num_tokens, 2)),
    ]


def _run(module: Callable[..., Tensor], inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    y = module(*inputs)
    leaves = [*inputs[:2], *parameters]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


@on_ranks(1, 2, timeout=300)
def test_compile_export_and_script(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    block = Block(group())
    parameters = list(block.parameters())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=world_size > 1):
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
        for num_tokens in (5, 7):
            inputs = _inputs(num_tokens)
            eager = _run(block, inputs, parameters)
            for ours, expected in zip(_run(compiled, inputs, parameters), eager, strict=True):
                torch.testing.assert_close(ours, expected)
    torch._dynamo.reset()
    broken = torch.compile(block, backend="aot_eager")  # the default: on several ranks, the graph breaks
    torch.testing.assert_close(broken(*inputs), eager[0])
    program = torch.export.export(block, tuple(inputs))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("weft.moe_dispatch.default") + targets.count("weft._moe_dispatch.default") == 1
    torch.testing.assert_close(program.run_decompositions().module()(*inputs), eager[0])
    torch.testing.assert_close(torch.jit.script(block)(*inputs), eager[0])


@on_ranks(2)
def test_meta_tensors_raise(rank: int) -> None:
    x, ids = torch.ones(3, 2, device="meta"), torch.ones(3, 1, dtype=torch.int64, device="meta")
    assert weft.ops.moe_dispatch(x, ids, num_experts=4, group_name="").rows.shape == (3, 2)
    with pytest.raises(NotImplementedError, match="weft::moe_dispatch: got tensors on meta in a group of 2 ranks"):
        weft.ops.moe_dispatch(x, ids, num_experts=4, group_name=group())


@on_ranks(1, 2, 3)
def test_invalid_ids_raise_on_all_ranks(rank: int, world_size: int) -> None:
    x = torch.ones(3, 2)
    for wrong in (-1, 4):
        ids = torch.tensor([[0], [wrong if rank == world_size - 1 else 3], [1]])
        with pytest.raises(IndexError) as caught:
            weft.ops.moe_dispatch(x, ids, num_experts=4, group_name=group())
        lowest, highest = min(wrong, 0), max(wrong, 1)
        text = f"weft::moe_dispatch: got expert_ids from {lowest} to {highest} on rank {world_size - 1}; pass ids from"
        assert str(caught.value) == f"{text} 0 to num_experts - 1 = 3."
    assert weft.ops.moe_dispatch(x, torch.ones(3, 1).long(), num_experts=4, group_name=group()).rows.size(1) == 2


def _routes(world_size: int) -> dict[str, Tensor]:
    """Return valid routes of 6 pairs and no received rows."""
    sent, received = torch.zeros(2, world_size, dtype=torch.int64)
    sent[0] = 6
    return {"order": torch.arange(6), "sent": sent, "received": received[:, None]}


COMBINE_ERRORS = [
    ({"rows": torch.ones(4)}, ValueError, r"got rows of shape \[4\]; pass the results of this rank's experts"),
    ({"rows": torch.ones(4, 2).int()}, TypeError, "got rows of dtype Int; pass float32"),
    ({"weights": torch.ones(6)}, ValueError, r"got weights of shape \[6\]; pass one weight for each choice"),
    ({"weights": torch.ones(3, 2).double()}, TypeError, "got weights of dtype Double with rows of dtype Float"),
    ({"order": torch.arange(5)}, ValueError, r"got order of shape \[5\] with weights of shape \[3, 2\]"),
    ({"order": torch.zeros(6).long()}, ValueError, "got order that does not have each number from 0 to 5 once"),
    ({"order": torch.zeros(6)}, TypeError, "got order of dtype Float; pass the int64 tensor that moe_dispatch"),
    ({"sent": torch.ones(9).long()}, ValueError, r"got sent of shape \[9\] on \d ranks; pass the tensor that moe"),
    ({"received": torch.ones(9).long()}, ValueError, r"got received of shape \[9\] on \d ranks"),
    ({"rows": torch.ones(3, 2)}, ValueError, r"got received \[0.*\], whose sum must be 3; pass the tensor"),
    ({"weights": torch.ones(3, 1), "order": torch.arange(3)}, ValueError, r"got sent \[6.*\], whose sum must be 3"),
]


@on_ranks(1, 2)
def test_invalid_arguments_raise(rank: int, world_size: int) -> None:
    arguments = {"rows": torch.ones(0, 2), "weights": torch.ones(3, 2), **_routes(world_size)}
    for change, error, text in COMBINE_ERRORS:
        with pytest.raises(error, match=f"^weft::moe_combine: {text}"):
            weft.ops.moe_combine(**arguments | change, group_name=group())
    x, ids = torch.ones(3, 2), torch.zeros(3, 1, dtype=torch.int64)
    for tensors, num_experts, error, text in (
        ((x[0], ids), 4, ValueError, r"got x of shape \[2\]; pass this rank's tokens"),
        ((x.long(), ids), 4, TypeError, "got x of dtype Long; pass float32"),
        ((x, ids[:2]), 4, ValueError, r"got expert_ids of shape \[2, 1\] with x of shape \[3, 2\]"),
        ((x, ids[:, 0]), 4, ValueError, r"got expert_ids of shape \[3\] with x of shape \[3, 2\]"),
        ((x, ids.float()), 4, TypeError, "got expert_ids of dtype Float; pass experts as int64 or int32"),
        ((x, ids), 0, ValueError, "got num_experts 0; pass the number of experts of all ranks"),
    ):
        with pytest.raises(error, match=f"^weft::moe_dispatch: {text}"):
            weft.ops.moe_dispatch(*tensors, num_experts=num_experts, group_name=group())
    with pytest.raises(ValueError, match="weft::moe_dispatch: got group_name 'nowhere', which is no process group"):
        weft.ops.moe_dispatch(x, ids, num_experts=4, group_name="nowhere")
    with pytest.raises(ValueError, match="weft::moe_combine: got group_name 'nowhere', which is no process group"):
        weft.ops.moe_combine(**arguments, group_name="nowhere")


@on_ranks(2)
def test_second_derivative_raises() -> None:
    x, ids = torch.ones(3, 2, requires_grad=True), torch.zeros(3, 1, dtype=torch.int64)
    rows, _, *routes = weft.ops.moe_dispatch(x, ids, num_experts=4, group_name=group())
    with pytest.raises(NotImplementedError, match="weft::moe_dispatch: got a backward with create_graph=True"):
        torch.autograd.grad(rows.sum(), x, create_graph=True)
    y = weft.ops.moe_combine(rows, torch.ones(3, 1), *routes, group_name=group())
    with pytest.raises(NotImplementedError, match="weft::moe_combine: got a backward with create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y.sum().backward()  # on both ranks, the group is still usable
