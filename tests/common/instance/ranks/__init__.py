"""Tests of an instance with several ranks. Owns no code: the rig and the tests are beside this file."""
