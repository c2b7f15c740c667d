"""The rig of every test that runs real processes: one client, the router's pages, shared memory, and what a run prints.

client          streams of the API, read strictly, with what came when
forks           children that are forked from a process that has loaded the product
pages           /cluster, /metrics and /ready of a fleet, and waiting for what they must say
report          verdicts, figures, and the keys of a fleet with several clients
shared_memory   what is left behind in /dev/shm
"""
