"""C for the CPU engine: how it is compiled and loaded, and what its sources share."""
