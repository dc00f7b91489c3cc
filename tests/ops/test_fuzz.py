"""Random argument sets for every operator, drawn by tests/ops/fuzz; `make soak` runs 10,000 for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from ops.fuzz import NAMES, OPERATORS, WITHOUT_GROUP, check_messages, messages
from ops.fuzz.check import check
from ops.fuzz.draws import RankInGroup, Value
from ops.fuzz.launch import run_calls
from ops.fuzz.linears import ColumnLinear
from ops.fuzz.operator import Call, Operator, draw_call
from ops.fuzz.rules import ExpectedError, Violations
from ops.operators import NEEDS_NCCL
from support.ranks import run_on_ranks


@pytest.mark.parametrize("operator", NAMES)
@pytest.mark.parametrize(("num_ranks", "first_seed", "count"), [(2, 0, 120), (3, 120, 40)])
def test_random_sets_agree_or_raise(operator: str, num_ranks: int, first_seed: int, count: int) -> None:
    outcomes = run_on_ranks(num_ranks, run_calls, operator=operator, first_seed=first_seed, count=count)
    assert all(each == outcomes[0] for each in outcomes)
    assert outcomes[0]["agreed"] >= count / 2 and outcomes[0]["raised"] >= 1, outcomes[0]


@pytest.mark.parametrize("operator", ["column_row_mlp", "pipeline_wait"])
def test_random_sets_over_gloo(operator: str) -> None:
    """Over gloo, which test_random_sets_on_cuda uses, CPU tensors give the same results."""
    _check_over_gloo(operator, "cpu", 25)


@pytest.mark.cuda
@pytest.mark.parametrize("operator", sorted({*NAMES} - {*NEEDS_NCCL}))
def test_random_sets_on_cuda(operator: str) -> None:
    """The same sets on a GPU that 2 ranks share."""
    _check_over_gloo(operator, "cuda", 60)


def _check_over_gloo(operator: str, device: str, count: int) -> None:
    call = {"operator": operator, "first_seed": 0, "count": count}
    outcomes = run_on_ranks(2, run_calls, timeout=300, **call, device=device, backend="gloo")
    assert all(each == outcomes[0] for each in outcomes)
    counts = Counter(outcomes[0])
    assert counts["agreed"] >= count / 2 and counts["raised"] >= 1, counts


def test_table_without_dims_raises() -> None:
    with pytest.raises(ValueError, match="weft::vocab_parallel_embedding: got weight of shape"):
        weft.ops.vocab_parallel_embedding(torch.tensor([0]), torch.tensor(1.0), 0, group_name="")


def test_vocab_start_beyond_int32_is_accepted() -> None:
    ids = torch.tensor([1], dtype=torch.int32)
    assert weft.ops.vocab_parallel_embedding(ids, torch.ones(4, 2), 2**32, group_name="").count_nonzero() == 0


def test_classes_beyond_int64_raise() -> None:
    logits, target = torch.ones(1, 4), torch.tensor([1])
    with pytest.raises(ValueError, match="got 4 classes from vocab_start"):
        weft.ops.vocab_parallel_cross_entropy(logits, target, 2**63 - 2, group_name="", vocab_size=8)


def test_every_public_operator_has_sets() -> None:
    names = {schema.name.removeprefix("weft::") for schema in torch._C._jit_get_all_schemas()}
    registered = {name for name in names if hasattr(torch.ops.weft, name) and not name.startswith("_")}
    assert registered == {*NAMES, *WITHOUT_GROUP}, "write a class in tests/ops/fuzz for each operator"


def test_seed_determines_call() -> None:
    for name, operator in OPERATORS.items():
        calls = [draw_call(operator, seed=5, world_size=2) for _ in range(2)]
        assert str(calls[0]) == str(calls[1]) and f"--operator {name} --ranks 2 --seed 5" in str(calls[0])
        for one, other in zip(calls[0].tensors(), calls[1].tensors(), strict=True):
            assert one.is_meta or torch.equal(one, other)
    for name in messages.NAMES:
        exchanges = [messages.draw_exchange(name, seed=5, world_size=2) for _ in range(2)]
        assert exchanges[0] == exchanges[1] and f"--operator {name} --ranks 2 --seed 5" in str(exchanges[0])


class WrongValues(ColumnLinear):
    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return tuple(value * 1.001 for value in super().reference(values, options, ranks_in_group))


class WrongGradients(ColumnLinear):
    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        values.weight = values.weight * 1.001 - values.weight.detach() * 0.001
        return super().reference(values, options, ranks_in_group)


class AlwaysExpectsError(ColumnLinear):
    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        yield ExpectedError(ValueError, "got x")


class NeverExpectsError(ColumnLinear):
    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        return iter(())


class RaisesTorchsTexts(ColumnLinear):
    def run(self, arguments: dict[str, object]) -> tuple[Tensor, ...]:
        try:
            return super().run(arguments)
        except Exception as error:
            raise type(error)(f"linear(): {error}") from None


class ChangesItsInput(ColumnLinear):
    def run(self, arguments: dict[str, object]) -> tuple[Tensor, ...]:
        result = super().run(arguments)
        with torch.no_grad():
            arguments["weight"].mul_(2)
        return result


def _calls_on_one_rank(operator: Operator, is_wanted: Callable[[Call], bool]) -> list[Call]:
    """Return the first three calls on a group of one that satisfy `is_wanted`."""
    calls = (draw_call(operator, seed, world_size=2) for seed in range(3000))
    return list(islice((call for call in calls if call.group == "" and is_wanted(call)), 3))


def _is_large(call: Call) -> bool:
    return _is_valid(call) and all(one.numel() > 4 and one.dtype == torch.float64 for one in call.tensors()[:2])


def _has_weight_gradient(call: Call) -> bool:
    return _is_large(call) and "weight" in call.requires_grad and call.mode == "backward"


def _has_no_gradient(call: Call) -> bool:
    return _is_valid(call) and call.mode == "no_grad" and call.values["weight"].count_nonzero() > 0


def _is_valid(call: Call) -> bool:
    return not _is_invalid(call)


def _is_invalid(call: Call) -> bool:
    return any(draw_call(ColumnLinear(), call.seed, call.world_size).expected_errors)


DEFECTS = [
    (WrongValues(), _is_large, "result 0 is off by"),
    (WrongGradients(), _has_weight_gradient, "gradient of weight is off by"),
    (AlwaysExpectsError(), _is_valid, "the call succeeded; expected one of"),
    (NeverExpectsError(), _is_invalid, "Error: "),
    (RaisesTorchsTexts(), _is_invalid, "not a sentence that begins with the operator's name and 'got': linear()"),
    (ChangesItsInput(), _has_no_gradient, "weight has changed"),
]


@pytest.mark.parametrize(("operator", "is_wanted", "text"), DEFECTS, ids=lambda value: type(value).__name__)
def test_defects_are_reported(operator: Operator, is_wanted: Callable[[Call], bool], text: str) -> None:
    calls = _calls_on_one_rank(operator, is_wanted)
    assert calls
    for call in calls:
        with pytest.raises(AssertionError) as caught:
            check(call, 0, {"": ""})
        assert text in str(caught.value) and f"--seed {call.seed} " in str(caught.value)


def _patched_operators(**calls: Callable[..., object]) -> SimpleNamespace:
    """Return the message operators, some of them replaced."""
    return SimpleNamespace(**{name: getattr(weft.ops, name) for name in messages.NAMES} | calls)


def _send_doubled(tensors: list[Tensor], *where: object) -> Tensor:
    return weft.ops.pipeline_send([2 * tensor for tensor in tensors], *where)


def _double_gradients(token: Tensor) -> list[Tensor]:
    received = weft.ops.pipeline_wait(token)
    for tensor in received:
        tensor.register_hook(lambda grad: 2 * grad)
    return received


def _join_doubled(x: Tensor, tokens: list[Tensor]) -> Tensor:
    return weft.ops.join(2 * x, tokens)


MESSAGE_DEFECTS = [
    ({"pipeline_send": _send_doubled}, False, {1: "message 0: tensor("}),
    ({"pipeline_wait": _double_gradients}, True, {0: "gradient of message 0: tensor("}),
    ({"join": _join_doubled}, True, {0: "joined: tensor("}),
]


def find_message_defect(rank: int, defect: int) -> str:
    """Return this rank's error in an exchange of one message with a defect; "" if it finds none."""
    calls, needs_grad, _ = MESSAGE_DEFECTS[defect]
    spec = messages.TensorSpec((3, 2), torch.float32, needs_grad, True, "contiguous", "full", True, seed=7)
    exchange = messages.Exchange("pipeline_send", 0, 2, "world", 0, 2, joined=spec)
    exchange.messages.append(messages.Message(0, 1, 0, (spec,), is_constant=False))
    kinds = [("send", 0), ("recv", 1), ("wait", 1), *([("backward", 1), ("gradients", 0)] if needs_grad else [])]
    exchange.steps = [messages.Step(kind, of_rank, (0,)) for kind, of_rank in kinds]
    groups = {"world": dist.group.WORLD.group_name}
    assert check_messages.check_exchange(exchange, rank, groups) == "agreed"
    check_messages.OPS = _patched_operators(**calls)
    try:
        check_messages.check_exchange(exchange, rank, groups)
    except AssertionError as error:
        return str(error)
    finally:
        check_messages.OPS = weft.ops
    return ""


@pytest.mark.parametrize("defect", range(len(MESSAGE_DEFECTS)))
def test_message_defects_are_reported(defect: int) -> None:
    reported = run_on_ranks(2, find_message_defect, defect=defect)
    expected = MESSAGE_DEFECTS[defect][2]
    assert [rank for rank in range(2) if reported[rank]] == list(expected)
    assert all(text in reported[rank] and "--seed 0 " in reported[rank] for rank, text in expected.items()), reported


def test_accepted_invalid_call_is_reported() -> None:
    exchanges = (messages.draw_exchange("pipeline_flush", seed, world_size=2) for seed in range(100))
    exchange = next(exchange for exchange in exchanges if exchange.expected_errors)
    exchange.invalid_arguments["group"] = ""  # a valid group: the call raises nothing
    with pytest.raises(AssertionError, match="the call succeeded; expected one of"):
        check_messages.check_exchange(exchange, 0, {})
