"""`launch bench offline`: the throughput of one engine, with its scheduler and without HTTP."""
