"""The error of everything that reads SSTables."""

from __future__ import annotations


class SSTableError(ValueError):
    """An error: a file of an SSTable cannot be read.

    :ivar file: path or name of the file
    :ivar position: byte of the file; None: the file as a whole
    :ivar problem: what is wrong
    :ivar advice: what to do
    """

    def __init__(self, file: str, position: int | None, problem: str, advice: str) -> None:
        place = file if position is None else f"{file}, byte {position:,}"
        super().__init__(f"{place}: {problem}; {advice}")
        self.file, self.position, self.problem, self.advice = file, position, problem, advice
