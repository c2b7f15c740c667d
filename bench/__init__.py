"""`launch bench`: measures parts of Tandem on this machine, and fleets that it starts for that. Knows of no other fleet."""
