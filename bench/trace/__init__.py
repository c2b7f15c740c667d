"""`launch bench trace`: what every process of a fleet does, as a trace that Perfetto shows."""
