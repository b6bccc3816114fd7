"""Two-phase commit itself, with the standard library alone.

Read in this order: model, protocol, participant, job, log, coordinator (with sweep). The guarantee
table stands apart.
"""
