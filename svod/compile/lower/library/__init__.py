"""Programs for library kernels (`svod.core.graph.library_kernel`): loops written directly in LINEAR, one file per kind."""
from __future__ import annotations

from svod.compile.lower.library.chunks import lower_by_chunks
from svod.compile.lower.library.filter import lower_filter, refuse_filter
from svod.compile.lower.library.fourier import lower_fourier, lower_fourier_by_passes
from svod.compile.lower.library.ordering.ranks import lower_by_ranks
from svod.compile.lower.library.ordering.select import lower_topk
from svod.compile.lower.library.ordering.sort import lower_argsort
from svod.compile.lower.library.ordering.sorted_values import lower_sort
from svod.compile.lower.library.scan import lower_scan
from svod.compile.lower.library.scatter import lower_scatter
from svod.compile.lower.library.unpaired import lower_unpaired, lower_unpaired_by_threads
from svod.compile.lower.program import Program
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target

_LOWER = {"SCAN": lower_scan, "SCATTER": lower_scatter, "SORT": lower_sort, "ARGSORT": lower_argsort, "TOPK": lower_topk,
          "FOURIER": lower_fourier, "TURNED_FOURIER": lower_fourier, "FILTER": lower_filter,
          "UNPAIRED": lower_unpaired}
_ON_GROUPS = {**_LOWER, "SCAN": lower_by_chunks, "SORT": lower_by_ranks, "ARGSORT": lower_by_ranks, "TOPK": lower_by_ranks,
              "FOURIER": lower_fourier_by_passes, "TURNED_FOURIER": lower_fourier_by_passes, "FILTER": refuse_filter,
              "UNPAIRED": lower_unpaired_by_threads}


def lower_library_kernel(kernel: Kernel, target: Target) -> Program:
    """Return the Program of a kernel that consists of a library kernel."""
    assert kernel.library_kernel is not None
    return (_ON_GROUPS if target.has_groups else _LOWER)[kernel.library_kernel.arg[0]](kernel.library_kernel, target)
