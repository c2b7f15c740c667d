"""The small operations of a decoder that are worth a fused kernel: the port and its implementations."""
