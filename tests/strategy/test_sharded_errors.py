"""Errors that a module's own code raises on shards name the module, its rule, its shards and the remedy."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import weft
from support.parity import tensor_parallel
from support.ranks import on_ranks
from weft.strategy.modules.sharded_errors import ShardedModuleError


class Viewing(nn.Module):
    """Views the output of a column layer with the full number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(-1, 3, 4).flatten(1))


class Reading(nn.Module):
    """Reads the weight of a layer instead of calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.up.weight)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("nothing of shards")


@on_ranks(2)
@pytest.mark.parametrize(
    ("module", "plan", "texts"),
    [
        (
            Viewing,
            {"inner.up": "column", "inner.down": "row"},
            ("'inner', a Viewing, failed on its shards", "'up.weight' is [6, 8] of [12, 8] by inner.up (column)"),
        ),
        (
            Reading,
            {"inner.up": "column_gather_output"},
            ("'inner', a Reading, failed on its shards", "DTensor", "rather than read their weights"),
        ),
    ],
    ids=["shapes", "mixed tensors"],
)
def test_code_that_fails_on_shards_raises(
    world_size: int, module: type[nn.Module], plan: dict, texts: tuple[str, ...]
) -> None:
    model = nn.Sequential()
    model.add_module("inner", module())
    weft.parallelize(model, tensor_parallel(world_size), weft.strategy.Plan(plan, verify="never"))
    with pytest.raises(ShardedModuleError) as caught:
        model(torch.randn(4, 8))
    assert all(text in str(caught.value) for text in texts), caught.value
    assert "\n" not in str(caught.value) and caught.value.__cause__ is not None


@on_ranks(2)
def test_other_errors_propagate(world_size: int) -> None:
    model = nn.Sequential(Failing())
    weft.parallelize(model, tensor_parallel(world_size), {"0.up": "column_gather_output"})
    with pytest.raises(KeyError, match="nothing of shards"):
        model(torch.randn(4, 8))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


@on_ranks(2)
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"first": "column"}, "'first' is column, .* reaches 'second' with the style 'replicate'; give 'second'"),
        ({"second": "row"}, "'second' is row, .* comes from 'first' with the style 'replicate'"),
        ({"second": "column"}, "'second' is column, .* no row layer follows and the model returns it"),
    ],
    ids=["column alone", "row alone", "column at the end"],
)
def test_inconsistent_rules_raise(world_size: int, plan: dict[str, str], message: str) -> None:
    """The rules raise before the model changes."""
    model = Chain()
    with pytest.raises(ValueError, match=message):
        weft.parallelize(model, tensor_parallel(world_size), plan)
    assert type(model.first) is nn.Linear


@on_ranks(2)
def test_column_layer_before_unknown_code_raises(world_size: int) -> None:
    """The root has no forward, like some LightningModules: only its child can be called."""
    mesh = tensor_parallel(world_size)
    with pytest.raises(ValueError, match=r"'chain.second' is column, .* no row layer follows and the model returns it"):
        weft.parallelize(nn.ModuleDict({"chain": Chain()}), mesh, {"chain.second": "column"})
    # A row layer outside of the child may accept the shards.
    both = nn.ModuleDict({"chain": Chain(), "head": nn.Linear(8, 4)})
    weft.parallelize(both, mesh, {"chain.second": "column", "head": "row"})


class AcrossFeatures(Chain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden - hidden.mean(-1, keepdim=True))


@on_ranks(2)
def test_rules_that_change_results_raise(world_size: int) -> None:
    plan = {"first": "column", "second": "row"}
    with pytest.raises(ValueError, match=r"the rules for 'first' and 'second' change what .* computes"):
        weft.parallelize(AcrossFeatures(), tensor_parallel(world_size), weft.strategy.Plan(plan, verify="always"))
    with pytest.raises(ValueError, match="verify is 'sometimes'; pass one of 'auto', 'always', 'never'"):
        weft.strategy.Plan(plan, verify="sometimes")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@on_ranks(2)
def test_rules_without_heads_are_named(world_size: int) -> None:
    """Without `heads`, each rank computes the full number of heads from half of the features: no code raises."""
    column, columns = {"style": "column", "heads": "num_heads"}, ("0.q", "0.k", "0.v")
    without_heads = {**dict.fromkeys(columns, "column"), "0.o": "row"}
    message = r"change what '0' computes: the input of 'o' differs by .* of its norm; add heads: num_heads to the rules"
    mesh = tensor_parallel(world_size)
    with pytest.raises(ValueError, match=message):
        weft.parallelize(nn.Sequential(Attention()), mesh, weft.strategy.Plan(without_heads, verify="always"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weft.parallelize(nn.Sequential(Attention()), mesh, without_heads)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (mesh.get_rank() == 0) and all(re.search(message, text) for text in texts)
    rules = {**dict.fromkeys(columns, column), "0.o": "row"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weft.parallelize(nn.Sequential(Attention()), mesh, weft.strategy.Plan(rules, verify="always"))


class ViewingHeads(Viewing):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(-1, self.num_heads, 4).flatten(1))


@on_ranks(2)
def test_error_on_shards_advises_heads(world_size: int) -> None:
    model = ViewingHeads()
    plan = weft.strategy.Plan({"up": "column", "down": "row"}, verify="never")
    weft.parallelize(model, tensor_parallel(world_size), plan)
    with pytest.raises(ShardedModuleError, match="if its rules leave out heads, add heads: num_heads to those of"):
        model(torch.randn(4, 8))


def test_indivisible_heads_are_named() -> None:
    model = nn.Sequential(Attention())
    model[0].num_heads = 3
    [sentence] = weft.strategy.Plan("auto").assign(model, 2).warnings()
    assert sentence.endswith("of its norm, and 'num_heads' = 3 does not divide by 2.")


def test_attention_style_divides_its_own_heads() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads = 4
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(24, 24) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
            )
            return self.wo(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    for verify in ("auto", "always"):
        assignments = weft.strategy.Plan({"0": "attention"}, verify=verify).assign(nn.Sequential(Named()), 2)
        assert assignments.styles["0.wq"].style == "column" and not assignments.warnings()


class WithoutForward(nn.Module):
    """Like a LightningModule whose training step calls its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)


