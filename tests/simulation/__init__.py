"""Tests of the simulation of planned fleets."""
