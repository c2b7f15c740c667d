"""Child processes that talk with their parent in lines of JSON: `child` is the parent's half, `parent` the child's half."""
