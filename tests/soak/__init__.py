"""Soak: transfers for an hour, between processes that join, leave and die all along, and what that does to those that stay.

python -m tests.soak.transfers --minutes 60

transfers ─► fleet      the members, their pushes and what becomes of them
         └─► report     what the kernel says of a process, how much CPU the run may use, the table, and the verdict
"""
