"""Looking words up gives the ids that the tokenizer gives to the whole text, whatever the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import NFC, Lowercase
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split, Whitespace
from tokenizers.trainers import BpeTrainer

from kubetune.data.text import bpe_cache
from kubetune.data.text.bpe_cache import Words
from kubetune.data.text.tokenizer_files import QWEN2_SPLIT

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "tokenizers"
CORPUS = [
    "We've  seen it: they'll pay 1024 EUR, don't they?\n\n  def f(x):\n\treturn x + 1\r\n",
    "Größe, naïve … 日本語",
]

# Words, and what lies between them: where the pattern decides, and where added tokens begin.
_LETTERS = [*"aZ 09'\t\n\r.,-", "é", "ſ", "e\u0301", "\x1c", "\u00a0", "日本"]
_RUNS = ["'ll", "'S", "  ", " \n", "\n\n ", "return", " they", "https://x.org/", "2048"]
_ADDED = ["<|im_start|>", "<|im_start|><", "<|im_start"]
PARTS = st.sampled_from([*_LETTERS, *_RUNS, *_ADDED])
TEXTS = st.one_of(
    st.lists(PARTS, max_size=25).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)


def split_by(pattern: str) -> PreTokenizer:
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(pattern), behavior="isolated"), byte_level])


def train(pre_tokenizer: PreTokenizer) -> Tokenizer:
    backend = Tokenizer(BPE())
    backend.normalizer = NFC()
    backend.pre_tokenizer = pre_tokenizer
    trainer = BpeTrainer(
        vocab_size=400,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|im_start|>"],
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_special_tokens([AddedToken("<|im_start|><", special=True, normalized=False)])
    return backend


TRAINED = [
    train(split_by(QWEN2_SPLIT)),
    train(split_by(QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))),
    train(ByteLevel(add_prefix_space=False)),
]
REAL = [Tokenizer.from_file(str(file)) for file in sorted(SHARED.glob("qwen*/tokenizer.json"))]
KNOWN = [(backend, known) for backend in TRAINED + REAL if (known := Words.of(backend)) is not None]


def test_the_usual_splits_are_known() -> None:
    assert len(KNOWN) == len(TRAINED + REAL)


@given(TEXTS)
def test_words_give_the_ids_of_the_text(text: str) -> None:
    for backend, known in KNOWN:
        assert known.ids(text) == backend.encode(text, add_special_tokens=False).ids


def test_what_is_remembered_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe_cache, "MOST_WORDS", 20)
    backend = TRAINED[0]
    known = Words.of(backend)
    assert known is not None
    text = " ".join(f"word{chr(97 + i)}" for i in range(26)) + " " + "long" * 40
    assert known.ids(text) == backend.encode(text).ids
    assert len(known._ids_of_word) <= 20
    assert all(len(word) <= bpe_cache.LONGEST_WORD for word in known._ids_of_word)


@pytest.mark.parametrize(
    "pre_tokenizer", [Whitespace(), ByteLevel(add_prefix_space=True), split_by(r"\s+")]
)
def test_other_splits_are_left_to_the_tokenizer(pre_tokenizer: PreTokenizer) -> None:
    assert Words.of(train(pre_tokenizer)) is None


def test_tokenizers_that_change_text_or_tokens_by_their_neighbours_are_left_alone() -> None:
    lower, stripping = (train(ByteLevel(add_prefix_space=False)) for _ in range(2))
    lower.normalizer = Lowercase()
    stripping.add_special_tokens([AddedToken("<|end|>", lstrip=True, normalized=False)])
    assert Words.of(lower) is None
    assert Words.of(stripping) is None


def test_an_unknown_model_is_left_alone() -> None:

    assert Words.of(Tokenizer(WordLevel({"a": 0}, unk_token="a"))) is None


@example("a", "À", "")
@example("\t\n", "\nx", "'s")
@given(TEXTS, TEXTS, TEXTS)
def test_borders_have_the_ids_before_them_or_are_left_to_the_tokenizer(
    first: str, second: str, third: str
) -> None:
    """White space is split by what follows it, and a quotation mark may begin a contraction."""
    text = first + second + third
    borders = sorted({len(first), len(first + second)})
    for backend, known in KNOWN:
        encoding = backend.encode(text, add_special_tokens=False)
        cut = known.cut_ids(text, borders)
        alone = [backend.encode(text[:border], add_special_tokens=False).ids for border in borders]
        if cut is not None:
            ids, tokens = cut
            assert ids == encoding.ids
            assert [ids[: tokens[border]] for border in borders] == alone
