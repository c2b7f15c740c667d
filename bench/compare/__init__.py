"""`launch bench compare`: the same load through several layouts, in alternating rounds, and a page of charts about it."""
