"""`recompute` and `offload` in a rule: the same results, and fewer saved bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ops.memory.counting import counted
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import weft
from support.models import FeedForward, Llama, LlamaArgs
from support.parity import assert_same_training, tensor_parallel
from support.ranks import on_ranks
from support.rule_plans import ATTENTION, MLP, TOKENS, rules, token_loss
from weft.strategy import Plan, checkpoint_activations, report
from weft.strategy.data_parallel import apply_fsdp
from weft.strategy.modules.activation_checkpointing import CheckpointedModule
from weft.strategy.modules.offload import OffloadedModule, offload_activations

MEMORY_RULES = {
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
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("case", MEMORY_RULES)
def test_results_are_unchanged(world_size: int, case: str, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    assert_same_training(
        lambda m: weft.parallelize(
            m, tensor_parallel(world_size), Plan(MEMORY_RULES[case], sequence_parallel=sequence_parallel)
        ),
        Llama(LlamaArgs(dtype=torch.float64)),
        token_loss,
        TOKENS,
        "SGD",
    )


@on_ranks(2)
def test_rules_wrap_modules(world_size: int) -> None:
    model = weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), MEMORY_RULES["of blocks"])
    assert all(layer.checkpoint_mode == ("full", True) for layer in model.layers)
    assert report(model).notes[0] == "layers.*: recompute, offload, for 2 modules"
    model = weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), MEMORY_RULES["of the MLP"])
    assert isinstance(model.layers[0].feed_forward, OffloadedModule)  # the operator itself recomputes
    assert not isinstance(model.layers[0].feed_forward, CheckpointedModule)
    assert report(model).notes[0] == "layers.*.feed_forward: offload, for 2 modules"


def _saved_bytes(plan: dict[str, Any], world_size: int) -> int:
    model = weft.parallelize(Llama(LlamaArgs(dim=64, hidden_dim=256)), tensor_parallel(world_size), plan)
    with counted() as count:
        before = count.now()
        output = model(TOKENS[0][0])
        saved = count.now() - before
    del output
    return saved


@on_ranks(2)
def test_rules_reduce_saved_bytes(world_size: int) -> None:
    plain = _saved_bytes({ATTENTION: "attention", MLP: "column_row_mlp"}, world_size)
    attention = _saved_bytes(MEMORY_RULES["recompute"], world_size)
    blocks = _saved_bytes(MEMORY_RULES["of blocks"], world_size)
    assert blocks < attention < plain


class SavesRepeatedly(nn.Module):
    """Several operators save its weight and hidden tensors; one hidden tensor is changed in place in between."""

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


def test_offload_copies_each_activation_once() -> None:
    module = SavesRepeatedly()
    x = torch.randn(64, 64)
    module.in_place = False
    expected = torch.autograd.grad(module(x), module.weight)
    module.in_place = True  # without offload, torch raises in the backward
    offload_activations(module)
    with counted() as count:
        before = count.now()
        loss = module(x)
        # Copies of x, hidden and other, and one more of other after its change; the originals are freed.
        assert count.now() - before == 4 * x.nbytes + loss.nbytes
        gradient = torch.autograd.grad(loss, module.weight)
        del loss
        assert count.now() - before == gradient[0].nbytes
    assert torch.equal(gradient[0], expected[0])


def test_offload_is_off_in_evaluation_and_compilation() -> None:
    module, x = SavesRepeatedly(), torch.randn(64, 64)
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


def test_offload_with_changed_weights_raises() -> None:
    """With saved-tensor hooks, torch checks no versions, and the gradients would be those of the new weight."""
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    offload_activations(module)
    loss = module(x).sum()
    with torch.no_grad():
        module.weight.mul_(10)
    with pytest.raises(RuntimeError, match=r"a parameter of the shape \[4, 4\], or a view of one, was changed after"):
        loss.backward()


class SparseProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.graph, self.weight = torch.eye(4).to_sparse(), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, x @ self.weight)


def test_offload_skips_sparse_tensors() -> None:
    module, x = SparseProduct(), torch.randn(4, 4)
    expected = torch.autograd.grad(module(x).square().sum(), module.weight)
    offload_activations(module)
    assert torch.equal(torch.autograd.grad(module(x).square().sum(), module.weight)[0], expected[0])


@on_ranks(2)
@pytest.mark.parametrize("reshard", [False, True])
def test_offload_with_gathered_weights_matches_unsharded(world_size: int, reshard: bool) -> None:
    """Freeing weights after the forward and gathering them again does not count as a change of the weights."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(dtype=torch.float64))
    model = weft.parallelize(copy.deepcopy(reference), mesh, rules(offload=True))
    apply_fsdp(model, mesh["data_parallel"], reshard_after_forward=reshard)
    for each in (model, reference):
        token_loss(each, TOKENS[0]).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad.full_tensor(), theirs[name].grad, rtol=1e-10, atol=1e-12)
    model = weft.parallelize(
        Llama(LlamaArgs()), mesh, {"": {"style": "replicate", "offload": True}, MLP: "column_row_mlp"}
    )
    with pytest.raises(ValueError, match=r"the model itself says offload, but FSDP2 gathers 'layers\.\d' inside it"):
        apply_fsdp(model, mesh["data_parallel"], reshard_after_forward=reshard)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(8, 8, 6)

    def forward(self, *, left: Tensor, right: Tensor, scale: float) -> Tensor:
        return self.inner(left, right) * scale


