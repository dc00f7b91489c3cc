"""recompute, offload and precision of a rule: the same numbers, less kept, and the dtype that was asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.memory.counting import counted
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from support.models import FeedForward, Gpt2, Llama, LlamaArgs, RMSNorm, token_batches
from support.parity import assert_trains_alike, tensor_parallel
from support.ranks import on_ranks
from weft.strategy import Plan, checkpoint_activations, report
from weft.strategy.activation_checkpointing import CheckpointedModule
from weft.strategy.data_parallel import shard_fully
from weft.strategy.offload import OffloadedModule, offload_activations

TOKENS = token_batches(4, 37)
ATTENTION, MLP, NORM = "layers.*.attention", "layers.*.feed_forward", "layers.*.ffn_norm"


def rules(**options: Any) -> dict[str, Any]:
    plan = {ATTENTION: "attention", MLP: "column_row_mlp", NORM: "replicate", "tok_embeddings": "vocab_embedding"}
    return {pattern: {"style": style, **options} for pattern, style in plan.items()}


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


# ---- recompute and offload -----------------------------------------------------------------------------------------

KEEPING = {
    "recompute": {ATTENTION: {"style": "attention", "recompute": True}, MLP: "column_row_mlp"},
    "of the MLP": {ATTENTION: "attention", MLP: {"style": "column_row_mlp", "recompute": True, "offload": True}},
    "of blocks": {
        ATTENTION: "attention",
        MLP: "column_row_mlp",
        "layers.*": {"style": "replicate", "recompute": True, "offload": True},
    },
    "offload": rules(offload=True),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("by_tokens", [False, True], ids=["", "by tokens"])
@pytest.mark.parametrize("case", KEEPING)
def test_no_number_changes(world_size: int, case: str, by_tokens: bool) -> None:
    torch.manual_seed(0)
    assert_trains_alike(
        lambda m: weft.parallelize(m, tensor_parallel(world_size), Plan(KEEPING[case], sequence_parallel=by_tokens)),
        Llama(LlamaArgs(dtype=torch.float64)),
        token_loss,
        TOKENS,
        "SGD",
    )


@on_ranks(2)
def test_what_a_rule_wraps(world_size: int) -> None:
    model = weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), KEEPING["of blocks"])
    assert all(layer.checkpoint_mode == ("full", True) for layer in model.layers)
    assert report(model).notes[0] == "layers.*: recompute, offload, of 2 modules"
    model = weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), KEEPING["of the MLP"])
    assert isinstance(model.layers[0].feed_forward, OffloadedModule)  # the operator itself computes again
    assert not isinstance(model.layers[0].feed_forward, CheckpointedModule)
    assert report(model).notes[0] == "layers.*.feed_forward: offload, of 2 modules"


def _kept(plan: dict[str, Any], world_size: int) -> int:
    model = weft.parallelize(Llama(LlamaArgs(dim=64, hidden_dim=256)), tensor_parallel(world_size), plan)
    with counted() as count:
        before = count.now()
        output = model(TOKENS[0][0])
        kept = count.now() - before
    del output
    return kept


@on_ranks(2)
def test_a_rule_keeps_less(world_size: int) -> None:
    plain = _kept({ATTENTION: "attention", MLP: "column_row_mlp"}, world_size)
    attention = _kept(KEEPING["recompute"], world_size)
    blocks = _kept(KEEPING["of blocks"], world_size)
    assert blocks < attention < plain


class Thrice(nn.Module):
    """A weight, a hidden tensor that three operators keep, and one that is changed in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.in_place = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.weight
        other = hidden.clone()
        first = (other * hidden).sum() + other.sin().sum()
        other = other.neg_() if self.in_place else -other
        return first + other.cos().sum()


def test_offload_copies_each_tensor_once_and_no_parameter() -> None:
    module = Thrice()
    x = torch.randn(64, 64)
    module.in_place = False
    expected = torch.autograd.grad(module(x), module.weight)
    module.in_place = True  # of which torch alone refuses the backward
    offload_activations(module)
    with counted() as count:
        before = count.now()
        loss = module(x)
        # x, hidden and other, and the latter once more after its change; nothing of what they were copied from.
        assert count.now() - before == 4 * x.nbytes + loss.nbytes
        gradient = torch.autograd.grad(loss, module.weight)
        del loss
        assert count.now() - before == gradient[0].nbytes
    assert torch.equal(gradient[0], expected[0])


