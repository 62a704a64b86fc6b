"""Distributions: what they promise without drawing (expectation, quantiles, maxima) against draws and closed forms."""

from __future__ import annotations

import itertools
import math
import tomllib
from random import Random
from statistics import NormalDist, fmean, pstdev

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.distributions import (
    WORKLOADS,
    Constant,
    Distribution,
    Empirical,
    LogNormal,
    LongTail,
    Named,
    Normal,
)

EVERY = [
    Constant(value=7.0),
    Normal(mean=10.0, std=0.0),
    Normal(mean=10.0, std=1.0),
    Normal(mean=10.0, std=10.0),
    LogNormal(mean=1400.0, tailness=0.0),
    LogNormal(mean=1400.0, tailness=50.0, cap=8080.0),
    LogNormal(mean=1400.0, tailness=90.0),
    LongTail(mean=2000.0, sigma=1.0, cap=30720.0),
    LongTail(mean=900.0, sigma=2.0, cap=1000.0),
    Empirical(values=(5.0, 1.0, 3.0, 3.0, 40.0)),
    Named(name="qwen3-8b-think"),
]
SPREAD = [d for d in EVERY if d.quantile(0.9) > d.quantile(0.1)]
each = pytest.mark.parametrize("d", EVERY, ids=repr)
each_spread = pytest.mark.parametrize("d", SPREAD, ids=repr)

smooth = st.one_of(
    st.builds(Normal, mean=st.floats(0.1, 100), std=st.floats(0.01, 200)),
    st.builds(LogNormal, mean=st.floats(1, 1e5), tailness=st.floats(1, 150), cap=st.floats(1, 1e6)),
    st.builds(
        lambda mean, sigma, ratio: LongTail(mean=mean, sigma=sigma, cap=mean * ratio),
        st.floats(1, 1e5),
        st.floats(0.05, 3),
        st.floats(1.05, 50),
    ),
)


def mean_within(values: list[float], expected: float, sigmas: float = 5.0) -> bool:
    """Chance of a false alarm: one in two million for five standard errors. 1e-6 is the quadrature's own error."""
    return abs(fmean(values) - expected) <= sigmas * pstdev(values) / math.sqrt(len(values)) + 1e-6 * abs(expected)


# --- draws against promises -------------------------------------------------------------------------------------------


@each
def test_draws_have_the_expectation_and_the_quantiles_that_are_promised(d: Distribution) -> None:
    rng = Random(1)
    values = sorted(d.sample(rng) for _ in range(40_000))
    assert values[0] >= 0.0
    assert mean_within(values, d.expected)
    for p in (0.05, 0.25, 0.5, 0.9, 0.99):
        # Of n draws, n·p ± 5 standard errors are below the p-quantile; an atom (clip, cap, a repeated value) widens it.
        slack = 5.0 * math.sqrt(p * (1 - p) * len(values))
        q = d.quantile(p)
        assert sum(v < q * (1 - 1e-12) for v in values) <= len(values) * p + slack
        assert sum(v <= q * (1 + 1e-12) for v in values) >= len(values) * p - slack


@each
@pytest.mark.parametrize(("n", "share"), [(2, 0.0), (8, 0.0), (8, 0.3), (8, 0.8), (30, 0.5), (4, 1.0)])
def test_the_maximum_of_draws_has_the_expectation_that_is_promised(d: Distribution, n: int, share: float) -> None:
    rng = Random(2)
    maxima = []
    for _ in range(4_000):
        task = rng.gauss(0.0, 1.0)
        maxima.append(max(d.sample_shared(task, rng, share) for _ in range(n)))
    assert mean_within(maxima, d.expected_max(n, share))


@each_spread
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_shared_draws_keep_the_marginal_distribution(d: Distribution, share: float) -> None:
    rng = Random(3)
    values = [d.sample_shared(rng.gauss(0.0, 1.0), rng, share) for _ in range(40_000)]
    assert mean_within(values, d.expected)
    below = sum(v <= d.quantile(0.8) for v in values) / len(values)
    alone = [d.sample(rng) for _ in range(40_000)]
    assert below == pytest.approx(sum(v <= d.quantile(0.8) for v in alone) / len(alone), abs=0.02)


