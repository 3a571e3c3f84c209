"""The levels of a machine to which loops are bound, and the memories in which values live.

    level       positions of a loop                                       opts
    GRID        independent groups (a GPU) or chunks (a CPU) of a phase   the outermost output loops; SPLITK
    BLOCK       the threads of a group                                    LOCAL, GROUP, GROUPTOP
    SUBGROUP    threads that run in lockstep                              none yet
    CORE        the cores of a CPU                                        THREAD
    VECTOR      the lanes of a vector register                            LANES
    UNROLL      straight-line code: register tiles, unrolled iterations   UPCAST, UNROLL
    SERIAL      iterations one after another                              TILE, and every loop that no opt has bound
    INTRINSIC   positions that one dot or matrix instruction computes     TC
"""
from __future__ import annotations

from enum import Enum, auto


class Level(Enum):
    """The part of the machine that runs the positions of a loop."""

    GRID = auto()
    BLOCK = auto()
    SUBGROUP = auto()
    CORE = auto()
    VECTOR = auto()
    UNROLL = auto()
    SERIAL = auto()
    INTRINSIC = auto()


CACHE_LINE_BYTES = 64       # bytes of a processor's cache line
CORE_START_CYCLES = 2000.0  # cycles until the other cores of a CPU begin to work on a launch


class MemorySpace(Enum):
    """The memory of a value, by the threads that can read it."""

    REGISTER = auto()   # one thread, a single element
    SCRATCH = auto()    # one thread, a block of elements
    HELD = auto()       # the threads of one group, each its own elements of tiles, in registers
    SHARED = auto()     # the threads of one group
    GLOBAL = auto()     # every thread: arguments and temporaries


OF_GROUP = (MemorySpace.HELD, MemorySpace.SHARED)       # spaces whose values the threads of a group compute together
