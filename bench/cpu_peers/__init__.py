"""`launch bench cpu-peers`: Tandem on a CPU beside the engines that people would otherwise run there, in alternating rounds."""
