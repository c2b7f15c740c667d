"""The router: its fleet, policy and request book as lists of messages, and its API over HTTP."""
