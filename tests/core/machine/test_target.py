"""Keys of targets: their content, and the properties derived from them."""
from __future__ import annotations

from dataclasses import replace

from svod.core.machine.target import parse_key, unfit
from tests.tune.search_kernels import TARGET


def test_a_key_is_read_back_by_its_fields() -> None:
    fields = parse_key(TARGET.key)
    assert fields == {"architecture": "x86_64", "CPU": "znver4", "features": "avx512f,fma", "l1 cache": "32k", "l2 cache": "1m",
                      "l3 cache": "32m", "threads": "2"}


def test_what_a_machine_needs_to_time_a_target() -> None:
    target = replace(TARGET, features=("avx2", "fma"), threads=4)
    more = replace(target, features=("avx2", "avx512f", "fma"), threads=8)
    assert unfit(more.key, target) is None and unfit(target.key, target) is None
    assert unfit(replace(target, threads=2).key, target) == "it runs 2 threads, the search is for 4"
    assert unfit(target.key, replace(more, threads=4)) == "it lacks avx512f"
    assert "l2" in str(unfit(replace(more, l2=1 << 25).key, target))
    assert unfit(target.key, target.allowing(False, False)) is None, "options of a search are no properties of a machine"