def test_share_is_the_correlation_of_log_lengths_within_a_task() -> None:
    d, rng = LogNormal(mean=1000.0, tailness=60.0), Random(4)
    for share in (0.0, 0.25, 0.7, 1.0):
        tasks = [rng.gauss(0.0, 1.0) for _ in range(20_000)]
        pairs = [[math.log(d.sample_shared(z, rng, share)) for _ in range(2)] for z in tasks]
        a, b = [p[0] for p in pairs], [p[1] for p in pairs]
        covariance = fmean(x * y for x, y in pairs) - fmean(a) * fmean(b)
        assert covariance / (pstdev(a) * pstdev(b)) == pytest.approx(share, abs=0.035)


def test_the_same_seed_gives_the_same_draws() -> None:
    for d in EVERY:
        assert [d.sample(Random(9)) for _ in range(3)] == [d.sample(Random(9)) for _ in range(3)]


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_maximum_of_normal_draws_by_its_closed_forms() -> None:
    d = Normal(mean=100.0, std=3.0)  # never negative, so nothing is clipped
    assert d.expected == pytest.approx(100.0, rel=1e-15)
    for share in (0.0, 0.2, 0.5, 0.9):
        own = 3.0 * math.sqrt(1.0 - share)
        assert d.expected_max(2, share) == pytest.approx(100.0 + own / math.sqrt(math.pi), rel=1e-9)
        assert d.expected_max(3, share) == pytest.approx(100.0 + 1.5 * own / math.sqrt(math.pi), rel=1e-9)


@given(sigma=st.floats(0.01, 2.5), share=st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.75, 0.99]))
@settings(max_examples=25, deadline=None)
def test_maximum_of_two_lognormal_draws_by_its_closed_form(sigma: float, share: float) -> None:
    # E max(L1, L2) = 2·E[L1; L1 > L2] = 2·mean·Φ(σ_difference / 2).
    d = LogNormal(mean=1000.0, tailness=sigma / 0.013)
    closed = 2000.0 * NormalDist().cdf(sigma * math.sqrt((1.0 - share) / 2.0))
    assert d.expected_max(2, share) == pytest.approx(closed, rel=1e-6)


@given(d=smooth, n=st.sampled_from([1, 2, 7, 64, 5_000, 1_000_000]))
@settings(deadline=None)
def test_quadrature_lies_between_a_lower_and_an_upper_sum(d: Distribution, n: int) -> None:
    # at() is monotone, so ∫ at dΦⁿ lies between the sums with each cell's lower and upper value, for any grid.
    grid = [-12.0 + 0.01 * i for i in range(2401)]
    below = [NormalDist().cdf(z) ** n for z in grid]
    weights = [b - a for a, b in itertools.pairwise(below)]
    lower = math.fsum(w * d.at(z) for w, z in zip(weights, grid[:-1], strict=True))
    upper = math.fsum(w * d.at(z) for w, z in zip(weights, grid[1:], strict=True))
    assert lower * (1 - 1e-6) <= d.expected_max(n) <= upper * (1 + 1e-6)


@given(d=smooth, n=st.integers(2, 40))
@settings(max_examples=30, deadline=None)
def test_sharing_lowers_the_maximum_from_independence_down_to_one_draw(d: Distribution, n: int) -> None:
    maxima = [d.expected_max(n, share) for share in (0.0, 0.2, 0.49, 0.51, 0.9, 1.0)]
    for more, less in itertools.pairwise(maxima):
        assert less <= more * (1 + 1e-6)
    assert maxima[-1] == d.expected == d.expected_max(1)


