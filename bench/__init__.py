"""`launch bench`: measures parts of Tandem on this machine, and fleets that it starts for this purpose."""
