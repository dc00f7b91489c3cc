"""The styles besides column and row: parity with the unsharded model, numbers of collectives, and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.collectives.profiled import collectives_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import weft
from support.models import Conv1D, Gpt2, Llama, LlamaArgs, RMSNorm, token_batches
from support.parity import assert_same_training, full, tensor_parallel
from support.ranks import on_ranks
from weft.strategy.data_parallel import ShardedStates
from weft.strategy.modules.vocab_head import Head, VocabParallelLogits

TOKENS = token_batches(4, 37)
BLOCKS = {"layers.*.attention": "attention", "layers.*.feed_forward": "column_row_mlp"}
VOCAB = {"tok_embeddings": "vocab_embedding", "output": "vocab_head"}


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def class_dim_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of logits of shape (batch, classes, tokens), for which the logits are gathered."""
    return nn.CrossEntropyLoss(label_smoothing=0.1)(model(batch[0]).transpose(1, 2), batch[1])


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("head", ["vocab_head", "column_gather_output", "gathered by the loss"])
def test_output_layers_match_unsharded(world_size: int, head: str, tied: bool) -> None:
    """The shards of 37 classes are uneven."""
    torch.manual_seed(0)
    heads = 6 if world_size == 3 else 4
    loss = class_dim_loss if head == "gathered by the loss" else token_loss
    plan = {**BLOCKS, **VOCAB, **({"output": head} if head in weft.strategy.STYLES else {})}
    assert_same_training(
        lambda m: weft.parallelize(m, tensor_parallel(world_size), plan),
        Llama(LlamaArgs(dim=24, n_heads=heads, n_kv_heads=heads, tie_head=tied, dtype=torch.float64)),
        loss,
        TOKENS,
        "SGD",
    )


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("linear", [nn.Linear, Conv1D])
def test_gathered_and_split_layers_match_unsharded(world_size: int, linear: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plan = {
        "h.*.attn": "attention",
        "h.*.mlp.c_fc": "column_gather_output",
        "h.*.mlp.c_proj": "row_split_input",
    }
    assert_same_training(
        lambda m: weft.parallelize(m, tensor_parallel(world_size), plan),
        Gpt2(dim=20, linear=linear, dtype=torch.float64),
        token_loss,
        TOKENS,
        "SGD",
    )


@on_ranks(2)
def test_collectives_of_gathered_and_split_layers(world_size: int) -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4))
    weft.parallelize(model, tensor_parallel(world_size), {"0": "column_gather_output", "1": "row_split_input"})
    x = torch.randn(3, 6, requires_grad=True)
    output = collectives_of(lambda: model(x), {"all_gather_into_tensor": 1, "all_reduce": 1})
    collectives_of(lambda: output.sum().backward(), {"all_gather_into_tensor": 1, "all_reduce": 1})


