"""HTTP in, one request's life, policies and the fleet. Never imports prefill, decode, kv_transfer or torch."""
