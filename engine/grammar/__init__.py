"""Grammars: JSON schemas, EBNF, regular expressions and structural tags, compiled and applied as masks of tokens."""