def test_offload_leaves_evaluation_and_compilers_alone() -> None:
    module, x = Thrice(), torch.randn(64, 64)
    expected = module(x)
    offload_activations(module)
    with counted() as count, torch.no_grad():
        before = count.now()
        result = module(x)
        assert count.now() - before == result.nbytes
    compiled = torch.compile(module, backend="eager")(x)
    assert torch.equal(result, expected)
    assert_close(compiled, expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(module, backend="eager", fullgraph=True)(x)


def test_offload_refuses_weights_of_another_step() -> None:
    """torch looks at no version where hooks are, and gradients would be those of the new weight."""
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    offload_activations(module)
    loss = module(x).sum()
    with torch.no_grad():
        module.weight.mul_(10)
    with pytest.raises(RuntimeError, match=r"a parameter of the shape \[4, 4\], or a part of one, was changed after"):
        loss.backward()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.graph, self.weight = torch.eye(4).to_sparse(), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, x @ self.weight)


def test_offload_leaves_sparse_tensors() -> None:
    module, x = Sparse(), torch.randn(4, 4)
    expected = torch.autograd.grad(module(x).square().sum(), module.weight)
    offload_activations(module)
    assert torch.equal(torch.autograd.grad(module(x).square().sum(), module.weight)[0], expected[0])


