"""The text pipeline: the only place where token ids become text and text becomes token ids."""
