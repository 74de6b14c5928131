"""Amounts of bytes as exact sums of functions of the number of ranks, the batch size and the sequence length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import sympy

N = sympy.Symbol("N", integer=True, positive=True)  # ranks that a parameter is sharded over, at least 2
B = sympy.Symbol("B", integer=True, positive=True)  # sequences per rank
S = sympy.Symbol("S", integer=True, positive=True)  # tokens per sequence

ONE = sympy.Integer(1)


class Amount(dict[sympy.Expr, Fraction]):
    """An amount of bytes as a sum of terms: the coefficient of each term, never 0.

    [Note: Terms are never negative]
    Every term is a function of N >= 2, B >= 1 and S >= 1 that is never negative, and no term is a sum of others: for
    example (N - 2) times the rows of a shard, or (B - 1) * (S - 1)**2. An amount whose coefficients are all at least as
    large as another amount's is therefore at least as large for all sizes.
    """

    def __add__(self, other: Mapping[sympy.Expr, Fraction]) -> Amount:
        return self._plus(other, 1)

    def __sub__(self, other: Mapping[sympy.Expr, Fraction]) -> Amount:
        return self._plus(other, -1)

    def _plus(self, other: Mapping[sympy.Expr, Fraction], sign: int) -> Amount:
        total = Amount(self)
        for term, coefficient in other.items():
            total[term] = total.get(term, Fraction(0)) + sign * coefficient
            if not total[term]:
                del total[term]
        return total

    def times_ranks(self) -> Amount:
        """N times this amount, none of whose terms may have N as a factor."""
        others = Amount({(N - 2) * term: coefficient for term, coefficient in self.items()})
        return others + self + self

    def expression(self) -> sympy.Expr:
        terms = (sympy.Rational(each.numerator, each.denominator) * term for term, each in self.items())
        return sympy.expand(sympy.Add(*terms))


def constant(count: int) -> Amount:
    return Amount({ONE: Fraction(count)} if count else {})


def total(amounts: Iterable[Amount]) -> Amount:
    result = Amount()
    for amount in amounts:
        result = result + amount
    return result


def rows(length: int) -> sympy.Expr:
    """Rows of each padded shard if `length` rows of dim 0 are sharded over N ranks."""
    return sympy.ceiling(sympy.Integer(length) / N)


def dominates(larger: Amount, smaller: Amount) -> bool:
    """Whether `larger` is at least `smaller` for all sizes. See [Note: Terms are never negative]."""
    return all(larger.get(term, 0) >= coefficient for term, coefficient in smaller.items()) and all(
        coefficient >= 0 for term, coefficient in larger.items() if term not in smaller
    )


def maximal(amounts: Iterable[Amount]) -> list[Amount]:
    """The amounts that no other amount dominates, in their order."""
    front: list[Amount] = []
    for amount in amounts:
        if not any(dominates(other, amount) for other in front):
            front = [other for other in front if not dominates(amount, other)] + [amount]
    return front


def maximum(amounts: Iterable[Amount]) -> sympy.Expr:
    """The largest of the amounts, as an expression with few terms."""
    largest = [amount.expression() for amount in hull(maximal(amounts))]
    return sympy.Max(*largest, evaluate=False) if len(largest) > 1 else largest[0]


def hull(amounts: Sequence[Amount]) -> list[Amount]:
    """Leave out amounts that a mixture of two others dominates: for any sizes, one of the two is at least as large.

    Equal layers give amounts that lie on a line, of which only the two ends stay.
    """
    left = list(amounts)
    reach = 1
    while reach < len(left):
        kept = left[:reach]
        for index in range(reach, len(left)):
            candidate = left[index]
            after = left[index + 1 : index + 1 + reach]
            if not any(_mixture_dominates(a, b, candidate) for a in kept[-reach:] for b in after):
                kept.append(candidate)
        reach = reach * 2 if len(kept) == len(left) else reach
        left = kept
    return left


def _mixture_dominates(first: Amount, second: Amount, amount: Amount) -> bool:
    """Whether `w * first + (1 - w) * second` dominates `amount` for some w between 0 and 1."""
    low, high = Fraction(0), Fraction(1)
    for term in {*first, *second, *amount}:
        slope = first.get(term, Fraction(0)) - second.get(term, Fraction(0))
        needed = amount.get(term, Fraction(0)) - second.get(term, Fraction(0))
        if slope > 0:
            low = max(low, needed / slope)
        elif slope < 0:
            high = min(high, needed / slope)
        elif needed > 0:
            return False
    return low <= high
