import gzip
import json
import re
from pathlib import Path

import pytest

from attnres_lit.data.corpora import PythonStdlib, TextFiles


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_python_stdlib_is_source_without_tests():
    corpus = PythonStdlib()
    paths = [path.as_posix() for path in corpus._files()]
    assert any(path.endswith("/argparse.py") for path in paths)
    assert not any(re.search(r"/(tests?|idle_test|site-packages)/", path) for path in paths)
    first = next(corpus.documents())
    assert first == next(corpus.documents())
    assert "\r" not in first
    assert re.fullmatch(r"[\w.+-]+", corpus.name)


def test_text_files_orders_deduplicates_and_skips_blank_documents(tmp_path: Path):
    write(tmp_path / "b.txt", "two")
    write(tmp_path / "a.txt.gz", "one")
    write(tmp_path / "blank.txt", " \n")
    write(tmp_path / "deep" / "c.jsonl", '{"text": "three"}\n\n{"text": "four"}\n')
    write(tmp_path / "deep" / "ignored.bin", b"\xff")
    folder = TextFiles([str(tmp_path)])
    assert list(folder.documents()) == ["one", "two", "three", "four"]
    globs = TextFiles([f"{tmp_path}/*.txt", f"{tmp_path}/**/*.jsonl", str(tmp_path / "b.txt")])
    assert list(globs.documents()) == ["two", "three", "four"]


def test_one_document_per_line(tmp_path: Path):
    path = write(tmp_path / "lines.txt", b"\xef\xbb\xbffirst\r\nsecond\n\nlast")
    assert list(TextFiles(str(path), one_document_per="line").documents()) == ["first", "second", "last"]


def test_a_file_name_may_hold_glob_characters(tmp_path: Path):
    path = write(tmp_path / "notes [draft].txt", "text")
    assert list(TextFiles(str(path)).documents()) == ["text"]


def test_other_encodings_and_undecodable_bytes(tmp_path: Path):
    path = write(tmp_path / "latin.txt", "é".encode("latin-1"))
    assert list(TextFiles(str(path), encoding="latin-1").documents()) == ["é"]
    assert list(TextFiles(str(path), errors="replace").documents()) == ["\ufffd"]
    with pytest.raises(ValueError, match=r"latin\.txt: byte 0xe9 is not utf-8: set encoding"):
        list(TextFiles(str(path)).documents())


def test_fingerprint_sees_changes_and_not_the_place(tmp_path: Path):
    one, other = write(tmp_path / "1" / "a.txt", "text"), write(tmp_path / "2" / "a.txt", "text")
    before = TextFiles(str(one)).fingerprint()
    assert TextFiles(str(other)).fingerprint() == before
    write(one, "tex!")
    assert TextFiles(str(one)).fingerprint() != before


def test_different_options_give_different_names(tmp_path: Path):
    names = {
        TextFiles("a.txt").name,
        TextFiles("b.txt").name,
        TextFiles("a.txt", one_document_per="line").name,
        TextFiles("a.txt", text_field="body").name,
        TextFiles("**/*.txt").name,
    }
    assert len(names) == 5
    assert all(re.fullmatch(r"[\w-]+", name) for name in names)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"text": "a"}\n{"text": ', "x.jsonl, line 2: not JSON"),
        ("x.jsonl", '{"body": "a", "id": 1}\n', "x.jsonl, line 1: no text under 'text' in the fields body, id"),
        ("x.jsonl", '{"text": 3}\n', "x.jsonl, line 1: no text under 'text'"),
        ("x.jsonl", "[1]\n", "x.jsonl, line 1: no text under 'text' in a list"),
    ],
)
def test_bad_json_lines_name_file_and_line(tmp_path: Path, name: str, content: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        list(TextFiles(str(write(tmp_path / name, content))).documents())


def test_bad_gzip_names_the_file(tmp_path: Path):
    plain, cut = tmp_path / "plain.txt.gz", tmp_path / "cut.txt.gz"
    plain.write_text("not compressed")
    cut.write_bytes(gzip.compress(bytes(range(256)) * 50)[:-20])
    for path in (plain, cut):
        with pytest.raises(ValueError, match=re.escape(f"{path}: not a complete gzip file")):
            list(TextFiles(str(path), encoding="latin-1").documents())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": []}, "paths is empty"),
        ({"paths": "a", "one_document_per": "word"}, "one_document_per is 'word'"),
        ({"paths": "a", "encoding": "klingon"}, "encoding 'klingon' is unknown"),
        ({"paths": "a", "errors": "ignore"}, "errors is 'ignore'"),
    ],
)
def test_bad_options(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TextFiles(**options)


def test_no_files_match_names_the_pattern(tmp_path: Path):
    write(tmp_path / "a.txt", "text")
    corpus = TextFiles([f"{tmp_path}/a.txt", f"{tmp_path}/*.md"])
    with pytest.raises(ValueError, match=r"no files match '.*/\*\.md'"):
        list(corpus.documents())
    with pytest.raises(ValueError, match="no files match"):
        corpus.fingerprint()


def test_json_may_spell_a_lone_surrogate(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", json.dumps({"text": "a\ud800b"}))
    assert list(TextFiles(str(path)).documents()) == ["a\ud800b"]  # `prepare` makes it encodable
