"""Systems, as a person looks into them: one file each. See `poundlock.core.inspector`."""
