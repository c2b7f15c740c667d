"""What both roles share as processes: the loop that joins scheduler, executor, transfers and messages."""
