"""The demo model: its corpus, training, evaluation and weights. Knows nothing of how it is served."""
