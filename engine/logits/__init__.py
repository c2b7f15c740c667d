"""What changes logits before a token is drawn."""
