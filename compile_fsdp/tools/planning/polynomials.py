"""Polynomials in B and S that interpolate the byte counts of a few traces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import sympy

from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning.amounts import ONE, Amount, B, S


@dataclass(frozen=True, slots=True)
class Fit:
    """Interpolation of degree 1 in B and 2 in S, or of a constant.

    Attributes:
        points: (B, S) of each trace: one for each monomial, and at most one more to check the result at.
        monomials: The monomials of the polynomials. See [Note: Terms are never negative].
        inverse: Matrix that maps values at the first points to the coefficients of the monomials, row by row.
        check: Row that maps values at the first points to the value at the additional point; empty without one.
    """

    points: tuple[tuple[int, int], ...]
    monomials: tuple[sympy.Expr, ...]
    inverse: tuple[tuple[Fraction, ...], ...]
    check: tuple[Fraction, ...] = ()

    @classmethod
    def constant(cls) -> Fit:
        """The fit of a single trace, by constants."""
        return cls(((0, 0),), (ONE,), ((Fraction(1),),))

    @classmethod
    def near(cls, batch: int, seq_len: int) -> Fit:
        """A fit of traces with at least `batch` sequences (at least 2), of at most `seq_len` tokens (at least 8).

        [Note: Batches of one]
        Tensors with a dim of size 1 are contiguous in more layouts, so that torch skips copies. Batches of at least
        2 are traced; for a batch of 1 the polynomial is extrapolated, and may count copies that torch skips.
        """
        batch, seq_len = max(batch, 2), max(seq_len, 8)
        step = seq_len // 4
        lengths = (seq_len, seq_len - step, seq_len - 2 * step)
        grid = tuple(itertools.product((batch, batch + 1), lengths))
        last = (batch + 2, seq_len - 3 * step)
        monomials = tuple(b * s for b, s in itertools.product((ONE, B - 1), (ONE, S - 1, (S - 1) ** 2)))
        inverse = sympy.Matrix([_values(monomials, *point) for point in grid]).inv()
        check = sympy.Matrix([_values(monomials, *last)]) * inverse
        return cls(
            (*grid, last),
            monomials,
            tuple(_fractions(inverse.row(i)) for i in range(len(monomials))),
            _fractions(check),
        )

    def polynomial(self, values: Sequence[int]) -> Amount:
        """The polynomial that has the given values at the points of the fit.

        Raises:
            EstimateError: no polynomial of this degree has them.
        """
        known = values[: len(self.monomials)]
        if self.check and (expected := _dot(self.check, known)) != values[-1]:
            batch, seq_len = self.points[-1]
            raise EstimateError(
                f"expected bytes that are linear in the batch and quadratic in the sequence, got {values[-1]} instead "
                f"of {float(expected):.1f} for a batch of {batch} sequences of {seq_len}; pass a fixed batch"
            )
        coefficients = (_dot(row, known) for row in self.inverse)
        return Amount({m: c for m, c in zip(self.monomials, coefficients, strict=True) if c})


def _values(monomials: Sequence[sympy.Expr], batch: int, seq_len: int) -> list[sympy.Expr]:
    return [monomial.subs({B: batch, S: seq_len}) for monomial in monomials]


def _fractions(row: sympy.Matrix) -> tuple[Fraction, ...]:
    return tuple(Fraction(int(each.p), int(each.q)) for each in row)


def _dot(row: Sequence[Fraction], values: Sequence[int]) -> Fraction:
    return sum((a * v for a, v in zip(row, values, strict=True)), Fraction(0))
