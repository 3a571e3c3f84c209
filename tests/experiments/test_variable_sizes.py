"""The study of kernels with Variables, on recorded times: a choice at the sizes that a search times suits the others."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.variable_sizes import KERNELS, MOST_BATCH, MOST_LENGTH, choice, losses, recorded, text_of
from svod.compile.plan.plan_parts import VariableSpec
from svod.tune.measure.sizes import sizes_of_variables

RECORDS = json.loads(Path(__file__).with_name("variable_sizes.json").read_text())
WITHIN = 1.05       # most time of the chosen chain at a size at which nothing was tuned, as a multiple of that of the size's own best


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_tuned_at_a_few_sizes_is_near_the_best_of_all_others(name: str) -> None:
    record = RECORDS[name]
    searched = sizes_of_variables([VariableSpec("batch", 1, MOST_BATCH), VariableSpec("length", 1, MOST_LENGTH)])
    assert [tuple(s) for s in record["tuned"]] == list(searched)
    lost = losses(record)
    assert len(lost) >= 10
    assert max(lost.values()) <= WITHIN, lost


def test_the_record_tells_chains_apart() -> None:
    """Some chain costs more than that somewhere, and of the projection the heuristic's does."""
    for record in RECORDS.values():
        rows = list(record["seconds"].values())
        assert max(max(row[i] for row in rows) / min(row[i] for row in rows) for i in range(len(record["sizes"]))) > WITHIN
    first = RECORDS["projection"]["seconds"]
    at = range(len(RECORDS["projection"]["sizes"]))
    assert max(next(iter(first.values()))[i] / min(row[i] for row in first.values()) for i in at) > WITHIN, "the heuristic alone"


def test_a_chain_that_is_much_slower_at_one_size_is_not_chosen() -> None:
    times = {"own": [1.0, 1.0, 1.0], "slow when small": [1.3, 0.1, 0.1], "faster": [1.1, 0.8, 0.8], "equal": [1.0, 1.0, 0.9]}
    assert choice(times, range(3)) == "faster" and choice(times, (1, 2)) == "slow when small"


def test_a_kernel_is_recorded() -> None:
    record = recorded(KERNELS["layer norm"], 2, 1)
    assert len(record["seconds"]) == 2 and all(len(row) == len(record["sizes"]) and min(row) > 0 for row in record["seconds"].values())
    assert json.loads(text_of({"layer norm": record})) == json.loads(json.dumps({"layer norm": record}))