@on_ranks(2)
@pytest.mark.parametrize("reshard", [False, True])
def test_offload_with_weights_that_are_gathered(world_size: int, reshard: bool) -> None:
    """Freed after the forward and gathered again, which is no change."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(dtype=torch.float64))
    model = weft.parallelize(copy.deepcopy(reference), mesh, rules(offload=True))
    shard_fully(model, mesh["data_parallel"], reshard_after_forward=reshard)
    for each in (model, reference):
        token_loss(each, TOKENS[0]).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad.full_tensor(), theirs[name].grad, rtol=1e-10, atol=1e-12)
    model = weft.parallelize(
        Llama(LlamaArgs()), mesh, {"": {"style": "replicate", "offload": True}, MLP: "column_row_mlp"}
    )
    with pytest.raises(ValueError, match=r"rule of the model itself says offload, and 'layers.\d' inside is gathered"):
        shard_fully(model, mesh["data_parallel"], reshard_after_forward=reshard)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(8, 8, 6)

    def forward(self, *, left: Tensor, right: Tensor, scale: float) -> Tensor:
        return self.inner(left, right) * scale


def test_a_checkpoint_offloads_keywords() -> None:
    x, y = torch.randn(64, 8, requires_grad=True), torch.randn(64, 8, requires_grad=True)
    kept, gradients = [], []
    for offload in (False, True):
        torch.manual_seed(0)
        module = ByKeyword()
        checkpoint_activations(module, "", offload=offload)
        with counted() as count:
            before = count.now()
            output = module(left=x, right=y, scale=2.0)
            kept.append(count.now() - before)
        gradients.append(torch.autograd.grad(output.sum(), (x, y)))
        del output
    assert kept[1] - kept[0] == x.nbytes + y.nbytes  # copies, as all is on the CPU
    for plain, offloaded in zip(*gradients, strict=True):
        assert torch.equal(plain, offloaded)


@pytest.mark.cuda
def test_offloaded_activations_leave_the_device() -> None:
    module = Thrice().cuda()
    x = torch.randn(64, 64, device="cuda")
    module.in_place = False
    expected = torch.autograd.grad(module(x), module.weight)
    offload_activations(module)
    before = torch.cuda.memory_allocated()
    loss = module(x)
    assert torch.cuda.memory_allocated() - before < x.nbytes
    assert torch.equal(torch.autograd.grad(loss, module.weight)[0], expected[0])


# ---- precision -----------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Says what a layer inside computes in."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(8, 12, dtype=dtype),
            RMSNorm(12, dtype),
            nn.Linear(12, 8, dtype=dtype),
        )
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [x.dtype, self.norm.weight.dtype]
        hidden = self.up(x)
        self.seen.append(hidden.dtype)
        return self.down(self.norm(hidden))


WATCHED = {"inner.up": "column_gather_output", "inner.down": "row_split_input"}


class Around(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = Watched(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _by_hand(model: Around, x: Tensor, dtype: torch.dtype, norm: torch.dtype) -> Tensor:
    inner = model.inner
    hidden = F.linear(x.to(dtype), inner.up.weight.to(dtype), inner.up.bias.to(dtype)).to(norm)
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * inner.norm.weight.to(norm)
    return F.linear(normed.to(dtype), inner.down.weight.to(dtype), inner.down.bias.to(dtype)).to(x.dtype)


@on_ranks(1, 2)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("norm", ["", "float32"])
def test_precision_of_all_below(world_size: int, stored: torch.dtype, precision: str, norm: str) -> None:
    torch.manual_seed(0)
    model, reference = Around(stored), Around(stored)
    reference.load_state_dict(model.state_dict())
    plan = {"inner": {"style": "replicate", "precision": precision}, **WATCHED}
    if norm:
        plan["inner.norm"] = {"style": "replicate", "precision": norm}
    weft.parallelize(model, tensor_parallel(world_size), plan)
    dtype = getattr(torch, precision)
    of_norm = getattr(torch, norm or precision)
    x = torch.randn(3, 8, dtype=stored)
    output, expected = model(x), _by_hand(reference, x, dtype, of_norm)
    assert model.inner.seen == [dtype, of_norm, dtype] and output.dtype == stored
    bound = 4 * torch.finfo(torch.bfloat16 if torch.bfloat16 in (dtype, stored) else dtype).eps
    assert_close(output, expected, rtol=bound, atol=bound)
    output.float().square().mean().backward()
    expected.float().square().mean().backward()
    for name, parameter in reference.named_parameters():
        grad = model.get_parameter(name).grad
        assert grad.dtype == stored
        assert_close(grad.full_tensor(), parameter.grad, rtol=8 * bound, atol=bound)


@on_ranks(2)
def test_precision_under_autocast(world_size: int) -> None:
    """Inside there is none; the result stays what was computed, since autocast takes any dtype."""
    torch.manual_seed(0)
    model = Around()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    expected = copy.deepcopy(model)(x.float())
    plan = {"inner": {"style": "replicate", "precision": torch.float32}, **WATCHED}
    weft.parallelize(model, tensor_parallel(world_size), plan)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    assert model.inner.seen == [torch.float32] * 3
    assert_close(output, expected, rtol=1e-5, atol=1e-6)


@on_ranks(1, 2)
@pytest.mark.parametrize("family", [Llama, Gpt2])
def test_precision_of_every_style_trains(world_size: int, family: type[nn.Module]) -> None:
    """float32 in a float64 model, Llama by tokens as well: the errors are float32's."""
    torch.manual_seed(0)
    is_llama = family is Llama
    model = Llama(LlamaArgs(dtype=torch.float64)) if is_llama else Gpt2(dtype=torch.float64)
    plan = rules(precision="float32")
    if not is_llama:
        styles = {"h.*.attn": "attention", "h.*.mlp": "column_row_mlp", "h.*.ln_2": "replicate"}
        plan = {pattern: {"style": style, "precision": "float32"} for pattern, style in styles.items()}
    exact = copy.deepcopy(model)(TOKENS[0][0])

    def parallelize(m: nn.Module) -> nn.Module:
        weft.parallelize(m, tensor_parallel(world_size), Plan(plan, sequence_parallel=is_llama))
        distance = (m(TOKENS[0][0]) - exact).abs().max() / exact.abs().max()
        assert distance > 1e-9, "float32 is not float64"
        return m

    assert_trains_alike(
        parallelize,
        model,
        token_loss,
        TOKENS,
        "SGD",
        tolerance=1e-4,
    )


@on_ranks(2)
def test_precision_of_a_module_without_weights(world_size: int) -> None:
    model = nn.ModuleDict({"mlp": FeedForward(8, 16), "soft": nn.Softmax(dim=-1)}).bfloat16()
    plan = {"mlp": "column_row_mlp", "soft": {"style": "replicate", "precision": "float32"}}
    weft.parallelize(model, tensor_parallel(world_size), plan)
    x = torch.randn(4, 8, dtype=torch.bfloat16) * 3
    expected = torch.softmax(x.float(), -1).bfloat16()
    seen: list[torch.dtype] = []
    with _Dtypes(seen):
        result = model["soft"](x)
    assert torch.equal(result, expected) and seen == [torch.float32]


class _Dtypes(TorchDispatchMode):
    """Notes what softmax gets."""

    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._softmax.default:
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


