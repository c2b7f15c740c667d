"""Products of rows with packed weights, for linear layers on CPU."""
