"""Soak: transfers for an hour, between processes that join, leave and die all along, and what that does to those that stay.

python -m tests.soak.transfers --minutes 60

Also upgrades of a fleet from the previous release, simulated fleets beside real ones, grammars over vocabularies of odd sizes,
requests that are generated from the API's description, and pages in a browser.
"""
