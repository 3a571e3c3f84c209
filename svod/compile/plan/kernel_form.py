"""A kernel under a chain of opts for a target, and what each stage of the compiler makes of it, as text.

    nest()                  the loops that the chain makes
    tree()                  the loop tree, after a pass or all
    linear()                LINEAR
    legal()                 LINEAR of the instructions alone that the device's renderer prints
    llvm()                  the module that LLVM is given;  llvm(optimized=True): after LLVM's passes
    asm()                   the assembly of what runs; of a GPU what its assembler is given
    sass()                  the machine code of an NVIDIA GPU
    resources()             registers, shared memory, spills and occupancy of each phase, on a GPU
    object("k.o")           the same as an object file, for `objdump -d`

`KERNEL_PASSES` is the one list of the stages that can be looked at by name: dumps of plans and pages of a kernel's steps go through it, so
that a pass that is added there is printed and shown.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from svod.compile.backend import CompilerPair, device_named
from svod.compile.lower.linear import format_linear
from svod.compile.lower.program import Program
from svod.compile.plan.stages import lower_kernel
from svod.compile.resources import PhaseResources
from svod.core.cost.op_count import Work, count_operations
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.schedule.kernel_variables import specialize
from svod.core.tree.passes import PASSES, loop_tree
from svod.core.tree.show import print_nest
from svod.core.tree.text import format_tree


@dataclass(frozen=True)
class KernelForm:
    """`device`: the target's, where its name selects another compiler (CPU:interpreter). A stage raises what it raises when it compiles:
    KernelOptError for a chain that does not apply, CompileError. A stage that the device does not have raises UnsupportedError."""

    kernel: Kernel
    target: Target
    chain: tuple[Opt, ...]
    device: str

    @property
    def chain_text(self) -> str:
        """The chain as `svod.core.kernel.chain_text.parse_chain` reads it."""
        return chain_text(self.chain)

    @cached_property
    def state(self) -> Scheduler:
        """The state after the chain. A library kernel has none: it has one form, and opts do not apply to it."""
        return apply_opts(Scheduler(self.kernel, self.target), self.chain)

    @cached_property
    def program(self) -> Program:
        """The lowered kernel."""
        return lower_kernel(self.kernel, self.target, self.chain)

    @cached_property
    def source(self) -> str:
        """The source that the device's compiler is given."""
        return self._pair.render(self.program, self.target)

    def work(self, values: Mapping[str, int]) -> Work:
        """The operations and bytes of one run, with these values of the kernel's variables (v0, v1, …)."""
        return count_operations(specialize(self.kernel.ast, values) if values else self.kernel.ast)

    def nest(self) -> str:
        """The loop nest."""
        return "a library kernel, which has one form" if self.kernel.library_kernel is not None else print_nest(self.state)

    def tree(self, last: str | None = None) -> str:
        """The loop tree after the pass called `last` (`svod.core.tree.passes`), or all passes."""
        if self.kernel.library_kernel is not None:
            return "a library kernel, which has no loop tree"
        return format_tree(self.state.kernel, loop_tree(self.state, last))

    def linear(self) -> str:
        """LINEAR (docs/ir.md, section 4)."""
        return format_linear(self.program)

    def legal(self) -> str:
        """LINEAR as the device's renderer prints it, instruction by instruction."""
        return format_linear(self._pair.legal(self.program, self.target))

    def llvm(self, optimized: bool = False) -> str:
        """The LLVM module, as it is given to LLVM or after its passes. A device without LLVM has its own source instead."""
        return self._pair.optimize(self.source, self.target) if optimized else self.source

    def asm(self) -> str:
        """The assembly of the code that runs, in the syntax that LLVM prints (AT&T on x86)."""
        return self._pair.assemble(self.source, self.target)

    def sass(self) -> str:
        """The machine code of what runs, where that is not what `asm` shows. Raises UnsupportedError where no tool prints it."""
        return self._pair.disassemble(self.source, self.target)

    def resources(self) -> tuple[PhaseResources, ...]:
        """The needs of the phases on a device with groups of threads, and the share of a unit that they fill; () on others."""
        return self._pair.resources(self._pair.compile(self.source, self.target), self.program.spec, self.target)

    def object(self, path: str | os.PathLike[str]) -> Path:
        """Write the object file of the code that runs to `path`, and return the path. Raises OSError."""
        path = Path(path)
        path.write_bytes(self._pair.compile(self.source, self.target))
        return path

    @property
    def _pair(self) -> CompilerPair:
        return device_named(self.device).pair


@dataclass(frozen=True)
class KernelPass:
    """A stage of the compiler that can be looked at. `what`: what it makes of a kernel, in words. `debug`: the level of DEBUG from which on
    it is printed; None: only when it is asked for by name. `language`: of its text; texts of one language are compared line by line where
    one pass follows the other. `show` raises what the methods of KernelForm do."""

    name: str
    what: str
    debug: int | None
    language: str
    show: Callable[[KernelForm], str]


KERNEL_PASSES = (
    KernelPass("tree", "loop tree as placements and orders say", None, "loop tree", partial(KernelForm.tree, last="")),
    *(KernelPass(p.name, f"loop tree with {p.what}", None, "loop tree", partial(KernelForm.tree, last=p.name)) for p in PASSES),
    KernelPass("linear", "LINEAR", 4, "LINEAR", KernelForm.linear),
    KernelPass("legal", "LINEAR, with the instructions alone that the device's renderer prints", None, "legal LINEAR", KernelForm.legal),
    KernelPass("llvm", "LLVM IR", 5, "source", KernelForm.llvm),
    KernelPass("llvm-optimized", "LLVM IR after LLVM's passes", None, "optimised source", lambda form: form.llvm(optimized=True)),
    KernelPass("asm", "assembly", None, "assembly", KernelForm.asm),
    KernelPass("sass", "machine code, where it is another language than the assembly", None, "machine code", KernelForm.sass),
)
"""What a chain's loop nest becomes, in the order in which it does."""
