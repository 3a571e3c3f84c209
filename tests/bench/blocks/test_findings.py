"""What blocks show: verdicts under a limit, the smallest block, and counts per family, with made-up times."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from svod.bench.blocks.block import Block, every_layer, parse_block
from svod.bench.blocks.families import block_case
from svod.bench.blocks.findings import Investigation, family_results, faults_of, verdict_of
from svod.bench.peers import PreparedPeer
from svod.bench.results import CaseResult, ContestantResult, KernelShare
from svod.bench.suites.cases import Case
from svod.bench.summary import Timed, judge_case
from svod.cli.bench.tables import describe_finding, print_families

BLOCK = parse_block("tokens float32 2x32x64: linear out=64; softmax axis=1; residual {gelu; cumsum axis=1}; layer_norm axis=2")
KERNELS = tuple(KernelShare(name, "UPCAST(o0, 8)", "heuristic", share * 1e-3, share, None, 2000.0, "out: 2 000 cycles", "for o0 in 0…16")
                for name, share in (("scan_0", 0.95), ("rows_1", 0.05)))


def result_of(case: Case, own: float | str | list[float], eager: float | str = 1e-3) -> CaseResult:
    """The result of a block on which the contestants take such times, or have such a status."""
    def timed(name: str, seconds: float | str | list[float]) -> Timed:
        if isinstance(seconds, str):
            return Timed(ContestantResult(name, seconds, "so it is"), None)  # type: ignore[arg-type]
        return Timed(ContestantResult(name, "ok"), seconds if isinstance(seconds, list) else [seconds] * 6)
    return judge_case(name=case.name, title=case.title, suite=case.suite, group=case.group, dtype=case.dtype, shapes="", flops=0.0,
                      bytes_read=0.0, bytes_written=0.0, bound=None, timed=[timed("heuristic", own), timed("torch", eager)], load=None)


@pytest.mark.parametrize(("own", "eager", "kind", "ratio"), [
    (1.05e-3, 1e-3, None, 1.05), (1.2e-3, 1e-3, "slow", 1.2), (0.2e-3, 1e-3, None, 0.2), (30e-6, 15e-6, None, 2.0),
    ("wrong", 1e-3, "wrong", None), ("failed", 1e-3, "failed", None), ("unsupported", 1e-3, None, None), (1e-3, "wrong", None, None),
    ("failed", "failed", None, None),
])
def test_a_verdict_is_about_blocks_that_eager_runs(own: float | str, eager: float | str, kind: str | None, ratio: float | None) -> None:
    result = result_of(block_case(BLOCK), own, eager)
    verdict = verdict_of(result, 1.1)
    assert verdict.kind == kind and verdict.ratio == (None if ratio is None else pytest.approx(ratio))
    assert faults_of(result) == (("heuristic",) if kind in ("wrong", "failed") else ())


def test_a_fault_is_excused_only_by_the_same_fault_of_eager() -> None:
    block = block_case(BLOCK)
    assert faults_of(result_of(block, "wrong", "wrong")) == () and faults_of(result_of(block, "failed", "failed")) == ()
    assert faults_of(result_of(block, "failed", "wrong")) == ("heuristic",), "svod fails where eager is only inexact"
    alone = result_of(block, "wrong", "wrong")
    assert faults_of(replace(alone, contestants=alone.contestants[:1])) == ("heuristic",), "eager was not run"
    assert faults_of(replace(alone, suite="core")) == ("heuristic",), "kernels have NumPy as their reference"


def test_samples_of_a_busy_moment_make_no_block_slow() -> None:
    verdict = verdict_of(result_of(block_case(BLOCK), [0.9e-3, *[2e-3] * 5]), 1.1)
    assert verdict.kind is None and verdict.ratio == pytest.approx(2.0) and verdict.sure == pytest.approx(0.9)


class FakeAlone:
    """Contestants whose kernels are known."""

    @contextmanager
    def entered(self, case: Case) -> Iterator[list[Any]]:
        class Peer:
            name = "heuristic"

            def prepare(self, case: Case, operands: object) -> PreparedPeer:
                return PreparedPeer(lambda n: None, list, False, explain=lambda: KERNELS)
        yield [Peer()]


def investigated(own: Callable[[Block], float | str], first: float | str) -> list[Any]:
    case = block_case(BLOCK, "block_tokens_0_0")
    investigation = Investigation(FakeAlone(), lambda c: result_of(c, own(c.options["block"])))  # type: ignore[arg-type]
    return list(investigation.findings([case], [result_of(case, first)]))


def cumsum_is_slow(block: Block) -> float:
    return 3e-3 if any(x.op == "cumsum" for x in every_layer(block.layers)) and block.input.shape[1] > 8 else 0.5e-3


def test_a_slow_block_is_timed_again_and_made_smaller() -> None:
    [(again, finding)] = investigated(cumsum_is_slow, 1.4e-3)
    assert again.outcome("heuristic").median == 3e-3 and finding.kind == "slow" and finding.found.block == str(BLOCK)
    assert finding.found.ratio == pytest.approx(3.0) and finding.found.kernels == KERNELS and finding.why == "3.00 times eager's time"
    assert finding.smallest.block == "tokens float32 1x16x1: cumsum axis=1" and finding.smallest.ratio == pytest.approx(3.0)
    lines = describe_finding(finding, 3)
    assert lines[0] == "block_tokens_0_0 is slow: 3.00 times eager's time"
    assert lines[-1].endswith("--seed 3 --kernels 'tokens float32 1x16x1: cumsum axis=1'")
    assert sum("scan_0: 95 % of the kernels' time, 950 µs, predicted 2 000 cycles" in x for x in lines) == 2
    assert not any("rows_1" in x for x in lines) and "      for o0 in 0…16" in lines


def test_a_slow_block_does_not_become_another_finding() -> None:
    """A block of 1.3 times is none of 3 times, though it is above the limit."""
    [(_, finding)] = investigated(lambda b: cumsum_is_slow(b) if len(b.layers) > 1 else 1.3e-3, 3e-3)
    assert len(parse_block(finding.smallest.block).layers) == 2


def test_a_block_that_is_fast_the_second_time_is_no_finding() -> None:
    [(again, finding)] = investigated(lambda block: 0.5e-3, 1.4e-3)
    assert finding is None and again.outcome("heuristic").median == 0.5e-3
    assert investigated(cumsum_is_slow, 1.0e-3) == []


def test_a_wrong_block_stays_wrong_and_a_failure_a_failure() -> None:
    [(_, finding)] = investigated(lambda b: "wrong" if any(x.op == "gelu" for x in every_layer(b.layers)) else "failed", "wrong")
    assert (finding.kind, finding.why, finding.smallest.block) == ("wrong", "so it is", "tokens float32 1x1x1: gelu")
    [(_, finding)] = investigated(lambda b: "failed", "failed")
    assert finding.kind == "failed" and len(parse_block(finding.smallest.block).layers) == 1


def test_families_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    image = replace(block_case(parse_block("image float32 1x8x9x9: relu")), name="block_image_0_0")
    tokens = block_case(BLOCK, "block_tokens_0_0")
    results = [result_of(image, 1.2e-3), result_of(image, 2e-3), result_of(image, 0.5e-3), result_of(image, 1e-3, "failed"),
               result_of(tokens, "wrong"), result_of(tokens, 0.25e-3)]
    of_image, of_tokens, of_all = family_results(results)
    assert (of_image.name, of_image.blocks, of_image.slower, of_image.left_out) == ("image", 4, (2, 1, 1), 1)
    assert of_image.mean == pytest.approx((1 / 1.2 / 2 / 0.5) ** (1 / 3)) and of_image.worst == pytest.approx(0.5)
    assert (of_tokens.wrong, of_tokens.slower, of_tokens.mean) == (1, (0, 0, 0), pytest.approx(4.0))
    assert (of_all.name, of_all.blocks, of_all.slower, of_all.wrong) == ("all", 6, (2, 1, 1), 1)
    assert family_results([]) == ()
    print_families((of_image, of_tokens))
    assert capsys.readouterr().out.splitlines()[1].split("\t")[:5] == ["image", "4", "2", "1", "1"]
