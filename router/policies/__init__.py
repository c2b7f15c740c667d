"""The policies: which of the members that can serve a request is asked first. One file each; `choice` finds one by its name."""
