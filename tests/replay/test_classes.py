"""Classes of one name have one description if, and only if, objects of them behave alike."""

from __future__ import annotations

import enum
import re
import textwrap
import typing
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend

from compile_fsdp.replay.words import describe, describe_class, forget_classes

_PARTS = """
import abc, enum, functools
from torch import nn

def first(*args): return 1.0
def second(*args): return 2.0
class One: pass
class Two: pass
def scaled(scale):
    def scale_it(self, x): return x * scale
    return scale_it
def decorated(function):
    @functools.wraps(function)
    def call(*args): return function(*args)
    return call
"""

# By name: the source of a class H, in which [one|other] stands for two definitions.
_DIFFERENCES = {
    "base": "class H([One|Two]): pass",
    "order of bases": "class H([One, Two|Two, One]): pass",
    "method": "class H: f = [first|second]",
    "method of a base": "One.f = [first|second]\nclass H(One): pass",
    "default": "class H:\n    def f(self, x=[1.0|2.0]): return x",
    "keyword default": "class H:\n    def f(self, *, x=[1|2]): return x",
    "closure": "class H: f = scaled([1.0|2.0])",
    "decorated": "class H: f = decorated([first|second])",
    "static method": "class H: f = staticmethod([first|second])",
    "class method": "class H: f = classmethod([first|second])",
    "property": "class H: f = property([first|second])",
    "cached property": "class H: f = functools.cached_property([first|second])",
    "cached function": "class H: f = functools.cache([first|second])",
    "partial method": "class H: f = functools.partialmethod(first, [1|2])",
    "descriptor": "One.__get__ = [first|second]\nclass H: f = One()",
    "metaclass": "class M(type): f = [first|second]\nclass H(metaclass=M): pass",
    "virtual subclass": "class H(abc.ABC): pass\nH.register([One|Two])",
    "constant": "class H: x = (1, [2.0|3.0])",
    "member of an enum": "class H(str, enum.Enum): A = '[one|two]'",
    "torch's method": "class H(nn.Tanh): __module__ = 'torch.nn'\nH.forward = [first|second]",
}


def _sources(name: str) -> tuple[str, str]:
    one, other = (re.sub(r"\[(.*)\|(.*)\]", rf"\{i}", _DIFFERENCES[name]) for i in (1, 2))
    return one, other


_scopes: list[dict[str, Any]] = []  # kept, because an abstract class refers to its virtual subclasses weakly


def _define(source: str) -> type:
    scope: dict[str, Any] = {"__name__": "defined"}
    _scopes.append(scope)
    exec(textwrap.dedent(_PARTS + source), scope)
    return scope["H"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", _DIFFERENCES)
def test_description_differs_with_a_definition(name: str) -> None:
    first, second = _sources(name)
    assert describe_class(_define(first)) == describe_class(_define("\n\n" + first))
    assert describe_class(_define(first)) != describe_class(_define(second))


def test_object_of_a_class_is_described_with_its_members() -> None:
    one, other = (_define(source) for source in _sources("method"))
    assert describe(one()) != describe(other())
    assert describe(one) != describe(other)


def test_class_that_refers_to_itself_is_described() -> None:
    source = "class H:\n    def __get__(self, *args): return H\nH.x = H()\nH.y = H"
    assert describe_class(_define(source)) == describe_class(_define(source))


def test_replaced_method_is_seen_once_classes_are_forgotten() -> None:
    cls = _define("class H: f = first")
    before = describe_class(cls)
    cls.f = _define("class H: f = second").f  # type: ignore[attr-defined]
    assert describe_class(cls) == before
    forget_classes()
    assert describe_class(cls) != before


def test_replaced_method_of_torch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe(nn.Hardshrink())
    monkeypatch.setattr(nn.Hardshrink, "forward", lambda self, x: x)
    forget_classes()
    assert describe(nn.Hardshrink()) != before
    forget_classes()


@pytest.mark.parametrize("base", [enum.Enum, enum.IntEnum, enum.IntFlag])
def test_member_of_an_enum_is_described_by_name_and_value(base: Any) -> None:
    one, other, renamed = base("E", {"A": 2}).A, base("E", {"A": 4}).A, base("E", {"B": 2}).B
    assert len({describe(each) for each in (one, other, renamed, 2)}) == 4


def test_constants_are_described_by_value() -> None:
    values = [1, True, 1.0, "1", b"1", None, torch.float32, torch.device("cpu"), (1,), [1], (True,)]
    assert len({repr(describe(value)) for value in values}) == len(values)
    assert describe(0.0) != describe(-0.0)
    assert describe(float("nan")) == describe(float("nan"))


# Dynamo compares these objects as a whole, and guards none of their parts.
_OPAQUE = {
    "finfo": (torch.finfo(torch.float32), torch.finfo(torch.float16)),
    "iinfo": (torch.iinfo(torch.int8), torch.iinfo(torch.int16)),
    "NumPy's finfo": (numpy.finfo("f4"), numpy.finfo("f2")),
    "ufunc": (numpy.sin, numpy.cos),
    "pattern": (re.compile("a"), re.compile("b")),
    "attention backend": (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
    "reduce op": (dist.ReduceOp.SUM, dist.ReduceOp.MAX),
    "method of C": (torch.Tensor.tanh, torch.Tensor.sigmoid),
    "op with overloads": (torch.ops.aten.tanh, torch.ops.aten.sigmoid),
    "keys": ({"a": 1}.keys(), {"b": 1}.keys()),
    "range": (range(2), range(3)),
    "dtype of autocast": (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16)),
    "autocast that is off": (torch.autocast("cpu"), torch.autocast("cpu", enabled=False)),
    "placement": (Shard(0), Shard(1)),
    "generic type": (typing.List[int], typing.List[str]),  # noqa: UP006
}


@pytest.mark.parametrize("name", _OPAQUE)
def test_object_that_is_compared_as_a_whole_is_described_by_its_parts(name: str) -> None:
    one, other = _OPAQUE[name]
    assert describe(one) == describe(one)
    assert describe(one) != describe(other)


@dataclass(slots=True)
class _Slots:
    read: int


def test_object_without_a_text_or_with_parts_is_described_by_its_class() -> None:
    assert describe(object()) == describe(object())
    assert describe(_Slots(1)) == describe(_Slots(2))  # guards tell their parts
