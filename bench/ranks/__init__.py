"""`launch bench ranks`: what a step costs the processors of its ranks, beside the computing. Owns no code of its own."""
