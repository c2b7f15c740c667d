"""`launch bench router`: what one router process adds to a request and to a token, and how many it can carry."""
