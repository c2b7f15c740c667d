"""`launch bench control`: what the control plane costs at the router, for fleets of different sizes."""
