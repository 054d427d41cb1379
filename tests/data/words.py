"""A small corpus whose documents are known in advance."""

from collections.abc import Iterator

from attnres_lit.data.corpora import Corpus


class Words(Corpus):
    """`count` short documents: "document 0 0 0 ...", "document 1 1 1 ..."."""

    def __init__(self, count: int = 300, name: str = "words") -> None:
        self.name = name
        self.count = count

    def documents(self) -> Iterator[str]:
        for i in range(self.count):
            yield f"document{f' {i}' * 10}"

    def fingerprint(self) -> str:
        return f"{self.count:032d}"
