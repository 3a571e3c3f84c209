"""The measuring protocol on fake clocks, independent of the machine's speed."""
import math
import random

import numpy as np
import pytest

from svod.bench.load import MachineLoad, MachineState, read_machine, watch_machine
from svod.bench.race import confirm, paired_ratio, race, scores
from svod.bench.timer import (
    Contestant,
    Samples,
    Screening,
    better_half,
    calibrate,
    deadline,
    measure,
    sample_again,
    screen,
    screen_one,
    take_sample,
)

QUIET = MachineLoad()


def quiet():
    return lambda: QUIET


class World:
    """A clock that advances only in contestants' calls. `cost(n)` is the seconds of the n-th call of a contestant."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def clock(self):
        return self.now

    def contestant(self, cost, name="", unit=1):
        state = {"call": 0}

        def run(times):
            self.calls.append((name, times))
            seconds = cost(state["call"]) if callable(cost) else cost
            state["call"] += 1
            self.now += times * seconds

        return Contestant(run, name, unit)


@pytest.mark.parametrize("seconds", [1e-9, 3e-8, 1e-6, 150e-6, 200e-6, 0.3])
def test_a_sample_lasts_long_enough(seconds):
    world = World()
    repeats, call = calibrate(world.contestant(seconds), None, world.clock)
    assert call == pytest.approx(seconds)
    assert repeats * seconds >= 200e-6 and repeats * seconds <= max(2 * 200e-6, seconds)


def test_a_slow_first_run_does_not_shorten_samples():
    world = World()
    repeats, call = calibrate(world.contestant(lambda n: 1e-4 if n == 0 else 1e-6), None, world.clock)
    assert call == pytest.approx(1e-6) and repeats >= 200


def test_a_clock_that_stands_still_ends():
    repeats, call = calibrate(Contestant(lambda n: None), None, lambda: 1.0)
    assert repeats == 1 << 20 and call == 0.0


def test_measure_counts_units():
    world = World()
    samples = measure(world.contestant(1e-3, unit=4), 5, world.clock)
    assert samples.repeats == 1 and samples.seconds == pytest.approx((2.5e-4,) * 5)
    assert Samples((3.0, 1.0, 2.0), 1).best == 1.0 and Samples((3.0, 1.0, 2.0), 1).median == 2.0


def test_short_runs_are_warmed_up_and_long_ones_are_not():
    for seconds, calls in ((1e-4, [1, 3, 1, 3]), (5e-3, [1, 1])):
        world = World()
        measure(world.contestant(seconds), 1, world.clock)
        assert [times for _, times in world.calls] == calls


@pytest.mark.parametrize("seconds, untimed", [(1e-4, 50), (2e-3, 3), (21e-3, 1)])
def test_warm_ups_take_the_time_that_is_asked_for(seconds, untimed):
    world = World()
    take_sample(world.contestant(seconds), 4, seconds, world.clock, 5e-3)
    *before, timed = [times for _, times in world.calls]
    assert timed == 4 and set(before) <= {1} and len(before) - untimed in (0, 1), "one more where the clock is a hair short"


def test_deadlines():
    assert deadline(None) == 2.0 and deadline(1e-3) == 0.1 and deadline(0.1) == 0.5


def test_screening_limits():
    world = World()
    assert screen_one(world.contestant(3.1e-3), 1e-3, world.clock).verdict == "slow first run"
    assert screen_one(world.contestant(1.6e-3), 1e-3, world.clock).verdict == "slow sample"
    assert screen_one(world.contestant(1.4e-3), 1e-3, world.clock).verdict == "ok"
    assert screen_one(world.contestant(9.0), None, world.clock).verdict == "ok"
    # a first run that a cold start explains is not rejected: within 3×, and within the limit of a sample plus 1 ms
    assert screen_one(world.contestant(lambda n: 2.4e-3 if n == 0 else 0.9e-3), 1e-3, world.clock).score == pytest.approx(0.9e-3)
    assert screen_one(world.contestant(lambda n: 1.4e-3 if n == 0 else 0.4e-3), 0.5e-3, world.clock).score == pytest.approx(0.4e-3)
    assert screen_one(world.contestant(lambda n: 1.6e-3 if n == 0 else 0.4e-3), 0.5e-3, world.clock).verdict == "slow first run"
    assert screen_one(world.contestant(30.9e-3), 20e-3, world.clock).verdict == "slow sample"
    assert screen_one(world.contestant(31.1e-3), 20e-3, world.clock).verdict == "slow first run"
    # a part of a tenth: 1 ms of it is 10 ms of the whole kernel
    assert screen_one(world.contestant(3.9e-3, unit=0.1), 20e-3, world.clock).verdict == "slow sample"
    assert screen_one(world.contestant(4.1e-3, unit=0.1), 20e-3, world.clock).verdict == "slow first run"
    # Units: three runs per call.
    assert screen_one(world.contestant(4.2e-3, unit=3), 1e-3, world.clock).score == pytest.approx(1.4e-3)


def test_the_better_half_gets_more_samples():
    world = World()
    costs = [5e-3, 1e-3, 3e-3, 2e-3, 4e-3, 50e-3]
    result = screen([world.contestant(c) for c in costs], 10e-3, 3, world.clock)
    assert [len(s.samples.seconds) for s in result] == [1, 3, 3, 3, 1, 0]
    assert better_half(result) == [1, 3, 2]
    assert better_half([]) == []


def test_the_score_is_the_minimum():
    world = World()
    contestant = world.contestant(lambda n: [9e-3, 4e-3, 2e-3, 3e-3][n])
    screening = screen_one(contestant, None, world.clock)
    assert sample_again(contestant, screening, 3, world.clock) == Screening(
        "ok", pytest.approx(2e-3), pytest.approx(9e-3), Samples(pytest.approx((4e-3, 2e-3, 3e-3)), 1))


def test_scores_cancel_what_slows_a_round():
    assert scores([(1.0, 2.0, 4.0), (3.0, 6.0, 12.0)]) == pytest.approx((-math.log(2), 0.0, math.log(2)))


def test_race_sees_through_drift():
    """Single times differ by 3× over the race, contestants by 2 %; a drift that all contestants share has no effect."""
    world = World()
    state = {"speed": 1.0}
    rng = random.Random(3)

    def cost(base):
        def call(_):
            state["speed"] *= 1.0005
            return base * state["speed"] * rng.uniform(0.995, 1.005)
        return call

    field = [world.contestant(cost(1e-3 * (1 + 0.02 * i)), f"c{i}") for i in (3, 0, 2, 1)]
    result = race(field, 8, anchor=1, rng=random.Random(1), clock=world.clock, watch=quiet)
    assert result.ranking == [1, 3, 2, 0]
    assert result.noisy is None and result.batches == 1 and len(result.rounds) == 8
    assert result.seconds(0) > result.seconds(1)


def test_rounds_are_interleaved_in_random_order():
    world = World()
    race([world.contestant(2e-3, n) for n in "abcd"], 6, rng=random.Random(0), clock=world.clock, watch=quiet)
    rounds = [[n for n, _ in world.calls[i:i + 4]] for i in range(7, 7 + 24, 4)]        # after calibration and the anchor
    assert all(sorted(r) == list("abcd") for r in rounds) and len({tuple(r) for r in rounds}) > 2
    assert [n for n, _ in world.calls[-3:]] == ["a"] * 3


def test_a_moved_anchor_voids_the_batch():
    world = World()
    # Calls of the anchor: calibration, then per batch 3 + 2 rounds + 3. It jumps inside the first batch only.
    anchor = world.contestant(lambda n: 1e-2 if n < 5 else 2e-2, "incumbent")
    result = race([anchor, world.contestant(1.5e-2, "b")], 2, rng=random.Random(0), clock=world.clock, watch=quiet)
    assert result.batches == 2 and result.noisy is None and result.anchor == pytest.approx((2e-2, 2e-2))
    assert result.ranking == [1, 0] and len(result.rounds) == 2


def test_a_busy_machine_gives_up_after_three_repetitions():
    world = World()
    busy = MachineLoad(1.0, steal=0.5)
    result = race([world.contestant(1e-2), world.contestant(2e-2)], 4, rng=random.Random(0), clock=world.clock, watch=lambda: lambda: busy)
    assert result.batches == 4 and "50 % of the machine's time was stolen" in result.noisy
    assert len(result.rounds) == 16 and result.ranking == [0, 1] and result.load is busy
    result = race([world.contestant(1e-2), world.contestant(2e-2)], 4, rng=random.Random(0), clock=world.clock, watch=lambda: lambda: busy,
                  void_repeats=1)
    assert result.batches == 2 and len(result.rounds) == 8 and result.noisy is not None


def test_confirm_stops_when_it_knows():
    world, rng = World(), random.Random(5)
    field = [world.contestant(lambda n: 1e-3 * rng.gauss(1, 0.003)), world.contestant(lambda n: 0.8e-3 * rng.gauss(1, 0.003))]
    result = confirm(field, rng=random.Random(0), clock=world.clock, watch=quiet, budget_seconds=60)
    assert result.reached and len(result.rounds) == 15
    assert result.ratios[1].low < 0.8 * 1.003 and result.ratios[1].high > 0.8 * 0.997 and result.ratios[1].half_width <= 0.01
    assert result.ratio(1, 0) == result.ratios[1] and result.ratio(0, 1).high > 1.25 * 0.997 and result.ratio(0, 1).low < 1.25 * 1.003
    assert result.seconds(0) == pytest.approx(1e-3, rel=0.01)


def test_confirm_goes_on_while_it_is_unsure_and_ends_with_the_budget():
    world, rng = World(), random.Random(5)
    noisy = [world.contestant(lambda n: 1e-3 * rng.gauss(1, 0.05)), world.contestant(lambda n: 1e-3 * rng.gauss(1, 0.05))]
    result = confirm(noisy, rng=random.Random(0), clock=world.clock, watch=quiet, budget_seconds=60, precision=0.01)
    assert result.reached and len(result.rounds) > 60
    assert result.ratios[1].low < 1.0 < result.ratios[1].high
    short = confirm(noisy, rng=random.Random(0), clock=world.clock, watch=quiet, budget_seconds=0.05)
    assert not short.reached and 15 <= len(short.rounds) <= 30


def test_confirm_takes_its_rounds_even_without_a_budget():
    world = World()
    result = confirm([world.contestant(1.0), world.contestant(2.0)], rng=random.Random(0), clock=world.clock, watch=quiet)
    assert len(result.rounds) == 15 and result.reached and result.ratios[1].median == 2.0


def test_interval_of_the_median():
    times = [float(i) for i in range(1, 16)]
    ratio = paired_ratio(times, [1.0] * 15)
    assert (ratio.low, ratio.median, ratio.high) == (4.0, 8.0, 12.0)      # table of the sign test: n = 15, k = 4
    assert paired_ratio([1.0] * 6, [2.0] * 6).low == 0.5                  # n = 6, k = 1
    assert paired_ratio([1.0] * 5, [2.0] * 5).low == 0.0
    many = paired_ratio([float(i) for i in range(1, 101)], [1.0] * 100)
    assert (many.low, many.high) == (40.0, 61.0)                          # n = 100, k = 40
    huge = paired_ratio([float(i) for i in range(1, 2001)], [1.0] * 2000)
    assert 955 <= huge.low <= 958 and huge.high == 2001 - huge.low


def test_interval_covers_the_median_95_times_in_100():
    rng = np.random.default_rng(0)
    for n in (15, 40):
        data = rng.lognormal(0.0, 0.5, (2000, n))
        hits = sum(r.low <= 1.0 <= r.high for r in (paired_ratio(list(row), [1.0] * n) for row in data))
        assert hits / 2000 >= 0.94


def test_machine_load():
    state = MachineState(0.0, 0.0, 0.0, 0.0, 0, 0.1, 2, 0.01)
    assert MachineState(1.0, 0.0, 1.0, 1.0, 3, 0.1, 2, 0.01).since(state).busy is None
    assert "stolen" in MachineState(1.0, 0.2, 1.0, 1.0, 0, 0.1, 2, 0.01).since(state).busy
    assert "other processes used 25 %" in MachineState(1.0, 0.0, 1.5, 1.0, 0, 0.1, 2, 0.01).since(state).busy
    assert "lost its core 99 times" in MachineState(1.0, 0.0, 1.0, 1.0, 99, 0.1, 2, 0.01).since(state).busy
    # two ticks in a short batch count as none, because of the counter's resolution
    assert MachineState(0.05, 0.02, 0.07, 0.05, 0, 0.1, 2, 0.01).since(state).busy is None


def test_reading_the_machine(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 4000 50 6 7 80 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    state = read_machine(stat)
    assert state.used / state.tick == pytest.approx(163) and state.steal / state.tick == pytest.approx(80)
    missing = read_machine(tmp_path / "none")
    assert missing.steal == 0.0 and missing.since(missing).foreign == 0.0
    assert watch_machine()().seconds >= 0.0


@pytest.mark.parametrize("rounds", [3, 5, 6, 15])
def test_the_inverse_of_a_ratio_also_of_rounds_too_few_for_an_interval(rounds: int) -> None:
    times, base = [2.0 + n / 7 for n in range(rounds)], [1.0] * rounds
    ratio, other = paired_ratio(times, base), paired_ratio(base, times)
    assert (ratio.inverse.low, ratio.inverse.high) == (pytest.approx(other.low), pytest.approx(other.high))
    assert ratio.inverse.median == pytest.approx(1 / ratio.median) and ratio.inverse.inverse.median == pytest.approx(ratio.median)
