"""A kernel under a chain of opts for a target, and the output of each stage of the compiler for it, as text.

    nest()                  the loop nest after the chain
    tree()                  the loop tree, after one of its passes or after all
    linear()                LINEAR
    legal()                 LINEAR reduced to instructions that the device's renderer can print
    llvm()                  the module before LLVM's passes;  llvm(optimized=True): after them
    asm()                   the assembly of the code that runs; on a GPU the input of its assembler
    sass()                  the machine code of an NVIDIA GPU
    resources()             registers, shared memory, spills and occupancy of each phase, on a GPU
    object("k.o")           the code as an object file, for `objdump -d`

`KERNEL_PASSES` lists the stages that can be shown by name. Dumps of plans and the pages of a kernel's steps both read it, so a pass added
there appears in both.
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
from svod.system.files import write_file


@dataclass(frozen=True)
class KernelForm:
    """A kernel, its chain and its target. `device`: the target's device; its name may select another compiler (CPU:interpreter). The
    methods raise the errors of compilation: KernelOptError for a chain that does not apply, and CompileError. They raise UnsupportedError
    for a stage that the device does not have."""

    kernel: Kernel
    target: Target
    chain: tuple[Opt, ...]
    device: str

    @property
    def chain_text(self) -> str:
        """Return the chain as text that `svod.core.kernel.chain_text.parse_chain` reads."""
        return chain_text(self.chain)

    @cached_property
    def state(self) -> Scheduler:
        """Return the scheduler state after the chain. A library kernel has none: it has only one form, and opts do not apply to it."""
        return apply_opts(Scheduler(self.kernel, self.target), self.chain)

    @cached_property
    def program(self) -> Program:
        """Lower the kernel."""
        return lower_kernel(self.kernel, self.target, self.chain)

    @cached_property
    def source(self) -> str:
        """Render the source code for the device's compiler."""
        return self._pair.render(self.program, self.target)

    def work(self, values: Mapping[str, int]) -> Work:
        """Count the operations and bytes of one run with these values of the kernel's variables (v0, v1, …)."""
        return count_operations(specialize(self.kernel.ast, values) if values else self.kernel.ast)

    def nest(self) -> str:
        """Print the loop nest."""
        return "a library kernel, which has one form" if self.kernel.library_kernel is not None else print_nest(self.state)

    def tree(self, last: str | None = None) -> str:
        """Print the loop tree after the pass `last` (`svod.core.tree.passes`); None: after all passes."""
        if self.kernel.library_kernel is not None:
            return "a library kernel, which has no loop tree"
        return format_tree(self.state.kernel, loop_tree(self.state, last))

    def linear(self) -> str:
        """Print LINEAR (docs/ir.md, section 4)."""
        return format_linear(self.program)

    def legal(self) -> str:
        """Print LINEAR after legalisation, in the form that the device's renderer prints instruction by instruction."""
        return format_linear(self._pair.legal(self.program, self.target))

    def llvm(self, optimized: bool = False) -> str:
        """Print the LLVM module, before or after LLVM's passes. For a device without LLVM, print the device's source code."""
        return self._pair.optimize(self.source, self.target) if optimized else self.source

    def asm(self) -> str:
        """Print the assembly of the code that runs, in LLVM's syntax (AT&T on x86)."""
        return self._pair.assemble(self.source, self.target)

    def sass(self) -> str:
        """Print the machine code, for devices on which it differs from the output of `asm`. Raises UnsupportedError if no tool prints
        it."""
        return self._pair.disassemble(self.source, self.target)

    def resources(self) -> tuple[PhaseResources, ...]:
        """Return the resources of each phase on a device with thread groups, and its occupancy; () on other devices."""
        return self._pair.resources(self._pair.compile(self.source, self.target), self.program.spec, self.target)

    def object(self, path: str | os.PathLike[str]) -> Path:
        """Write the object file of the code that runs to `path`, and return the path. Raises FileError."""
        path, code = Path(path), self._pair.compile(self.source, self.target)
        write_file(path, lambda file: file.write(code))
        return path

    @property
    def _pair(self) -> CompilerPair:
        return device_named(self.device).pair


@dataclass(frozen=True)
class KernelPass:
    """A stage of the compiler that can be shown. `what`: a description of its output. `debug`: the lowest level of DEBUG at which it is
    printed; None: only when it is named. `language`: the language of its text; the texts of consecutive passes in the same language are
    compared line by line. `show` raises the same errors as the methods of KernelForm."""

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
"""The stages of the compiler after a kernel's loop nest, in the order in which they run."""
