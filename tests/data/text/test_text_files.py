"""Text in files: its order, its parts, its tokens, and what a checkpoint needs to read them."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from lockstep.data.base import DataSet
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.data.text.tokenizer import ByteTokenizer, CharTokenizer, build_char_tokenizer, tokenizer_of
from lockstep.errors import UsageError

PLAY = "To be, or not to be: that is the question.\n" * 20


def _open(root: Path, name: str = "text", **options: object) -> DataSet:
    return open_data(DataRequest(name, str(root), options=options))


def _read(data: DataSet, file: str = "") -> tuple[str, str]:
    """Return the text of all inputs of training and of all targets of validation that count."""
    tokenizer = tokenizer_of(data.facts["tokenizer"], file)
    inputs, _ = data.train.fetch(np.arange(len(data.train)), None)
    _, targets = data.validation.fetch(np.arange(len(data.validation)), None)
    return tokenizer.decode(inputs.flatten().numpy()), tokenizer.decode(targets[targets >= 0].numpy())


@pytest.mark.parametrize("by", ["character", "byte"])
def test_a_file_comes_whole_and_in_order(tmp_path: Path, by: str) -> None:
    text = PLAY + "Größe 漢字"
    (tmp_path / "play.txt").write_text(text)
    data = _open(tmp_path / "play.txt", by=by, context=10)
    assert data.get_sample_name(1) == "sample 1 'not to be:'"
    train, validation = _read(data)
    cut = int(len(text) * 0.9)
    assert text[:cut].startswith(train)
    assert len(train) > cut - 12
    assert text[cut + 1 :] == validation
    assert data.facts["vocabulary"] == (256 if by == "byte" else len(set(text)))
    assert data.facts["context"] == 10
    assert data.train.in_memory


def test_a_file_of_the_library_tokenizers(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.train_from_iterator([PLAY], tokenizers.trainers.BpeTrainer(vocab_size=80, show_progress=False))
    file = str(tmp_path / "tokenizer.json")
    library.save(file)
    (tmp_path / "play.txt").write_text(PLAY)
    data = _open(tmp_path / "play.txt", tokenizer=file, context=4, stride=4)
    train, _ = _read(data, file)
    assert PLAY.startswith(train)
    assert data.facts["vocabulary"] == library.get_vocab_size()
    (tmp_path / "other.json").write_text((tmp_path / "tokenizer.json").read_text() + "\n")
    with pytest.raises(UsageError, match=r"expected sha256 .*, got .*; pass the tokenizer file"):
        tokenizer_of(data.facts["tokenizer"], str(tmp_path / "other.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="not a file of the library tokenizers"):
        _open(tmp_path / "play.txt", tokenizer=str(tmp_path / "other.json"))


def test_a_folder_s_files_follow_each_other_by_name(tmp_path: Path) -> None:
    for name, text in {"b.txt": "bbbb", "a/z.txt": "aaaa", "c.md": "no", ".x.txt": "no", "a.txt": "AAAA"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    data = _open(tmp_path, context=1, validation=0)
    assert data.validation is None
    tokens, _ = data.train.fetch(np.arange(len(data.train)), None)
    assert tokenizer_of(data.facts["tokenizer"]).decode(tokens.flatten().numpy()) == "AAAAbbbbaaa"


@pytest.mark.parametrize("names", [("train", "val"), ("train.txt", "val.txt")])
def test_parts_that_are_there_are_taken(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, text in zip(names, ("abcabcabca", "cba"), strict=True):
        file = tmp_path / name if name.endswith("txt") else tmp_path / name / "1.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert _read(_open(tmp_path, context=3)) == ("abcabcabc", "ba")
    for validation in (0, 0.1):
        with pytest.raises(UsageError, match=rf"options\.validation: not supported with .*{names[1]}; remove it$"):
            _open(tmp_path, context=3, validation=validation)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("train.txt", "test.txt"), "test.txt"),
        (("Train.txt", "Valid.txt", "test.txt"), "Valid.txt, test.txt"),
        (("wiki/wiki.train.txt", "wiki/wiki.valid.txt", "more.txt"), "wiki/wiki.valid.txt"),
        (("stories-training.txt", "stories-dev.txt"), "stories-dev.txt"),
        (
            ("train-00000-of-00002.txt", "train-00001-of-00002.txt", "test-00000-of-00001.txt"),
            "test-00000-of-00001.txt",
        ),
        (("train/a.txt", "test/b.txt"), "test"),
        (("book.txt", "val.txt"), "val.txt"),
        (("train.txt", "val/a.txt"), "val"),
        (("train/train.txt", "train/test.txt", "val/a.txt"), "test.txt"),
    ],
)
def test_a_held_out_text_is_not_trained_on(tmp_path: Path, names: tuple[str, ...], found: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PLAY)
    with pytest.raises(UsageError, match=rf"would be read as one text, but contains {found}, named like a .*; set "):
        _open(tmp_path)


def test_names_like_splits_are_no_splits_without_training_data(tmp_path: Path) -> None:
    root = tmp_path / "test"
    names = ("train.txt", "contest.txt", "test-of-time.txt", "guides/test.txt", "guides/testing.txt", "dev2/a.txt")
    for name in names:
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(PLAY)
    assert len(_open(root, context=1, validation=0).train) == len(names) * len(PLAY) - 1


def test_a_test_text_next_to_both_splits_is_ignored(tmp_path: Path) -> None:
    for name, text in {"train.txt": "abcabcabca", "val.txt": "cba", "test.txt": "xyz"}.items():
        (tmp_path / name).write_text(text)
    assert _read(_open(tmp_path, context=3)) == ("abcabcabc", "ba")


@pytest.mark.parametrize("name", ["test.txt", "val/a.txt"])
def test_a_single_text_has_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(PLAY)
    assert _open(tmp_path, context=4).validation is not None


def test_shakespeare_as_nanogpt_cuts_it() -> None:
    data = open_data(DataRequest("shakespeare", options={"context": 64, "stride": 1}))
    assert (len(data.train), len(data.validation)) == (1_003_854 - 64, 1743)
    assert (data.facts["vocabulary"], data.facts["context"]) == (65, 64)
    inputs, targets = data.train.fetch(np.array([0, 5]), None)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert tokenizer_of(data.facts["tokenizer"]).decode(inputs[0].numpy()).startswith("First Citizen:\nBefore we ")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"abc\xe9abc")
    with pytest.raises(UsageError, match=r"latin\.txt is not valid UTF-8: byte 3 is 0xe9; convert the file"):
        _open(tmp_path)
    (tmp_path / "nothing.txt").touch()
    with pytest.raises(UsageError, match=r"nothing\.txt is empty; add text to it"):
        _open(tmp_path / "nothing.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no \.txt files under .*; set"):
        _open(tmp_path / "empty")
    with pytest.raises(UsageError, match=r"cannot read .*absent: No such file"):
        _open(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"options\.by: expected one of character, byte, got 'word'"):
        _open(tmp_path, by="word")
    with pytest.raises(UsageError, match=r"options\.validation: expected a fraction of at least 0 .*, got 1"):
        _open(tmp_path, validation=1)
    with pytest.raises(UsageError, match=r"image_size: 32 is not supported, since the dataset has no images; "):
        open_data(DataRequest("text", image_size=32))


def test_a_strange_character_is_named() -> None:
    with pytest.raises(UsageError, match=r"character 'z' at index 2 is not in the vocabulary; remove it"):
        CharTokenizer("abc").encode("abz")


@pytest.mark.parametrize("by", ["character", "byte"])
def test_the_library_gives_the_same_tokens(by: str) -> None:
    text = "Größe\tan\r\nalle,  漢字.\n\n'll \x00" + "".join(map(chr, range(0x20, 0x180)))
    own = ByteTokenizer() if by == "byte" else build_char_tokenizer(text)
    found = own.library
    ids = found.encode(text).ids
    assert ids == own.encode(text).tolist()
    assert found.decode(ids) == text
    assert found.get_vocab_size() == own.vocab_size
