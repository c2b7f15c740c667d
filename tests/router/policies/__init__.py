"""Tests of the policies, each against a plain model of what it promises."""