def test_checkpoint_offloads_keywords() -> None:
    x, y = torch.randn(64, 8, requires_grad=True), torch.randn(64, 8, requires_grad=True)
    saved, gradients = [], []
    for offload in (False, True):
        torch.manual_seed(0)
        module = ByKeyword()
        checkpoint_activations(module, "", offload=offload)
        with counted() as count:
            before = count.now()
            output = module(left=x, right=y, scale=2.0)
            saved.append(count.now() - before)
        gradients.append(torch.autograd.grad(output.sum(), (x, y)))
        del output
    assert saved[1] - saved[0] == x.nbytes + y.nbytes  # on the CPU, the offloaded tensors are copies
    for plain, offloaded in zip(*gradients, strict=True):
        assert torch.equal(plain, offloaded)


@pytest.mark.cuda
def test_offloaded_activations_leave_the_device() -> None:
    module = SavesRepeatedly().cuda()
    x = torch.randn(64, 64, device="cuda")
    module.in_place = False
    expected = torch.autograd.grad(module(x), module.weight)
    offload_activations(module)
    before = torch.cuda.memory_allocated()
    loss = module(x)
    assert torch.cuda.memory_allocated() - before < x.nbytes
    assert torch.equal(torch.autograd.grad(loss, module.weight)[0], expected[0])


@on_ranks(2)
def test_conflicting_options_raise(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    for option in ({"recompute": True}, {"offload": True}, {"precision": "float32"}):
        with pytest.raises(
            ValueError, match=r"rule for 'layers' says \w+.*, but a ModuleList has no forward of its own"
        ):
            weft.parallelize(
                Llama(LlamaArgs()), mesh, {"layers": {"style": "replicate", **option}, MLP: "column_row_mlp"}
            )
    inside = {"layers.*": {"style": "replicate", "recompute": True}, ATTENTION: {"style": "attention", "offload": True}}
    with pytest.raises(
        ValueError, match=r"rule for 'layers.0.attention' says offload, which would keep activations that the rec"
    ):
        weft.parallelize(Llama(LlamaArgs()), mesh, inside)
    model = weft.parallelize(Llama(LlamaArgs()), mesh, rules(offload=True))
    with pytest.raises(ValueError, match=r"rule of 'layers.0.attention' says offload, which would keep what a checkp"):
        checkpoint_activations(model, "full")
    model = weft.parallelize(Llama(LlamaArgs()), mesh, MEMORY_RULES["recompute"])
    with pytest.raises(ValueError, match=r"'attention' in 'layers.0' says recompute, and a selective checkpoint would"):
        checkpoint_activations(model, "selective")
    twice = nn.ModuleDict({"a": nn.LayerNorm(8), "mlp": FeedForward(8, 16)})
    twice["b"] = twice["a"]
    plan = {"a": {"style": "replicate", "recompute": True}, "b": "replicate", "mlp": "column_row_mlp"}
    with pytest.raises(ValueError, match=r"'a' and 'b' are one module but get the options 'recompute' and 'none'"):
        weft.parallelize(twice, mesh, plan)
    under = nn.ModuleDict({"a": nn.Sequential(nn.LayerNorm(8)), "mlp": FeedForward(8, 16)})
    under["b"] = nn.Sequential(under["a"][0])
    plan = {name: {"style": "replicate", "precision": each} for name, each in (("a", "float32"), ("b", "bfloat16"))}
    with pytest.raises(ValueError, match=r"'a.0' and 'b.0' are one module but get the options 'precision float32' and"):
        weft.parallelize(under, mesh, {**plan, "mlp": "column_row_mlp"})
    assert not any(isinstance(parameter, DTensor) for parameter in (*twice.parameters(), *under.parameters()))
    model = weft.parallelize(Llama(LlamaArgs()), mesh, rules(precision="bfloat16"))
    with pytest.raises(ValueError, match=r"computes in torch.bfloat16 by its rule, which a plain copy would not"):
        weft.export_local(model)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"style": "row", "recompute": True},
            "recompute is not supported by style 'row'; remove recompute or use style",
        ),
        ({"style": "vocab_head", "offload": True}, "offload is not supported by style 'vocab_head'; remove offload"),
        (
            {"style": "ignore", "precision": "float16"},
            "precision = 'float16' is not supported by style 'ignore'; remove",
        ),
        (
            {"style": "row", "precision": "float64"},
            "unknown precision 'float64': use one of float32, bfloat16, float16",
        ),
        ({"style": "row", "offload": 1}, "has the value {'style': 'row', 'offload': 1}; write a style"),
    ],
)
def test_meaningless_options_raise(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Plan({"a": rule})
    assert "pattern 'a'" in str(error.value) and message in str(error.value)
