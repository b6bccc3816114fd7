"""Any database with a two-phase driver (PEP 249): links, names of branches, the witness."""
