"""A pipeline over the toy model. Its numbers are integers: nothing rounds, whatever shares a step with an answer."""

from __future__ import annotations

import string
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dgcompile.bundle import Bundle, Manifest, StageRecord, stages_of
from dgcompile.recipe import Recipe
from dgcompile.runtime.chat import ChatTemplate
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.runtime.tokenizer import Tokenizer
from dgcompile.target import Target
from tests.runtime.test_loop import CONFIG
from tests.runtime.toy_model import VOCAB, toy_spec, write_toy_graphs

MAX_CONTEXT = 128

TOKENS = ("<pad>", "<eos>", "<unk>", " ", "\n", "Ä", *string.ascii_lowercase)

TEMPLATE = """{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user'] -%}{{- raise_exception('unknown role') -}}{%- endif -%}
    {{- message['role'] ~ '\\n' ~ message['content'] ~ '\\n' -}}
{%- endfor -%}"""


def toy_pipeline(folder: Path) -> Pipeline:
    """Writes what a bulk run reads of a bundle, and loads it: one character is one token."""
    assert len(TOKENS) == VOCAB
    letters = tokenizers.Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="<unk>")
    )
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens(list(TOKENS[:3]))
    letters.save(str(folder / "tokenizer.json"))

    target = Target.load("cpu")
    recipe = Recipe.load("fp32").for_target(target)
    manifest = Manifest(
        dgcompile_version="0",
        checkpoint="toy",
        spec=toy_spec(),
        target=target,
        recipe=recipe,
        max_context=MAX_CONTEXT,
        stages={stage: StageRecord() for stage in stages_of(target, recipe)},
    )
    manifest.write(folder)
    write_toy_graphs(folder)
    return Pipeline(
        Bundle(folder, manifest, CONFIG.replace(eos_token_ids=(1,))),
        OnnxRuntimeSession(folder, toy_spec(), MAX_CONTEXT, threads=1),
        Tokenizer(folder / "tokenizer.json"),
        ChatTemplate(TEMPLATE),
    )
