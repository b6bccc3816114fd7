"""Counts words that come in over a socket. Start `nc -lk 9999`, then run this and type.

A socket cannot be replayed, so what it sends is counted at most once: `guarantee` says so.
"""

from __future__ import annotations

import sys

import poundlock as lock
from poundlock.sinks import Console


def pipeline(spark, args):
    host, port, checkpoint = args or sys.exit("usage: word_count.py HOST PORT CHECKPOINT")
    lines = lock.read_socket(spark, host, int(port))
    words = lock.flow(lines).flat_map(
        lambda row: [(word, 1) for word in row.value.lower().split()], "word string, n long"
    )
    counts = words.key_by("word").sum("n")  # for every word, how often it has come so far
    return lock.pipeline(counts, name="words", checkpoint_location=checkpoint).to(Console())


if __name__ == "__main__":
    job = pipeline(lock.session(kafka=False), ["127.0.0.1", "9999", "/tmp/poundlock-words"])
    print(job.guarantee())
    job.start(processingTime="1 second").awaitTermination()
