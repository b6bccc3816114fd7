"""The demonstration: one stream, two sinks, and SIGKILL in the middle of their batches.

Lines `id,timestamp,temperature` flow from the topic `sensor`. A Poundlock pipeline and Spark's own
Kafka sink each write them as readings to a topic of their own. Both are real Spark drivers, and both
are killed the same number of times. At the end, the topics show how many rows were lost or repeated.

    plan.py       when each kill is due, chosen by a seed; pure
    job.py        the child process that is killed
    process.py    a child process with everything that it starts, in a session of its own
    side.py       one side: its job is started, watched, killed and started again
    director.py   starts a broker, runs both sides, and counts
    history.py    what happened on a side, and what follows from it; pure
    topics.py     the topics: creating, filling and reading them
    count.py      compares input and output rows; pure
    result.py     the counts, and what they mean in plain words
    screen.py     what a terminal or a log shows during the demo
    timeline.py   the history as a picture
    report.py     report.json and report.html
"""
