"""Kafka on the wire: what the Kafka sink and the Kafka source share.

`producer` writes, on librdkafka, in tasks; `client` ends, describes and proves transactions, on
kafka-python's protocol classes, in the driver; `branches` makes the two a participant.
"""
