"""`launch bench trace`: what every process of a fleet does, as a timeline that Perfetto shows."""
