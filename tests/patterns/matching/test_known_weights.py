"""Layers that are alike are read once, and each with its own tensors; those that are not, apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from inductor_quant.patterns.matching import known_weights
from tests.support.graphs.post_grad import capture
from tests.support.producers.registry import PRODUCERS, need

i32 = torch.int32
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
K, N = 128, 64
Tensor = torch.Tensor


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights that are decoded."""
    found: list[Any] = []

    def counted(*args: Any) -> Any:
        found.append(decode(*args))
        return found[-1]

    decode = known_weights.decode
    monkeypatch.setattr(known_weights, "decode", counted)
    monkeypatch.setattr(known_weights, "_KNOWN", {})
    return found


class Packed(nn.Module):
    """Eight codes of a word along N, in ``order``, from ``low`` on; ``table`` is a constant."""

    def __init__(self, order: tuple[int, ...] = AWQ, *, low: float = 8, n: int = N) -> None:
        super().__init__()
        self.words = nn.Buffer(torch.randint(-(2**31), 2**31, (K, n // 8)).to(i32))
        self.scale, self.order, self.low = nn.Buffer(torch.rand(n) * 0.01), order, low

    def forward(self, x: Tensor) -> Tensor:
        shifts = 4 * torch.tensor(self.order, dtype=i32)
        codes = ((self.words.unsqueeze(-1) >> shifts) & 15).flatten(1)
        return x @ ((codes.float() - self.low) * self.scale)


def same(read: list[Any], first: nn.Module, second: nn.Module) -> bool:
    """Whether the second is read as the first was; both are right."""
    x = torch.randn(16, K)
    _, [rewrite] = capture(lambda x: (first(x), second(x)), [x])
    assert len(rewrite.report.matches) == 2
    torch.testing.assert_close(rewrite.after(*rewrite.inputs), (first(x), second(x)))
    assert len(read) in (1, 2)
    return len(read) == 1


def test_a_second_layer_is_known_by_its_first(read: list[Any]) -> None:
    assert same(read, Packed(), Packed())


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "another table": lambda: Packed(tuple(range(8))),
    "another number": lambda: Packed(low=7),
    "another sign of a number": lambda: Packed(low=-8),
    "a number of another type": lambda: Packed(low=8.0),
    "another shape": lambda: Packed(n=2 * N),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_with_a_difference_is_read_itself(read: list[Any], name: str) -> None:
    assert not same(read, Packed(), OTHERS[name]())


def test_a_function_of_two_tensors_is_not_that_of_one(read: list[Any]) -> None:
    shared, apart = Packed(), Packed()
    shared.scale = apart.scale

    class Scaled(nn.Module):
        def __init__(self, part: Packed, zero: Tensor) -> None:
            super().__init__()
            self.part, self.zero = part, zero

        def forward(self, x: Tensor) -> Tensor:
            shifts = 4 * torch.tensor(AWQ, dtype=i32)
            codes = ((self.part.words.unsqueeze(-1) >> shifts) & 15).flatten(1)
            return x @ (codes * self.part.scale - self.zero)

    first = Scaled(shared, nn.Buffer(torch.rand(N)))
    assert not same(read, first, Scaled(apart, apart.scale))


def test_what_is_declined_is_declined_at_its_own_nodes(read: list[Any]) -> None:
    """Ternary codes to the base of three (TQ1_0), of which every way of reading fails."""

    class Trits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bytes = nn.Buffer(torch.randint(0, 243, (N, K // 4)).to(torch.uint8))

        def forward(self, x: Tensor) -> Tensor:
            powers = torch.tensor([1, 3, 9, 27], dtype=torch.uint8)
            trits = (self.bytes.unsqueeze(-1) * powers).flatten(1).int() * 3 >> 8
            return x @ (trits - 1).float().t()

    first, second = Trits(), Trits()
    _, [rewrite] = capture(lambda x: (first(x), second(x)), [torch.randn(16, K)])
    one, other = rewrite.report.rejections
    assert (one.code, one.detail) == (other.code, other.detail)
    assert one.node != other.node
    assert {one.node, other.node} <= {node.name for node in rewrite.before.graph.nodes}
    assert other.node not in {reason.node for reason in read}


def test_tables_that_the_rewrite_adds_are_of_each_layer(read: list[Any]) -> None:
    """A scale of 8 bits that is looked up before the product."""
    producer = PRODUCERS["torchao_nvfp4_wo"]
    need(producer)
    layers = [producer.make(torch.bfloat16) for _ in range(2)]
    for tensor in layers[1][0].weight.__dict__.values():  # type: ignore[index]
        if isinstance(tensor, Tensor) and tensor.dtype == torch.uint8:
            tensor.copy_(tensor.flip(0))
    x = torch.randn(16, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        _, [rewrite] = capture(lambda x: [layer(x) for layer in layers], [x])
        want = [layer(x) for layer in layers]
    assert len(rewrite.report.matches) == 2
    assert len(read) == 1
    got = rewrite.after(*rewrite.inputs)
    torch.testing.assert_close(list(got), want, rtol=0.02, atol=0.02)
    assert not torch.equal(got[0], got[1])
