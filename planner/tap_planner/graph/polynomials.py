"""Sizes as polynomials of symbolic dims, learnt from how they change when one dim is doubled and tripled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Monomial = tuple[tuple[str, int], ...]
"""Symbols with their exponents, sorted."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of products of symbols with whole coefficients."""

    terms: Mapping[Monomial, int]

    @staticmethod
    def constant(number: int) -> Polynomial:
        """A number."""
        return Polynomial({(): number} if number else {})

    @staticmethod
    def symbol(name: str, exponent: int = 1) -> Polynomial:
        """A symbol, or a power of it."""
        return Polynomial({((name, exponent),): 1})

    @property
    def symbols(self) -> tuple[str, ...]:
        """Symbols in it, sorted."""
        return tuple(sorted({name for term in self.terms for name, _ in term}))

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for term, factor in other.terms.items():
            terms[term] = terms.get(term, 0) + factor
        return Polynomial({term: factor for term, factor in terms.items() if factor})

    def __mul__(self, other: Polynomial) -> Polynomial:
        terms: dict[Monomial, int] = {}
        for left, a in self.terms.items():
            for right, b in other.terms.items():
                exponents = dict(left)
                for name, exponent in right:
                    exponents[name] = exponents.get(name, 0) + exponent
                term = tuple(sorted(exponents.items()))
                terms[term] = terms.get(term, 0) + a * b
        return Polynomial({term: factor for term, factor in terms.items() if factor})

    def value(self, dims: Mapping[str, int]) -> int:
        """The size for given dims."""
        return sum(
            factor * math.prod(dims[name] ** exponent for name, exponent in term) for term, factor in self.terms.items()
        )

    def __str__(self) -> str:
        texts = [
            _term(term, factor) for term, factor in sorted(self.terms.items(), key=lambda item: (not item[0], item))
        ]
        return " + ".join(texts).replace("+ -", "- ") if texts else "0"


def _term(term: Monomial, factor: int) -> str:
    parts = [name if exponent == 1 else f"{name}^{exponent}" for name, exponent in term]
    if factor != 1 or not parts:
        parts.insert(0, str(factor))
    return "*".join(parts)


def product(sizes: Sequence[Polynomial]) -> Polynomial:
    """Product of sizes."""
    result = Polynomial.constant(1)
    for size in sizes:
        result = result * size
    return result


def without_common(left: Polynomial, right: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Both sides without the factors that they share in all terms."""
    terms = [*left.terms, *right.terms]
    if not left.terms or not right.terms:
        return left, right
    shared = {
        name: least
        for name in {name for term in terms for name, _ in term}
        if (least := min(dict(term).get(name, 0) for term in terms)) > 0
    }
    divisor = math.gcd(*left.terms.values(), *right.terms.values())

    def reduced(side: Polynomial) -> Polynomial:
        return Polynomial(
            {
                tuple(
                    (name, exponent - shared.get(name, 0)) for name, exponent in term if exponent > shared.get(name, 0)
                ): factor // divisor
                for term, factor in side.terms.items()
            }
        )

    return reduced(left), reduced(right)


def fitted(size: int, dims: Mapping[str, int], changed: Mapping[str, tuple[int, int]]) -> Polynomial | None:
    """The polynomial that a size is: a product of symbols and of one sum of symbols.

    Args:
        size: as it is.
        dims: values of the symbols.
        changed: per symbol the sizes with that symbol doubled and tripled.

    Returns:
        None where a size depends on the symbols in another way.
    """
    powers = Polynomial.constant(1)
    rest = size
    slopes: dict[str, int] = {}
    for name, (doubled, tripled) in changed.items():
        if doubled == size and tripled == size:
            continue
        exponent = next((e for e in (1, 2) if doubled == size * 2**e and tripled == size * 3**e), None)
        if exponent is not None and size:
            powers = powers * Polynomial.symbol(name, exponent)
            if rest % dims[name] ** exponent:
                return None
            rest //= dims[name] ** exponent
        elif tripled - size == 2 * (doubled - size):
            slopes[name] = doubled - size
        else:
            return None
    scale = size // rest if rest else 1
    total = Polynomial.constant(rest)
    for name, slope in slopes.items():
        if slope % (scale * dims[name]):
            return None
        part = Polynomial({((name, 1),): slope // (scale * dims[name])})
        total = total + part + Polynomial.constant(-part.value(dims))
    result = powers * total
    return result if result.value(dims) == size else None
