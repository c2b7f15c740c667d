"""KV pages: their layout, the pool that owns them and the leases that hold them. Knows no tensors."""
