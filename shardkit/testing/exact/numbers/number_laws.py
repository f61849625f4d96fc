"""Laws between numbers that their residues do not show: what is known of a number because of where it came from.

Worked example: `q, r = qr(a)` computes r by square roots, whose residues are drawn. That r^T r is a^T a, no arithmetic
of residues would find. So the residues of r lead here to those of a^T a, and a product of r^T and r reads them.
"""

from __future__ import annotations

import numpy as np

from shardkit.testing.exact.numbers.roots import Roots
from shardkit.testing.exact.numbers.values import CONSTANT, Degree


class NumberLaws:
    """The laws that a run has met. Numbers are known by the bytes of their residues.

    Attributes:
        roots: the square roots that were drawn, and their laws.
        grams: Gram matrices: from rows, columns and residues of a matrix A to those of A^T A and their degree. So the
            factor R of a QR of A, which has roots, is known by R^T R = A^T A.
        halves: solutions by Cholesky. With A = L L^T, A^-1 B is computed in two halves, L^-1 B and L^-T of it, and L
            has roots where A^-1 B has none. From the residues of L and L^-1 B to those of A^-1 B and their degree.
        numbers_of_bits: the floats that became words of bits (`bitcast`): from their dtype and the residues of a
            word to the residues, the facts and the real value of the float.
        degree_of_bits: bounds of the degree of all floats that became bits.
        keys: the place in the order of a number, by its residues (`same_keys.py`).
    """

    def __init__(self, moduli: np.ndarray):
        self.roots = Roots(moduli)
        self.grams: dict[tuple[int, int, bytes], tuple[np.ndarray, Degree]] = {}
        self.halves: dict[tuple[bytes, bytes], tuple[np.ndarray, Degree]] = {}
        self.numbers_of_bits: dict[tuple[str, bytes], tuple[np.ndarray, np.ndarray, float]] = {}
        self.degree_of_bits = CONSTANT
        self.keys: dict[bytes, float] = {}
