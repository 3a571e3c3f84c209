"""The attribute that names a target's instructions: a list without empty entries, which LLVM refuses."""
from __future__ import annotations

import re

import pytest

from svod.compile.cpu.host import make_target
from svod.compile.llvm.render import function_attributes


@pytest.mark.parametrize("features", [(), ("neon",), ("neon", "bf16", "dotprod")])
@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_no_feature_is_an_empty_string(arch: str, features: tuple[str, ...]) -> None:
    target = make_target(arch, "generic", features if arch == "aarch64" else ("sse4",) * bool(features), (1 << 15, 1 << 20, 0), 1)
    named = re.search('"target-features"="([^"]*)"', function_attributes(target))
    assert named is not None
    assert all(len(f) > 1 and f[0] == "+" for f in named[1].split(",") if named[1])
