"""`launch bench streams`: what prompts that arrive do to answers that are being written. Owns no code of its own."""
