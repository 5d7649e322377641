"""The plain backend's functions against floating point, over their whole ranges; and its tables against the core's."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cloister.crypto import plain
from cloister.crypto.plain.functions import TABLES
from cloister.errors import InvalidParameter

ROOT = Path(__file__).parents[2]


def test_the_core_has_the_same_tables() -> None:
    source = (ROOT / "rust/core/src/protocol/tables.rs").read_text()

    def constant(name: str) -> str:
        found = re.search(rf"pub const {name.upper()}: [^=]* = (.*?);\n", source, re.DOTALL)
        assert found, name
        return found[1].replace("_", "")

    assert json.loads((ROOT / "src/cloister/crypto/plain/tables.json").read_text()) == TABLES
    for name, value in TABLES.items():
        if isinstance(value, int):
            assert int(constant(name)) == value
        elif isinstance(value[0], int):
            assert json.loads(constant(name)) == value
        else:
            pieces = re.findall(r"Piece \{(.*?)\}", constant(name))
            assert [{k: int(v) for k, v in re.findall(r"(\w+): (-?\d+)", piece)} for piece in pieces] == value
    assert len(re.findall("pub const", source)) == len(TABLES)


def activations(f: int) -> Tensor:
    """Every number on [-16, 16], and a grid up to 1024."""
    most = (1024 << f) - 1
    return torch.cat([torch.arange(-16 << f, (16 << f) + 1), torch.arange(-most, most, 997)])


@pytest.mark.parametrize("f", [10, 11, 12, 13])
@pytest.mark.parametrize(("ours", "theirs"), [(plain.silu, functional.silu), (plain.gelu, functional.gelu)])
def test_activations(ours: Callable[..., Tensor], theirs: Callable[[Tensor], Tensor], f: int) -> None:
    x = activations(f)
    error = (plain.decode(ours(x, f), f) - theirs(plain.decode(x, f))).abs().max()
    assert error <= 2**-10.6 + 2.0 ** -(f + 1)
    far = x[x.abs() > 10 << f]
    assert torch.equal(ours(far, f), plain.relu(far, f))


@pytest.mark.parametrize(("f", "octaves", "g"), [(12, 0, 12), (12, 0, 20), (10, 0, 12), (13, 8, 16), (12, 12, 20)])
def test_exponential(f: int, octaves: int, g: int) -> None:
    top = int((octaves * 0.6931 + 1.3) * 2**f)
    x = torch.cat([torch.arange(top - (21 << f), top + 1), torch.arange(1 - (1 << min(10 + f, 22)), -21 << f, 99_991)])
    got, truth = plain.decode(plain.exp(x, f, octaves, g), g), plain.decode(x, f).exp()
    assert bool(((got - truth).abs() <= truth * 2**-13.9 + 2.0 ** -(g + 1) + 2.0 ** (octaves - 27)).all())
    with pytest.raises(InvalidParameter, match="window"):
        plain.exp(torch.tensor([top + (1 << f)]), f, octaves, g)


def magnitudes(least: int, most: int) -> Tensor:
    return torch.cat([torch.arange(1 << k, 2 << k, max((1 << k) // 2000, 1)) for k in range(least, most)])


@pytest.mark.parametrize(("least", "most", "total"), [(16, 24, 36), (0, 12, 24), (16, 37, 44), (20, 34, 37)])
def test_reciprocal(least: int, most: int, total: int) -> None:
    x = magnitudes(least, most)
    truth = 2.0**total / x.double()
    assert bool(((plain.reciprocal(x, least, most, total) - truth).abs() <= truth * 2**-14 + 1).all())


@pytest.mark.parametrize(
    ("least", "most", "total", "numerator"),
    [(0, 20, 20, 65_536), (12, 37, 30, 65_536), (12, 37, 32, 92_682), (8, 36, 30, 131_071)],
)
def test_reciprocal_root(least: int, most: int, total: int, numerator: int) -> None:
    x = magnitudes(least, most)
    truth = 2.0**total / x.double().sqrt() * numerator / 65_536
    assert bool(((plain.rsqrt(x, least, most, total, numerator) - truth).abs() <= truth * 2**-13.5 + 1).all())


@pytest.mark.parametrize("columns", [1, 2, 64, 1000, 8192])
@pytest.mark.parametrize("spread", [0.01, 3.0, 60.0])
def test_softmax(columns: int, spread: float) -> None:
    x = plain.encode((torch.randn(4, 3, columns, generator=torch.Generator().manual_seed(1)) * spread).clamp(-500, 500))
    truth = plain.decode(x).softmax(-1)
    assert float((plain.decode(plain.softmax(x)) - truth).abs().max()) <= 2**-13 + 2**-13
    causal = torch.ones(3, columns, dtype=torch.bool).tril()
    masked = plain.decode(plain.softmax(x, causal))
    assert float((masked - plain.decode(x).masked_fill(~causal, -torch.inf).softmax(-1)).abs().max()) <= 2**-12
    assert not plain.softmax(x, torch.zeros(columns, dtype=torch.bool)).any()


@pytest.mark.parametrize(
    ("columns", "rms_bits", "rms"), [(2048, 2, 1.0), (8192, 2, 3.9), (8192, 7, 100.0), (768, 4, 10.0), (2, 2, 1.0)]
)
def test_norms(columns: int, rms_bits: int, rms: float) -> None:
    x = plain.encode(torch.randn(8, columns, generator=torch.Generator().manual_seed(2)) * rms * 0.9)
    real, plan = plain.decode(x), plain.NormPlan(columns, rms_bits)
    epsilon = plan.epsilon / 2**24
    for got, truth in (
        (plain.rms_norm(x, plan), functional.rms_norm(real, (columns,), eps=epsilon)),
        (plain.layer_norm(x, plan), functional.layer_norm(real, (columns,), eps=epsilon)),
    ):
        assert float(((plain.decode(got) - truth).abs() / truth.abs().clamp_min(1)).max()) <= 2**-11.5


def test_a_row_above_its_plan_is_refused() -> None:
    plan = plain.NormPlan(64, 0)
    with pytest.raises(InvalidParameter):
        plain.rms_norm(plain.encode(torch.full((1, 64), 30.0)), plan)
    for wrong in (plain.NormPlan(1), plain.NormPlan(64, 8), plain.NormPlan(64, 2, 0), plain.NormPlan(64, f=14)):
        with pytest.raises(InvalidParameter):
            plain.rms_norm(torch.zeros(1, wrong.columns, dtype=torch.int64), wrong)


def test_arguments_out_of_reach_are_refused() -> None:
    for function in (plain.relu, plain.silu, plain.gelu):
        with pytest.raises(InvalidParameter):
            function(torch.tensor([1024 << 12]))
        with pytest.raises(InvalidParameter):
            function(torch.tensor([0]), 14)
    for call in (
        lambda: plain.exp(torch.tensor([-(1 << 23)])),
        lambda: plain.exp(torch.tensor([0]), 12, 13, 12),
        lambda: plain.reciprocal(torch.tensor([1]), 0, 30, 30),
        lambda: plain.reciprocal(torch.tensor([1]), 0, 10, 40),
        lambda: plain.rsqrt(torch.tensor([1]), 1, 10, 20),
        lambda: plain.softmax(torch.zeros(1, 8193, dtype=torch.int64)),
        lambda: plain.rms_norm(torch.zeros(1, 3, dtype=torch.int64), plain.NormPlan(4)),
        lambda: plain.layer_norm(torch.zeros(1, 3, dtype=torch.int64), plain.NormPlan(4)),
    ):
        with pytest.raises(InvalidParameter):
            call()


def test_a_layer() -> None:
    """Attention and a gated expert, whole, against floating point."""
    draw = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) / shape[0] ** 0.5

    x = torch.randn(16, 64, generator=draw)
    q, k, v, gate, up, down = (
        weight(64, 64),
        weight(64, 64),
        weight(64, 64),
        weight(64, 96),
        weight(64, 96),
        weight(96, 64),
    )

    def real(x: Tensor) -> Tensor:
        h = functional.rms_norm(x, (64,), eps=168 / 2**24)
        causal = torch.ones(16, 16, dtype=torch.bool).tril()
        scores = ((h @ q) @ (h @ k).T / 8).masked_fill(~causal, -torch.inf).softmax(-1)
        x = x + scores @ (h @ v)
        h = functional.rms_norm(x, (64,), eps=168 / 2**24)
        return x + (functional.silu(h @ gate) * (h @ up)) @ down

    def fixed(x: Tensor) -> Tensor:
        def product(a: Tensor, b: Tensor, shift: int = 12) -> Tensor:
            return plain.truncate(plain.matmul(a, b), shift)

        plan = plain.NormPlan(64)
        wq, wk, wv, wg, wu, wd = (plain.encode(w) for w in (q, k, v, gate, up, down))
        h = plain.rms_norm(x, plan)
        scores = product(product(h, wq), product(h, wk).T, 15)
        x = x + product(plain.softmax(scores, torch.ones(16, 16, dtype=torch.bool).tril()), product(h, wv))
        h = plain.rms_norm(x, plan)
        return x + product(plain.multiply_truncate(plain.silu(product(h, wg)), product(h, wu)), wd)

    error = (plain.decode(fixed(plain.encode(x))) - real(x.double().float())).abs().max()
    assert float(error) < 2**-7


def test_the_core_is_tested_against_these_numbers() -> None:
    spec = importlib.util.spec_from_file_location("vectors", ROOT / "rust/core/tables/vectors.py")
    assert spec and spec.loader
    vectors = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(vectors)
    lines = vectors.FILE.read_text().splitlines(keepends=True)
    assert len(lines) >= 20
    for line in lines:
        head, arguments, _ = line.split("|")
        name, *numbers = head.split()
        public = [int(n) for n in numbers]
        x = torch.tensor([int(v) for v in arguments.split()])
        assert vectors.line(name, public, x, vectors.answer(name, public, x)) == line
