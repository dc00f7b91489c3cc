"""split_float, join_float, quantize_blocks and dequantize_blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from ops.optimizer_oracle import BLOCK, LARGEST, block_maxima, companded, decode, per_element, scale_shape

SHAPES = [(3, 700), (2, 256), (1000,), (), (2, 3, 100), (0, 4), (4, 0), (0,)]


def interesting_bits() -> Tensor:
    """Return bit patterns of float32 near each power of two of the halves, with both signs, and random ones."""
    uppers = torch.tensor([0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3FFF, 0x4000, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF])
    lowers = torch.tensor([0, 1, 0x7E, 0x7F, 0x80, 0x81, 0xFF, 0x100, 0x17F, 0x180, 0x7F7F, 0x7F80, 0x7FFF, 0x8000])
    lowers = torch.cat([lowers, lowers + 0x7F01, torch.tensor([0xFF7F, 0xFF80, 0xFF81, 0xFFFF])])
    magnitudes = (uppers[:, None] << 16 | lowers).flatten()
    torch.manual_seed(0)
    magnitudes = torch.cat([magnitudes, torch.randint(0, 2**31, (5000,))])
    signed = torch.cat([magnitudes, magnitudes - 2**31])
    return signed.to(torch.int32)


def test_int16_restores_every_bit() -> None:
    bits = interesting_bits()
    x = bits.view(torch.float32)
    high, low = weft.ops.split_float(x, torch.int16)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16 and high.shape == low.shape == x.shape
    joined = weft.ops.join_float(high, low)
    numbers = ~x.isnan()
    assert torch.equal(joined.view(torch.int32)[numbers], bits[numbers])
    assert joined.isnan()[~numbers].all() and high.isnan()[~numbers].all() and (low[~numbers] == 0).all()
    assert torch.equal(joined.signbit(), x.signbit())
    infinite = x.isinf()
    assert infinite.any() and (low[infinite] == 0).all() and torch.equal(high[infinite].float(), x[infinite])


def test_bfloat16_half_is_the_nearest_number() -> None:
    x = interesting_bits().view(torch.float32)
    x = x[~x.isnan()]
    for dtype in (torch.int16, torch.int8):
        high, _ = weft.ops.split_float(x, dtype)
        nearest = x.to(torch.bfloat16)
        is_tie = x.view(torch.int32) & 0xFFFF == 0x8000
        if dtype == torch.int8:  # rounding to 24 bits can make a tie
            is_tie |= ((x.view(torch.int32) & 0xFFFF) - 0x8000).abs() <= 0x80
        assert is_tie.any() and torch.equal(high[~is_tie], nearest[~is_tie])
        away = (x.view(torch.int32) + 0x8000) & -0x10000
        exact = x.view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(high.float()[exact].view(torch.int32), away[exact])


def test_int8_restores_the_number_rounded_to_24_bits() -> None:
    bits = interesting_bits()
    x = bits.view(torch.float32)
    joined = weft.ops.join_float(*weft.ops.split_float(x, torch.int8))
    numbers = ~x.isnan()
    long = bits.long() & 0xFFFFFFFF
    rounded = (long + 0x7F + (long >> 8 & 1)) & 0xFFFFFF00
    assert torch.equal(joined.view(torch.int32).long()[numbers] & 0xFFFFFFFF, rounded[numbers])
    assert joined.isnan()[~numbers].all()
    again = weft.ops.join_float(*weft.ops.split_float(joined, torch.int8))
    assert torch.equal(again[numbers], joined[numbers])


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_the_nearest(shape: tuple[int, ...], signed: bool) -> None:
    """A root is off by at most half a step h, so a number of root r by at most h (2 r + h)."""
    torch.manual_seed(1)
    x = torch.randn(shape) * torch.randn(shape).exp()
    x = x if signed else x.abs()
    codes, scale = weft.ops.quantize_blocks(x, signed)
    assert codes.shape == x.shape and codes.dtype == (torch.int8 if signed else torch.uint8)
    assert scale.shape == scale_shape(shape) and torch.equal(scale, block_maxima(x))
    exact = companded(x, scale, codes.dtype)
    expected = exact.round() if signed else torch.where(x > 0, exact.round().clamp(min=1), exact.round())
    near_tie = (exact - exact.floor() - 0.5).abs() < 1e-3
    assert torch.equal(codes.double().abs()[~near_tie], expected[~near_tie]) and near_tie.float().sum() < 10
    decoded = weft.ops.dequantize_blocks(codes, scale)
    torch.testing.assert_close(decoded.double(), decode(codes, scale), rtol=1e-6, atol=0)
    half_step = per_element(scale, shape).sqrt() / LARGEST[codes.dtype] * (0.5 if signed else 1.0)
    assert ((decoded - x).abs() <= half_step * (2 * x.abs().sqrt() + half_step) * (1 + 1e-5)).all()
    again, scale_again = weft.ops.quantize_blocks(decoded, signed)
    assert torch.equal(again, codes)
    torch.testing.assert_close(scale_again, scale, rtol=1e-6, atol=0)


def test_codes_of_special_numbers() -> None:
    x = torch.zeros(6 * BLOCK)
    x[:3] = torch.tensor([1.0, 1e-30, -1e-30])
    x[BLOCK], x[BLOCK + 1] = float("nan"), 1.0
    x[2 * BLOCK] = -float("inf")
    x[3 * BLOCK : 4 * BLOCK] = torch.linspace(1e-45, 1e-38, BLOCK)  # not normal
    x[4 * BLOCK] = torch.finfo(torch.float32).max
    for signed in (True, False):
        codes, scale = weft.ops.quantize_blocks(x, signed)
        decoded = weft.ops.dequantize_blocks(codes, scale)
        largest = LARGEST[codes.dtype]
        assert codes[:3].tolist() == ([127, 0, 0] if signed else [255, 1, 0])
        assert torch.equal(scale.isnan(), torch.tensor([False, True, True, False, False, False]))
        assert (codes[BLOCK : 3 * BLOCK] == 0).all() and decoded[BLOCK : 3 * BLOCK].isnan().all()
        assert codes[4 * BLOCK - 1] == codes[4 * BLOCK] == largest and scale[5] == 0
        assert not decoded[:BLOCK].isnan().any() and (decoded[5 * BLOCK :] == 0).all()


def test_any_strides_are_read() -> None:
    x = torch.randn(300, 4).t()
    for expected, actual in zip(
        weft.ops.quantize_blocks(x.contiguous(), True), weft.ops.quantize_blocks(x, True), strict=True
    ):
        assert torch.equal(expected, actual) and actual.is_contiguous()
    high, low = weft.ops.split_float(x, torch.int16)
    assert high.is_contiguous() and torch.equal(weft.ops.join_float(high.t().contiguous().t(), low), x)


CALLS = [
    ("split_float", (torch.randn(3, 300), torch.int8)),
    ("join_float", (torch.randn(3, 300).bfloat16(), torch.zeros(3, 300, dtype=torch.int16))),
    ("quantize_blocks", (torch.randn(3, 300), True)),
    ("dequantize_blocks", (torch.zeros(3, 300, dtype=torch.uint8), torch.ones(3, 2))),
]


@pytest.mark.parametrize(("name", "args"), CALLS, ids=[name for name, _ in CALLS])
def test_opcheck(name: str, args: tuple[object, ...]) -> None:
    results = torch.library.opcheck(getattr(torch.ops.weft, name).default, args)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


def test_conversions_have_no_gradient() -> None:
    x = torch.randn(4, requires_grad=True)
    codes, scale = weft.ops.quantize_blocks(x, True)
    assert not codes.requires_grad
    with pytest.raises(RuntimeError, match="not implemented"):
        scale.sum().backward()


INVALID = [
    ("split_float", (torch.zeros(2).double(), torch.int16), "got x of dtype Double; pass float32"),
    ("split_float", (torch.zeros(2), torch.int32), "got low_dtype Int; pass int16 or int8"),
    (
        "join_float",
        (torch.zeros(2), torch.zeros(2, dtype=torch.int16)),
        "got high of dtype Float and low of dtype",
    ),
    (
        "join_float",
        (torch.zeros(2).bfloat16(), torch.zeros(3, dtype=torch.int8)),
        r"got high of shape \[2\] and low",
    ),
    ("quantize_blocks", (torch.zeros(2).half(), True), "got x of dtype Half; pass float32"),
    ("dequantize_blocks", (torch.zeros(2), torch.zeros(1)), "got codes of dtype Float and scale of dtype Float; pass"),
    (
        "dequantize_blocks",
        (torch.zeros(2, 300, dtype=torch.int8), torch.zeros(4)),
        r"got scale of shape \[4\] with codes of shape \[2, 300\]; pass \[2, 2\], one scale per 256 elements of a row",
    ),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "args", "message"), INVALID)
def test_invalid_arguments_raise(name: str, args: tuple[object, ...], message: str, device: str) -> None:
    moved = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
    with pytest.raises((TypeError, ValueError), match=f"weft::{name}: {message}"):
        getattr(weft.ops, name)(*moved)
