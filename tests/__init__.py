"""Everything that can be proven without a GPU."""