class NormedHeads(nn.Module):
    """Attention with a norm on each query head, whose weight all heads share."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.q_norm = RMSNorm(dim // n_heads, torch.get_default_dtype())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v)
        return self.wo(y.transpose(1, 2).flatten(2))


@on_ranks(2, 4)
@pytest.mark.parametrize("by_hand", [False, True], ids=["attention", "rules"])
def test_head_norms_match_unsharded(world_size: int, by_hand: bool) -> None:
    torch.manual_seed(0)
    layers = {f"w{each}": "column" for each in "kv"} | {"wo": "row", "q_norm": "replicate_sum_gradients"}
    plan = {"wq": {"style": "column", "heads": "n_heads"}, **layers} if by_hand else {"": "attention"}
    assert_same_training(
        lambda m: weft.parallelize(m, tensor_parallel(world_size), plan),
        NormedHeads(16, 4).double(),
        lambda m, x: m(x).square().mean(),
        [torch.randn(2, 5, 16, dtype=torch.float64) for _ in range(3)],
        "SGD",
    )


@on_ranks(2)
def test_ignored_modules_are_unchanged(world_size: int) -> None:
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(dtype=torch.float64))
    model = copy.deepcopy(reference)
    originals = dict(model.layers[0].named_parameters())
    plan = {"layers.1.feed_forward": "column_row_mlp", "layers.0": "ignore"}
    weft.parallelize(model, tensor_parallel(world_size), plan)
    assert dict(model.layers[0].named_parameters()) == originals
    assert type(model.layers[0]) is type(reference.layers[0])
    assert not any(isinstance(parameter, DTensor) for parameter in model.layers[0].parameters())
    assert {row.style for row in weft.strategy.report(model).rows if row.parameter.startswith("layers.0")} == {"plain"}
    token_loss(model, TOKENS[0]).backward()
    token_loss(reference, TOKENS[0]).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(full(ours.grad), theirs.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: n + m)


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


class OwnEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


@on_ranks(2)
def test_embedding_subclasses_match_unsharded_or_raise(world_size: int) -> None:
    torch.manual_seed(0)
    reference = ScaledEmbedding(9, 4, padding_idx=2)
    model = nn.Sequential(copy.deepcopy(reference))
    weft.parallelize(model, tensor_parallel(world_size), {"0": "vocab_embedding"})
    ids = torch.tensor([[0, 2, 8], [5, 2, 5]])
    assert_close(model(ids), reference(ids))
    model(ids).square().sum().backward()
    reference(ids).square().sum().backward()
    assert_close(full(model[0].weight.grad), reference.weight.grad)
    with pytest.raises(ValueError, match="OwnEmbedding has a forward of its own"):
        weft.parallelize(nn.Sequential(OwnEmbedding(9, 4)), tensor_parallel(world_size), {"0": "vocab_embedding"})
    with pytest.raises(ValueError, match="ScaledEmbedding has a forward of its own around its table"):
        weft.export_local(model)
    plain = nn.Sequential(nn.Embedding(9, 4, padding_idx=2))
    weft.parallelize(plain, tensor_parallel(world_size), {"0": "vocab_embedding"})
    with pytest.raises(ValueError, match="padding_idx=2 gives that row no gradient"):
        weft.export_local(plain)
    plain.requires_grad_(False)
    assert_close(weft.export_local(plain)(ids), plain(ids))


def make_head(world_size: int, bias: bool = False, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 11, bias=bias, dtype=dtype))
    model = weft.parallelize(copy.deepcopy(reference), tensor_parallel(world_size), {"0": "vocab_head"})
    return model, reference


LOSSES = {
    "flat": lambda logits, target: F.cross_entropy(logits.view(-1, 11), target.view(-1)),
    "reshape": lambda logits, target: F.cross_entropy(logits.reshape((-1, 11)), target.reshape(-1), reduction="sum"),
    "shifted": lambda logits, target: F.cross_entropy(
        logits[..., :-1, :].contiguous().flatten(0, 1), target[..., 1:].flatten(), ignore_index=3
    ),
    "masked": lambda logits, target: F.cross_entropy(logits[target > 4], target[target > 4], label_smoothing=0.2),
    "first": lambda logits, target: F.cross_entropy(logits[:, 0], target[:, 0], reduction="none").mean(),
    "one": lambda logits, target: F.cross_entropy(logits[0, 1], target[0, 1]),
    "cast": lambda logits, target: nn.CrossEntropyLoss()(logits.to(logits.dtype)[0], target[0]),
}
GATHERED = {
    "weighted": lambda logits, target: F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), weight=torch.arange(11.0, dtype=logits.dtype)
    ),
    "probabilities": lambda logits, target: F.cross_entropy(
        logits.flatten(0, 1), F.one_hot(target, 11).flatten(0, 1).to(logits.dtype)
    ),
    "small targets": lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten().to(torch.uint8)),
    "class dim": lambda logits, target: F.cross_entropy(logits.transpose(1, 2), target),
    "flat features": lambda logits, target: logits.flatten(1).square().mean() + logits.view(2, 55)[1, 3],
    "classes": lambda logits, target: logits[..., 2].sum() - logits[:, :, 3:5].mean() + logits[0, 1, 7],
    "log_softmax": lambda logits, target: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), target.flatten()),
    "gather": lambda logits, target: -logits.gather(-1, target.unsqueeze(-1)).sum(),
    "own": lambda logits, target: torch.logsumexp(logits * 2 - 1, -1).sum(),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", [*LOSSES, *GATHERED])
def test_uses_of_logits_match_unsharded(world_size: int, case: str, bias: bool) -> None:
    model, reference = make_head(world_size, bias)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator)
    target = torch.randint(0, 11, (2, 5), generator=generator)
    loss_of = {**LOSSES, **GATHERED}[case]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    logits = model(ours)
    assert isinstance(logits, VocabParallelLogits)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gathered, gather = [], Head.logits
        monkeypatch.setattr(Head, "logits", lambda head, hidden: (gathered.append(hidden), gather(head, hidden))[1])
        loss = loss_of(logits, target)
    assert bool(gathered) == (case in GATHERED)
    assert type(loss) is Tensor
    expected = loss_of(reference(theirs), target)
    assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    loss.backward()
    expected.backward()
    assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(full(mine.grad), other.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_logits_without_gradients_are_regathered_for_loss(world_size: int) -> None:
    model, reference = make_head(world_size)
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = model(x)
    with torch.no_grad():
        assert torch.equal(logits.argmax(-1), reference(x).argmax(-1))
    logits.square().sum().backward()
    reference(x).square().sum().backward()
    assert_close(full(model[0].weight.grad), reference[0].weight.grad, rtol=1e-10, atol=1e-12)
    assert (logits.shape, logits.dtype, logits.dim(), len(logits)) == ((4, 11), torch.float64, 2, 4)
    assert repr(logits) == "VocabParallelLogits([4, 11], torch.float64)"


IN_PLACE_CHANGES = {
    "index": lambda logits: logits.__setitem__((0, 0), 1.0),
    "method": lambda logits: logits.mul_(2),
    "list": lambda logits: torch._foreach_mul_([logits], 2),
    "out": lambda logits: torch.mul(torch.ones(4, 11, dtype=torch.float64), 2, out=logits),
    "view": lambda logits: logits.view(-1, 11)[:2].__setitem__(0, 1.0),
    "operator": lambda logits: logits.__itruediv__(2),
    "function": lambda logits: F.dropout(logits, 0.5, inplace=True),
}


@on_ranks(2)
@pytest.mark.parametrize("case", IN_PLACE_CHANGES)
def test_in_place_changes_raise(world_size: int, case: str) -> None:
    """The loss is computed from the hidden states, so it would miss changes of the logits."""
    model, _ = make_head(world_size)
    logits = model(torch.randn(4, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="would change logits of a vocab_head in place"):
        IN_PLACE_CHANGES[case](logits)


@on_ranks(2)
def test_logits_hooks_see_gradient(world_size: int) -> None:
    model, reference = make_head(world_size)
    x, target = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 4, 10, 7])
    seen: list[Tensor] = []
    for each in (model, reference):
        logits = each(x)
        logits.retain_grad()
        logits.register_hook(lambda grad: seen.append(grad.clone()))
        F.cross_entropy(logits, target).backward()
        seen.append(logits.grad)
    assert len(seen) == 4
    for ours, theirs in zip(seen[:2], seen[2:], strict=True):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_half_precision_logits_match_unsharded(world_size: int, autocast: bool) -> None:
    model, reference = make_head(world_size, dtype=torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(next(reference.parameters()).dtype)
    target = torch.tensor([0, 4, 10, 7])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for change in (lambda logits: logits, Tensor.float):
            loss = F.cross_entropy(change(model(x)), target)
            expected = F.cross_entropy(change(reference(x)), target)
            assert loss.dtype == expected.dtype
            assert model(x).dtype == reference(x).dtype == torch.bfloat16
            assert_close(loss, expected, rtol=2e-2, atol=1e-2)


@on_ranks(2)
def test_loss_gathers_no_logits(world_size: int) -> None:
    """Forward: one all-gather of four numbers per token. Backward: one all-reduce of the input's gradient."""
    model, _ = make_head(world_size)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, 10, 7])
    loss = collectives_of(lambda: F.cross_entropy(model(x), target), {"all_gather_into_tensor": 1})
    collectives_of(loss.backward, {"all_reduce": 1})


