"""Corpora: where documents come from, in a fixed order and without holding them all in memory."""

import codecs
import glob
import gzip
import json
import platform
import re
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Literal

_SAMPLE = 64 * 1024  # bytes of a file's head and tail that its fingerprint covers


class Corpus(ABC):
    """A source of documents.

    Attributes:
        name: short and safe in file names; a different corpus has a different name, because the default folder of the
            shards is made from it.
    """

    name: str

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Yield every document, in the same order each time. Raises ValueError for input that cannot be read."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Digest that changes when the documents do. Cheap: called at every start. Raises ValueError as above."""


class PythonStdlib(Corpus):
    """The source text of the standard library of the running Python, one document per module.

    Tests and installed packages are left out. The name holds the Python version: an upgrade is another corpus, not a
    stale one.
    """

    _LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

    def __init__(self) -> None:
        self.name = f"python_stdlib-{platform.python_version()}"
        self._root = Path(sysconfig.get_path("stdlib"))

    def documents(self) -> Iterator[str]:
        """One module after another, in the order of their paths."""
        for path in self._files():
            yield _read(path, "utf-8", "replace")

    def fingerprint(self) -> str:
        """Digest of the modules' paths, sizes, heads and tails."""
        return _fingerprint((path.relative_to(self._root).as_posix(), path) for path in self._files())

    def _files(self) -> list[Path]:
        files = [
            path for path in self._root.rglob("*.py") if self._LEFT_OUT.isdisjoint(path.relative_to(self._root).parts)
        ]
        if not files:
            raise ValueError(f"{self._root} holds no .py files: this Python ships no source; use TextFiles instead")
        return sorted(files, key=lambda path: path.relative_to(self._root).as_posix())


class TextFiles(Corpus):
    """Documents from text files on disk, plain or gzipped.

    A `.jsonl` (or `.ndjson`) file holds one JSON object a line, each a document; any other file is plain text.
    Documents of white space alone are skipped. Where a whole file is one document, it is in memory at once.

    Args:
        paths: files, folders (searched for .txt, .jsonl and their .gz forms), or globs; `**` crosses folders.
        one_document_per: for plain text, "file", or "line" (the newline is dropped).
        text_field: the key of the text in a JSON line.
        encoding: of every file; a byte order mark is dropped.
        errors: "strict" refuses bytes that do not decode, "replace" puts U+FFFD in their place.

    Raises:
        ValueError: no paths given, or an option is not one of those above.
    """

    _SUFFIXES = (".txt", ".jsonl", ".ndjson", ".txt.gz", ".jsonl.gz", ".ndjson.gz")

    def __init__(
        self,
        paths: str | list[str],
        one_document_per: Literal["file", "line"] = "file",
        text_field: str = "text",
        encoding: str = "utf-8",
        errors: Literal["strict", "replace"] = "strict",
    ) -> None:
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        if not self.paths:
            raise ValueError("paths is empty: name at least one text file, folder or glob")
        if one_document_per not in ("file", "line"):
            raise ValueError(f'one_document_per is {one_document_per!r}: it must be "file" or "line"')
        if errors not in ("strict", "replace"):
            raise ValueError(f'errors is {errors!r}: it must be "strict" or "replace"')
        try:
            codecs.lookup(encoding)
        except LookupError:
            raise ValueError(f"encoding {encoding!r} is unknown: try utf-8 or latin-1") from None
        self.one_document_per = one_document_per
        self.text_field = text_field
        self.encoding = encoding
        self.errors = errors

        options = json.dumps([self.paths, one_document_per, text_field, encoding, errors])
        stem = re.sub(r"[^A-Za-z0-9_]+", "_", Path(self.paths[0]).name.split(".")[0]).strip("_")
        self.name = f"{stem[:32] or 'text'}-{blake2b(options.encode(), digest_size=4).hexdigest()}"

    def documents(self) -> Iterator[str]:
        """The documents in the order of `paths`, then of file names, then of lines."""
        for path in self._files():
            if path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
                documents = self._json_lines(path)
            elif self.one_document_per == "line":
                documents = (line.rstrip("\r\n") for line in _lines(path, self.encoding, self.errors))
            else:
                documents = iter([_read(path, self.encoding, self.errors)])
            yield from (document for document in documents if document.strip())

    def fingerprint(self) -> str:
        """Digest of the files' names, sizes, heads and tails."""
        return _fingerprint((path.name, path) for path in self._files())

    def _files(self) -> list[Path]:
        files: dict[Path, None] = {}  # a file matched twice is read once
        for pattern in self.paths:
            if Path(pattern).is_dir():
                found = [path for path in Path(pattern).rglob("*") if path.name.endswith(self._SUFFIXES)]
            elif Path(pattern).exists():  # a name may hold glob characters
                found = [Path(pattern)]
            else:
                found = [Path(path) for path in glob.glob(pattern, recursive=True)]
            found = sorted(path for path in found if path.is_file())
            if not found:
                raise ValueError(f"no files match {pattern!r} (from {Path.cwd()}): correct the corpus paths")
            files.update(dict.fromkeys(path.resolve() for path in found))
        return list(files)

    def _json_lines(self, path: Path) -> Iterator[str]:
        for number, line in enumerate(_lines(path, self.encoding, self.errors), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
            if not isinstance(row, dict) or not isinstance(row.get(self.text_field), str):
                found = f"the fields {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
                raise ValueError(f"{path}, line {number}: no text under {self.text_field!r} in {found}: set text_field")
            yield row[self.text_field]


def _lines(path: Path, encoding: str, errors: str) -> Iterator[str]:
    """Lines of a plain or gzipped file, line ends made "\\n"; every failure is a ValueError that names the file."""
    try:
        with _open(path, encoding, errors) as file:
            for number, line in enumerate(file):
                yield line.removeprefix("\ufeff") if number == 0 else line
    except UnicodeDecodeError as error:
        raise ValueError(
            f'{path}: byte {error.object[error.start]:#04x} is not {encoding}: set encoding, or errors="replace"'
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a complete gzip file ({error}): replace it or drop the .gz") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _read(path: Path, encoding: str, errors: str) -> str:
    return "".join(_lines(path, encoding, errors))


def _open(path: Path, encoding: str, errors: str) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding=encoding, errors=errors)
    return path.open(encoding=encoding, errors=errors)


def _fingerprint(files: Iterator[tuple[str, Path]]) -> str:
    """Digest of names, sizes, and the head and tail of each file: not of times or folders, which differ by machine."""
    digest = blake2b(digest_size=16)
    for name, path in files:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                head = file.read(_SAMPLE)
                file.seek(max(0, size - _SAMPLE))
                digest.update(f"{name}\0{size}\0".encode() + head + file.read())
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()
