from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.manifest import Manifest, ManifestError, TensorInfo, dumps, loads

tensors = st.lists(
    st.builds(
        TensorInfo,
        name=st.text(min_size=1, max_size=8),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    max_size=12,
    unique_by=lambda t: t.name,
)


def weights(*tensors: TensorInfo, version: int = 3) -> Manifest:
    return Manifest(version=version, tensors=tensors)


A = TensorInfo(name="a", shape=(2, 3), dtype="float32")
B = TensorInfo(name="b", shape=(4,), dtype="bfloat16")


@given(tensors, st.integers(1, 200))
def test_buckets_keep_order_and_limit_and_lose_nothing(tensors: list[TensorInfo], limit: int) -> None:
    buckets = weights(*tensors).buckets(limit)
    assert [t for bucket in buckets for t in bucket] == tensors
    for bucket in buckets:
        assert sum(t.nbytes for t in bucket) <= limit or len(bucket) == 1


@given(tensors, st.integers(1, 200))
def test_no_bucket_could_have_taken_the_next_tensor(tensors: list[TensorInfo], limit: int) -> None:
    buckets = weights(*tensors).buckets(limit)
    for bucket, following in pairwise(buckets):
        assert sum(t.nbytes for t in bucket) + following[0].nbytes > limit


@given(tensors, st.dictionaries(st.text(max_size=5), st.integers(0, 2**32 - 1), max_size=3))
def test_json_brings_back_the_same_manifest(tensors: list[TensorInfo], checksums: dict[str, int]) -> None:
    manifest = Manifest(version=7, tensors=tuple(tensors), checksums=checksums)
    assert loads(dumps(manifest)) == manifest


def test_sizes_follow_the_dtype() -> None:
    assert (A.nbytes, B.nbytes, weights(A, B).nbytes) == (24, 8, 32)


def test_equal_sets_match_whatever_their_version_and_order() -> None:
    weights(A, B).check_against(weights(B, A, version=9))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (weights(A), "b is missing"),
        (weights(A, B, TensorInfo(name="c", shape=(), dtype="float32")), "c is unknown"),
        (weights(TensorInfo(name="a", shape=(3, 2), dtype="float32"), B), r"a has shape \[2, 3\] here and \[3, 2\]"),
        (weights(A, TensorInfo(name="b", shape=(4,), dtype="float32")), "b is bfloat16 here and float32"),
    ],
)
def test_the_first_difference_is_named_in_one_line(other: Manifest, says: str) -> None:
    with pytest.raises(ManifestError, match=says) as caught:
        weights(A, B).check_against(other)
    assert "\n" not in str(caught.value)


def test_what_is_no_manifest_is_refused() -> None:
    with pytest.raises(ManifestError, match="not a weight manifest"):
        loads(b'{"version": "x"}')
