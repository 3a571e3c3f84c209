"""The set of instructions that a renderer prints. Its flags are the differences between renderers."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Instructions:
    """The instructions that a renderer prints; `legalize` rewrites all others into these. Every renderer prints:

    * on bool, 32- and 64-bit integers, index, float32 and float64: ADD, SUB, MUL, MULACC, AND, OR, XOR, NOT, MAX and MIN of integers, ABS,
      comparisons, WHERE, FDIV, SQRT, FLOOR, CEIL, TRUNC, ROUND, NEG of floats, and CASTs between these types that are not index or bool;
    * SHL and SHR by constants below the width; SHL_BELOW, SHR_BELOW, QUOTIENT and REMAINDER;
    * on any type BITCASTs of one width, constants, lanes (SPLAT, EXTRACT, SHUFFLE) and memory, CASTs of bools and between integers."""

    has_short_integers: bool = False    # arithmetic of 8- and 16-bit integers wraps at their width
    holds_wide: bool = False            # registers of 32 bits hold narrow numbers: a CAST to more bits is free, and a result that
                                        # fits the narrow type needs no CAST back
    half_casts: frozenset[str] = frozenset()    # 16-bit floats that a CAST from float32 rounds to
    widened: frozenset[str] = frozenset()       # 16-bit floats that a CAST to float32 converts
    keeps_nans: bool = False            # MAX and MIN of floats are NaN if an operand is
    compares_nans: bool = False         # a NaN is not equal to itself: compilers may not assume that there are none
    compares_bools: bool = False        # prints CMPLT and CMPLE of bools
    compares_int64: bool = False        # CMPLT and CMPLE of int64 with constants are right
    extends_by_source: bool = False     # a CAST of integers to more bits extends by the signedness of the source type
    rounds_float64: bool = False        # ROUND and TRUNC of float64 are right for halves and for the signs of zeros
    splits_lanes: bool = False          # prints BITCASTs between elements of different widths
    index_bits: int = 64                # bits of an index; a CAST of a number that does not fit into an index gives the nearest index
