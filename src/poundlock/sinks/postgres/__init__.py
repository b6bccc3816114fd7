"""PostgreSQL as the sink needs it: the catalog, rows as binary COPY, the witness, the two modes."""
