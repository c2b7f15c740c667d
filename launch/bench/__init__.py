"""`launch bench`: measures parts of Tandem on this machine. Knows nothing of a running fleet."""
