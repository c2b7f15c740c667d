"""The prefill role: decides which chunks of which prompts are computed and when their pages are pushed."""
