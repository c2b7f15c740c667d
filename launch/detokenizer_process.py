"""The detokenizer as a process: its inbox, and the pipeline that turns tokens into text.

Owns the composition. Does not know tokens or text: `common.text` does.
"""
