"""Finds a card that pays a small sum and then a large one within a minute: a pattern (CEP)."""

from __future__ import annotations

import argparse
import sys

import poundlock as lock
from poundlock.sinks import Files

PAYMENTS = [
    ("x", 0, 0.5),
    ("y", 3, 20.0),
    ("x", 10, 900.0),
    ("y", 20, 0.9),
    ("z", 30, 0.1),
    ("y", 95, 950.0),
    ("z", 50, 30.0),
    ("z", 70, 700.0),
    ("x", 200, 10.0),
]

PATTERN = (
    lock.begin("tried", skip=lock.skip_past_last_event())
    .where("amount < 1")  # in SQL: Spark works it out before the rows come to Python
    .followed_by("used")
    .where(lambda row, earlier: row.amount > 500 * earlier["tried"][0].amount)
    .within("1 minute")
)


def alert(match, ctx):
    tried, used = match["tried"][0], match["used"][0]
    return ctx.key.card, tried.amount, used.amount


def pipeline(spark, args):
    [directory] = args or sys.exit("usage: fraud.py DIRECTORY, for the checkpoint and results")
    payments = lock.from_collection(
        spark,
        PAYMENTS,
        "card string, second long, amount double",
        batch_rows=4,
        directory=f"{directory}/rows",
    ).selectExpr("card", "amount", "timestamp_seconds(second) AS ts")
    alerts = (
        lock.flow(payments, time="ts", watermark="30 seconds")
        .key_by("card")
        .match(
            PATTERN,
            alert,
            "card string, tried double, used double",
            timed_out=("unused", lambda match, ctx: (ctx.key.card,), "card string"),
        )
    )
    return (
        lock.pipeline(alerts, name="fraud", checkpoint_location=f"{directory}/checkpoint")
        .to(Files(f"{directory}/alerts", format="json"))
        .to(Files(f"{directory}/unused", format="json"), output="unused")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="for input, results and checkpoint")
    given = parser.parse_args()
    job = pipeline(lock.session(kafka=False), [given.directory])
    job.start(availableNow=True).awaitTermination()
