"""The tokenizer gives what transformers' gives for the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dgcompile.errors import BundleError, RequestError
from dgcompile.runtime.tokenizer import Tokenizer


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(text=st.text(max_size=30) | st.sampled_from(["<bos>", "a<eos>b", "<pad><bos>x"]))
def test_like_transformers(checkpoint: Path, text: str) -> None:
    ours, theirs = Tokenizer(checkpoint / "tokenizer.json"), _theirs(checkpoint)
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
            ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
        )


def _theirs(checkpoint: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))  # type: ignore[no-untyped-call]


def test_a_file_that_pads_and_truncates_is_not_obeyed(checkpoint: Path, tmp_path: Path) -> None:
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    plain = Tokenizer(checkpoint / "tokenizer.json").encode("some words")
    assert len(plain) > 2
    assert Tokenizer(tmp_path / "tokenizer.json").encode("some words") == plain


def test_names_of_tokens(checkpoint: Path) -> None:
    tokenizer = Tokenizer(checkpoint / "tokenizer.json")
    (bos,) = tokenizer.encode("<bos>", add_special_tokens=False)
    assert tokenizer.token(bos) == "<bos>"
    assert tokenizer.token(None) is None
    assert tokenizer.token(10**6) is None


def test_ids_that_do_not_exist_give_nothing(checkpoint: Path) -> None:
    assert Tokenizer(checkpoint / "tokenizer.json").decode([10**6]) == ""


def test_text_that_is_no_unicode(checkpoint: Path) -> None:
    with pytest.raises(RequestError, match=r"character 2 is '\\udcff'"):
        Tokenizer(checkpoint / "tokenizer.json").encode("ab\udcff")


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe"])
def test_unusable_files(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BundleError, match=r"tokenizer.json cannot be read"):
        Tokenizer(path)
