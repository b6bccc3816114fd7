"""Any database whose driver has two-phase commit as PEP 249 describes it.

sink      options, checks before the start, the parts in outline
writer    the task's half: rows by `executemany`, a witness row, `tpc_prepare`
prepared  the driver's half: `tpc_recover`, `tpc_commit`, `tpc_rollback`; how branches are named
link      a connection; what differs between drivers; errors
"""
