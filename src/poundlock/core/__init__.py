"""Two-phase commit itself, with the standard library alone.

Read in this order: model, protocol, participant, log, coordinator. The guarantee table stands apart.
"""