@on_ranks(2)
def test_freed_weights_raise(world_size: int) -> None:
    model, _ = make_head(world_size)
    logits = model(torch.randn(4, 6, dtype=torch.float64))
    model[0].weight._local_tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="after the weight they come from was freed"):
        logits.argmax(-1)
    with pytest.raises(ValueError, match="after the weight they come from was freed"):
        F.cross_entropy(logits, torch.tensor([0, 4, 10, 7]))


@on_ranks(2)
def test_changed_hidden_states_raise(world_size: int) -> None:
    model, _ = make_head(world_size)
    hidden = torch.randn(4, 6, dtype=torch.float64)
    logits = model(hidden)
    hidden.zero_()
    for use in (lambda: logits.argmax(-1), lambda: F.cross_entropy(logits, torch.tensor([0, 4, 10, 7]))):
        with pytest.raises(ValueError, match="after the hidden states they come from were changed in place"):
            use()


@on_ranks(2)
def test_reentrant_checkpoints_raise(world_size: int) -> None:
    model, reference = make_head(world_size)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, 10, 7])
    logits = checkpoint(model, x, use_reentrant=True)
    with pytest.raises(ValueError, match="went through an autograd function, such as a reentrant checkpoint"):
        F.cross_entropy(logits, target)
    F.cross_entropy(checkpoint(model, x, use_reentrant=False), target).backward()
    F.cross_entropy(reference(x), target).backward()
    assert_close(full(model[0].weight.grad), reference[0].weight.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("add", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_layer_hooks_see_gradient(world_size: int, add: str) -> None:
    model, reference = make_head(world_size)
    seen: list[Tensor] = []
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    for each in (model, reference):
        getattr(each[0], add)(lambda module, *grads: seen.append(grads[-1][0].clone()))
        F.cross_entropy(each(x), torch.tensor([0, 4, 10, 7])).backward()
    assert_close(seen[0], seen[1], rtol=1e-10, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "fused", "sharded states"])
def test_step_before_use_of_logits_raises(world_size: int, kind: str) -> None:
    model, _ = make_head(world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "fused":
        weft.strategy.fuse(optimizer)
    elif kind == "sharded states":
        ShardedStates(optimizer, init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b")).get_group("a"))
    logits = model(torch.randn(4, 6, dtype=torch.float64))
    F.cross_entropy(logits, torch.tensor([0, 4, 10, 7])).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="after the weight they come from was changed, as an optimizer's step does"):
        logits.argmax(-1)
    with torch.inference_mode():
        assert model(torch.randn(4, 6, dtype=torch.float64)).argmax(-1).shape == (4,)


@on_ranks(2)
def test_compiled_logits_are_gathered(world_size: int) -> None:
    model, reference = make_head(world_size)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 6, dtype=torch.float64)
    assert_close(compiled(x), reference(x))
    assert_close(weft.export_local(model)(x), reference(x))