class Exact(RMSNorm):
    """Says the values of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["seen"] = self.weight.detach().clone()
        return super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("of_all", [False, True], ids=["", "of all"])
def test_fully_sharded_weights_are_gathered_in_their_precision(world_size: int, reshard: bool, of_all: bool) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = Llama(LlamaArgs())
    for layer in model.layers:
        layer.attention_norm, layer.ffn_norm = Exact(16, torch.float32), Exact(16, torch.float32)
    values = torch.linspace(1.0, 1.1, 16)  # bfloat16 has none of most
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_norm" in name:
                parameter.copy_(values)
    plan = {MLP: "column_row_mlp", NORM: {"style": "replicate", "precision": "float32"}}
    plan |= {"": {"style": "replicate", "precision": "float16"}} if of_all else {}
    weft.parallelize(model, mesh, plan)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    units = shard_fully(model, mesh["data_parallel"], reshard_after_forward=reshard, mp_policy=policy)
    assert sorted(units) == ["", "layers.0", "layers.0.ffn_norm", "layers.1", "layers.1.ffn_norm"]
    output = model(TOKENS[0][0])
    dtype = torch.float16 if of_all else torch.bfloat16
    assert output.dtype == dtype
    for layer in model.layers:
        assert torch.equal(layer.ffn_norm.seen, values), "as they are kept"
        assert torch.equal(layer.attention_norm.seen, values.to(dtype)), "as all others are gathered"
    output.float().square().mean().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


# ---- refusals ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_weight_of_two_precisions_is_not_gathered(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    plan = {"output": {"style": "replicate", "precision": "float32"}, MLP: "column_row_mlp"}
    model = weft.parallelize(Llama(LlamaArgs(tie_head=True)), mesh, plan)
    with pytest.raises(ValueError, match=r"rule of 'output' says precision, but it shares a weight with modules"):
        shard_fully(model, mesh["data_parallel"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@on_ranks(2)
def test_refusals(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    for option in ({"recompute": True}, {"offload": True}, {"precision": "float32"}):
        with pytest.raises(
            ValueError, match=r"rule for 'layers' says \w+.*, but a ModuleList has no forward of its own"
        ):
            weft.parallelize(
                Llama(LlamaArgs()), mesh, {"layers": {"style": "replicate", **option}, MLP: "column_row_mlp"}
            )
    inside = {"layers.*": {"style": "replicate", "recompute": True}, ATTENTION: {"style": "attention", "offload": True}}
    with pytest.raises(ValueError, match=r"rule for 'layers.0.attention' says offload, which would keep what the rec"):
        weft.parallelize(Llama(LlamaArgs()), mesh, inside)
    model = weft.parallelize(Llama(LlamaArgs()), mesh, rules(offload=True))
    with pytest.raises(ValueError, match=r"rule of 'layers.0.attention' says offload, which would keep what a checkp"):
        checkpoint_activations(model, "full")
    model = weft.parallelize(Llama(LlamaArgs()), mesh, KEEPING["recompute"])
    with pytest.raises(ValueError, match=r"'attention' in 'layers.0' says recompute, and a selective checkpoint would"):
        checkpoint_activations(model, "selective")
    twice = nn.ModuleDict({"a": nn.LayerNorm(8), "mlp": FeedForward(8, 16)})
    twice["b"] = twice["a"]
    plan = {"a": {"style": "replicate", "recompute": True}, "b": "replicate", "mlp": "column_row_mlp"}
    with pytest.raises(ValueError, match=r"'a' and 'b' are one module but get the options 'recompute' and 'none'"):
        weft.parallelize(twice, mesh, plan)
    assert not any(isinstance(parameter, DTensor) for parameter in twice.parameters())
    model = weft.parallelize(Llama(LlamaArgs()), mesh, rules(precision="bfloat16"))
    with pytest.raises(ValueError, match=r"computes in torch.bfloat16 by its rule, which a plain copy would not"):
        weft.export_local(model)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"style": "row", "recompute": True}, "recompute means nothing to style 'row'; remove recompute or use style"),
        ({"style": "vocab_head", "offload": True}, "offload means nothing to style 'vocab_head'; remove offload"),
        ({"style": "ignore", "precision": "float16"}, "precision = 'float16' means nothing to style 'ignore'; remove"),
        (
            {"style": "row", "precision": "float64"},
            "unknown precision 'float64': use one of float32, bfloat16, float16",
        ),
        ({"style": "row", "offload": 1}, "has the value {'style': 'row', 'offload': 1}; write a style"),
    ],
)
def test_options_that_mean_nothing(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Plan({"a": rule})
    assert "pattern 'a'" in str(error.value) and message in str(error.value)
