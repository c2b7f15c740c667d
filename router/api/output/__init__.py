"""The parts of an answer: what a model thinks, says and calls, read from its text as it comes."""
