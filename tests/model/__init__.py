"""A small simulated world that injects every kind of fault, deterministically.

The real coordinator runs over the real log code. Around it are simulated systems (`kafka`,
`database`), a disk that forgets what was not synced (`disk`), Spark's checkpoint and tasks (`spark`)
and any number of drivers that are switched at every effect (`driver`, `world`). A `schedule` says what
goes wrong and where; it alone determines a run. `families` enumerate schedules, and Hypothesis
generates others. The `oracle` sees everything and checks what must never happen. `mutants` are
deliberate protocol bugs: the model must catch each of them.

    pytest tests/model -s                                   the counts and the seed
    pytest tests/model -s --model-seed random               other schedules than last time
    pytest tests/model -s --model-schedules 100000          more of them
"""