def test_rules_that_cannot_be_compared_are_named() -> None:
    rules = {"first": "column", "second": "row"}
    message = r"for 'first', 'second' are not compared with the unsharded code \('first': the forward did not call it\)"
    [sentence] = weft.strategy.Plan(rules).assign(WithoutForward(), 2).warnings()
    assert re.search(message, sentence)
    with pytest.raises(ValueError, match=message):
        weft.strategy.Plan(rules, verify="always").assign(WithoutForward(), 2)
    assert not weft.strategy.Plan(rules, verify="never").assign(WithoutForward(), 2).warnings()


class FailingInCollective(Failing):
    def forward(self, x: Tensor) -> Tensor:
        raise weft.PeerLostError("weft: rank 1 of group 'tp' ended during all_reduce, shape [3]")


@on_ranks(2)
def test_errors_of_collectives_propagate(world_size: int) -> None:
    """Such errors name ranks and an operation; other styles of layers are no remedy."""
    model = nn.Sequential(FailingInCollective())
    weft.parallelize(model, tensor_parallel(world_size), {"0.up": "column_gather_output"})
    with pytest.raises(weft.PeerLostError, match="ended during all_reduce"):
        model(torch.randn(4, 8))


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.one, self.two = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.router(x).relu()
        return self.one(hidden) + self.two(hidden)


def test_wrong_receiver_is_the_first_by_name() -> None:
    """The error is the same on every rank, and row is no remedy for a layer with another rule."""
    rules = {"router": "column", "one": "column", "two": "column"}
    with pytest.raises(ValueError, match=r"reaches 'one' with the style 'column'; give 'router' column_gather_output"):
        weft.strategy.Plan(rules).assign(TwoReaders(), 2)
