"""Kafka: rows into topics, exactly once, by transactions that any process can commit.

A task writes in one Kafka transaction and leaves it open. Its receipt holds the producer id, the epoch
and the last record in each partition, which is the witness. The driver ends the transaction by EndTxn.

    sink          the sink: options, checks, what a receipt holds
    writer        the executor's half, on these four:
      producer      a transactional producer over Arrow columns
      columns       Arrow columns as pointers for librdkafka
      reports       acknowledgements and errors from librdkafka, and the thread that reads them
      librdkafka    the library's C interface and its errors
    branches      the driver's half: check, commit, find and abort, by what Kafka's answers prove
    transactions  asks Kafka: end, describe and list transactions, and whether a commit arrived
    witness       proves from a record whether its transaction was committed
    offsets       consumer-group offsets, and as a branch of the decision
    cluster       brokers, topics and partitions' leaders
    client        the driver's connection: requests, routing, time limits
    kafka_python  everything that we use of the library kafka-python
    settings      librdkafka's settings: defaults, checks, and translated for kafka-python
    types         values that several files share
    inspector     Kafka as an operator inspects it

A commit: `KafkaBranches.commit` (branches) asks `end`, then `settlements` (both transactions). Each is
sent by `KafkaClient.collect` (client). If the coordinator has forgotten the transaction,
`KafkaBranches.commit` asks the witness.
"""
