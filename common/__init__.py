"""Words, messages, the text pipeline, pages and the engine: what every process of Tandem shares."""


def own_version() -> str:
    """The release that this is. It looks into files, which takes a while."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "of a checkout that is not installed"
