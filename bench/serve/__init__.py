"""`launch bench serve`: drives any OpenAI-compatible endpoint with a chosen load, and reports what its clients see."""
