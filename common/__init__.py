"""Words, messages, the text pipeline, pages and the engine: what every process of Tandem shares."""


def version_of(library: str) -> str:
    """The version of a library; "" where it is not installed. It looks into files, which takes a while."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def own_version() -> str:
    """The release that this is."""
    return version_of("tandem-serve") or "of a checkout that is not installed"
