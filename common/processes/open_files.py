"""How many files a process may open. Owns the system's limit for this process, and nothing else."""

import resource


def allow_many_files() -> None:
    """Raise this process's limit to the highest that it may have. Sockets count as files, and systems start processes with a
    limit as low as 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