def test_clipping_raises_the_mean_as_the_docstring_says() -> None:
    assert Normal(mean=10, std=10).expected == pytest.approx(10.83, abs=0.005)
    assert Normal(mean=10, std=5).expected == pytest.approx(10.04, abs=0.005)
    assert Normal(mean=10, std=1).expected == pytest.approx(10.0, rel=1e-12)
    assert Normal(mean=10, std=10).quantile(0.1) == 0.0


def test_lognormal_is_the_staleness_papers_formula() -> None:
    d = LogNormal(mean=1400.0, tailness=50.0, cap=8080.0)
    z, sigma = 0.7, 1.3 * 50 / 100
    assert d.at(z) == pytest.approx(1400.0 * math.exp(sigma * z - sigma**2 / 2), rel=1e-14)
    assert d.at(10.0) == 8080.0
    assert LogNormal(mean=1400.0, tailness=0.0).at(2.0) == 1400.0
    # Its appendix prints the sampled means 1,401 … 1,405 with cap 8,080 and 1,349 … 1,359 with cap 12,080: one mean
    # before the cap fits both, 1,409.
    assert LogNormal(mean=1409.0, tailness=50.0, cap=8080.0).expected == pytest.approx(1403.0, abs=5.0)
    assert LogNormal(mean=1409.0, tailness=90.0, cap=12080.0).expected == pytest.approx(1354.0, abs=5.0)


@given(mean=st.floats(1, 1e5), sigma=st.floats(0, 5), ratio=st.floats(1.01, 100))
@settings(deadline=None)
def test_long_tail_has_the_stated_mean_after_the_cap(mean: float, sigma: float, ratio: float) -> None:
    d = LongTail(mean=mean, sigma=sigma, cap=mean * ratio)
    assert d.expected == pytest.approx(mean, rel=1e-9)
    assert d.quantile(1.0) <= d.cap


# --- empirical --------------------------------------------------------------------------------------------------------


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=5), n=st.integers(1, 4))
@settings(deadline=None)
def test_empirical_maximum_is_the_mean_over_all_ways_to_draw(values: list[float], n: int) -> None:
    d = Empirical(values=tuple(values))
    brute = fmean(max(draw) for draw in itertools.product(values, repeat=n))
    assert d.expected_max(n) == pytest.approx(brute, rel=1e-9, abs=1e-9)
    assert d.expected_max(n, 1e-9) == pytest.approx(brute, rel=1e-3, abs=1e-3)
    assert d.expected == pytest.approx(fmean(values), rel=1e-12, abs=1e-12)


def test_a_large_sample_of_lengths_has_the_maxima_of_their_distribution() -> None:
    source = LogNormal(mean=1000.0, tailness=60.0, cap=8000.0)
    d = Empirical(values=tuple(source.quantile((i + 0.5) / 5000) for i in range(5000)))
    for n, share in ((8, 0.0), (8, 0.3), (64, 0.6)):
        assert d.expected_max(n, share) == pytest.approx(source.expected_max(n, share), rel=2e-3)


def test_empirical_quantiles_and_scores_are_ranks() -> None:
    d = Empirical(values=tuple(float(v) for v in range(100, 0, -1)))
    assert [d.quantile(p) for p in (0.0, 0.01, 0.29, 0.5, 0.501, 0.99, 1.0)] == [1, 1, 29, 50, 51, 99, 100]
    assert (d.at(-math.inf), d.at(math.inf)) == (1.0, 100.0)
    assert [d.at(NormalDist().inv_cdf((i + 0.5) / 100)) for i in range(100)] == list(d.values)


def test_an_empirical_file_must_be_read_before_it_is_drawn_from() -> None:
    d = Empirical(file="lengths.jsonl")
    for use in (lambda: d.sample(Random(0)), lambda: d.expected, lambda: d.expected_max(3), lambda: d.quantile(0.5)):
        with pytest.raises(ValueError, match=r"'lengths.jsonl' was not read; load"):
            use()


# --- recipes ----------------------------------------------------------------------------------------------------------


@each
def test_a_recipe_can_write_and_read_every_kind(d: Distribution) -> None:
    assert msgspec.convert(msgspec.to_builtins(d), Distribution) == d


