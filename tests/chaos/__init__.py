"""Chaos: a fleet of real processes under load, whose instances are killed, stopped and drained all the while.

python -m tests.chaos --requests 500 --faults 50        every answer must be the one that a fleet without faults gives
python -m tests.chaos --latency                          how long a client waits when a decode instance is killed

__main__ ─► run ─► fleet      processes, their ends and their logs
               ├─► workload   requests, which tests/rig/client sends
               ├─► faults     who is struck when, and when it is whole again
               └─► checks     answers against the run without faults and against transformers ─► report
"""
