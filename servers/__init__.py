"""Real servers from their published packages, for the demo, the tests and the benchmarks.

This package has no part of the pipeline, and the pipeline imports nothing from it.
"""


class ServerError(RuntimeError):
    """A server could not be fetched, started or asked; the message says what is wrong and what to do."""


def last_lines(text: str, count: int = 20) -> str:
    """
    Return the end of a log, for an error message.

    :param text: the log.
    :param count: number of lines kept; blank lines do not count.
    """
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])
