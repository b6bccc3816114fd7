"""The demonstration: one stream, two sinks, and SIGKILL in the middle of their batches.

Lines `id,timestamp,temperature` flow from the topic `sensor`. A Poundlock pipeline and Spark's own
Kafka sink each write them as readings to a topic of their own. Both are real Spark drivers, each is
killed the same number of times, and what was lost or repeated is counted from the topics at the end.

    plan.py       when each kill is due: pure, from a seed
    job.py        the child process that is killed
    process.py    a child with all that it starts, in a session of its own
    side.py       one side: its job started, watched, killed and started again
    director.py   sets the scene, lets both sides play, counts
    history.py    what happened, and what follows from it: pure
    topics.py     the demo's dealings with Kafka
    count.py      rows in against rows out: pure
    result.py     what came out, and what that means in plain words
    screen.py     what a terminal, or a log, shows meanwhile
    timeline.py   the history as a picture
    report.py     report.json and report.html
"""
