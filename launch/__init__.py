"""Starts processes and reads flags. Holds no request logic."""
