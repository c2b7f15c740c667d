"""Programs that run inside the peers' environments. They import nothing of Tandem."""
