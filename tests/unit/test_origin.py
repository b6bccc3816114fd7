"""The offsets that an error about a row names."""

from __future__ import annotations

import json

import pytest

from poundlock.spark.pipeline.origin import describe_offsets


def plan(*offsets: dict[str, dict[str, int]] | None) -> bytes:
    lines = ["-" if it is None else json.dumps(it) for it in offsets]
    return "\n".join(["v1", "{}", *lines]).encode()


def nothing(index: int) -> bytes | None:
    return None


def test_a_batch_has_what_lies_between_two_plans() -> None:
    before = plan({"t": {"0": 5, "1": 7}})
    after = plan({"t": {"0": 9, "1": 7, "2": 3}})
    assert describe_offsets(after, before, [True], nothing) == (
        "t, partition 0, offsets 5 to 8; t, partition 2, offsets 0 to 2"
    )


def test_the_first_batch_begins_where_spark_has_noted() -> None:
    noted = b'\0v1\n{"t":{"0":100}}'
    assert describe_offsets(plan({"t": {"0": 103}}), None, [True], lambda index: noted) == (
        "t, partition 0, offsets 100 to 102"
    )


def test_only_kafka_is_named_and_not_every_partition() -> None:
    many = {"t": {str(number): 1 for number in range(12)}}
    text = describe_offsets(plan({"logOffset": {}}, many), None, [False, True], nothing)
    assert text.startswith("t, partition 0, offsets 0 to 0; t, partition 1,")
    assert text.endswith("t, partition 4, offsets 0 to 0 and 7 more partitions")


@pytest.mark.parametrize("text", [b"v9\n{}\n{}", b"v1\n{}\nnonsense", plan(None)])
def test_a_plan_that_cannot_be_read_names_nothing(text: bytes) -> None:
    assert describe_offsets(text, None, [True], nothing) == ""