def test_the_kind_picks_the_record() -> None:
    table = tomllib.loads("""
        a = {kind = "normal", mean = 10, std = 5}
        b = {kind = "lognormal", mean = 1400, tailness = 90}
        c = {kind = "empirical", values = [3, 1, 2]}
        d = {kind = "named", name = "dora"}
        e = {kind = "long-tail", mean = 2400, sigma = 1, cap = 30000}
        f = {kind = "constant", value = 0}
    """)
    assert msgspec.convert(table, dict[str, Distribution]) == {
        "a": Normal(mean=10, std=5),
        "b": LogNormal(mean=1400, tailness=90),
        "c": Empirical(values=(1, 2, 3)),
        "d": Named(name="dora"),
        "e": LongTail(mean=2400, sigma=1, cap=30000),
        "f": Constant(value=0),
    }


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "weibull"}, "weibull"),
        ({"kind": "normal", "mean": 1, "std": 1, "cap": 3}, "unknown field `cap`"),
        ({"kind": "constant", "value": -1}, "value = -1; it must be finite and at least 0"),
        ({"kind": "normal", "mean": 0, "std": 1}, "mean = 0; it must be above 0"),
        ({"kind": "normal", "mean": 1, "std": -1}, "std = -1; it must be finite and at least 0"),
        ({"kind": "lognormal", "mean": 1, "cap": 0}, "cap = 0; it must be above 0"),
        ({"kind": "lognormal", "mean": math.nan}, "mean = nan; it must be above 0"),
        ({"kind": "lognormal", "mean": 1, "tailness": -3}, "tailness = -3; it must be in 0 … 500"),
        ({"kind": "long-tail", "mean": 5, "sigma": 1, "cap": 5}, "cap = 5; it must be finite and above mean = 5"),
        ({"kind": "long-tail", "mean": 5, "sigma": 9, "cap": 7}, "sigma = 9; it must be in 0 … 5"),
        ({"kind": "empirical"}, "give either values"),
        ({"kind": "empirical", "values": [], "file": ""}, "give either values"),
        ({"kind": "empirical", "values": [1], "file": "a"}, "give either values"),
        ({"kind": "empirical", "values": [1, -1]}, "negative or not finite"),
        ({"kind": "named", "name": "gpt"}, "no workload 'gpt'; take one of dora, laminar"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused_with_the_remedy(table: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(table, Distribution)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("d", [EVERY[3], EVERY[9]], ids=repr)
def test_nonsense_questions_are_refused(d: Distribution) -> None:
    for question in (lambda: d.quantile(1.01), lambda: d.expected_max(0), lambda: d.expected_max(3, -0.1)):
        with pytest.raises(ValueError, match=r"give|is the part"):
            question()


def test_workloads_have_what_their_papers_state() -> None:
    stated = {"qwen3-8b-base": (2000, 30720), "qwen3-8b-think": (11000, 30720), "dora": (2400, 30000)}
    for name, (mean, cap) in stated.items():
        d = Named(name=name)
        assert d.expected == pytest.approx(mean, rel=1e-9)
        assert d.quantile(1.0) == cap
    for name in ("qwen3-8b-base", "dora", "laminar"):
        assert WORKLOADS[name].quantile(0.99) / WORKLOADS[name].quantile(0.5) == pytest.approx(10.0, rel=1e-9)
    # Laminar: the 99th percentile is at the cap of 16K tokens.
    assert WORKLOADS["laminar"].quantile(0.99) == pytest.approx(16384, rel=1e-3)
    assert WORKLOADS["laminar"].quantile(0.992) == 16384
    # The note beside the think model: its median, and one response in 42 at the cap.
    think = WORKLOADS["qwen3-8b-think"]
    assert think.quantile(0.5) == pytest.approx(9360, abs=1)
    assert think.quantile(1 - 1 / 41) < 30720 == think.quantile(1 - 1 / 43)
