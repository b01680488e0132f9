"""The example's tokenizer: a real byte-pair encoding over readable text, and the chat template.

A grid of six lines is always 36 tokens: the merge of a cell with the line end after it gives the last cell of a line
a token of its own ("4\\n"), so a token position *is* a cell position.
"""

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, EOS, BOS, BLANK, FIRST_DIGIT, NEWLINE = 0, 1, 2, 3, 4, 10
LINE_END_OFFSET = 8  # "." 3 -> ".\n" 11, "1" 4 -> "1\n" 12, ...
FIRST_NAME, SEPARATOR, UNKNOWN = 18, 54, 55
IMAGE, IMAGE_BEGIN, IMAGE_END = 61, 62, 63
VOCAB_SIZE = 64

ROWS, COLUMNS = "abcdef", "123456"
CELL_NAMES = [f"<{row}{column}>" for row in ROWS for column in COLUMNS]
MARKS = [".", *COLUMNS]

CHAT_TEMPLATE = r"""{#- One user message with a 6x6 grid; blanks are ".", "0" or "_"; white space is free. -#}
{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}
    {{- raise_exception('this model answers one user message that holds one 6x6 sudoku; got '
                        ~ (messages | length) ~ ' message(s)') -}}
{%- endif -%}
{%- set ns = namespace(text='', grid='') -%}
{%- if messages[0]['content'] is string -%}
    {%- set ns.text = messages[0]['content'] -%}
{%- else -%}
    {%- for part in messages[0]['content'] -%}
        {%- if part['type'] != 'text' -%}
            {{- raise_exception('only text parts are understood; got a part of type ' ~ part['type']) -}}
        {%- endif -%}
        {%- set ns.text = ns.text ~ part['text'] -%}
    {%- endfor -%}
{%- endif -%}
{%- set cells = ns.text | replace(' ', '') | replace('\t', '') | replace('\r', '') | replace('\n', '')
                        | replace('0', '.') | replace('_', '.') -%}
{%- for cell in cells -%}
    {%- if cell not in '.123456' -%}
        {{- raise_exception('a cell is a digit 1-6, or ".", "0" or "_" for a blank; got "' ~ cell ~ '"') -}}
    {%- endif -%}
    {%- set ns.grid = ns.grid ~ cell ~ ('\n' if loop.index % 6 == 0 and loop.index < 36 else '') -%}
{%- endfor -%}
{%- if cells | length != 36 -%}
    {{- raise_exception('a grid has 36 cells (6 lines of 6); got ' ~ (cells | length)) -}}
{%- endif -%}
{{- '<bos>' -}}
{%- for row in 'abcdef' -%}{%- for column in '123456' -%}{{- '<' ~ row ~ column ~ '>' -}}{%- endfor -%}{%- endfor -%}
{{- ns.grid ~ '<sep>' -}}
"""


def vocabulary() -> dict[str, int]:
    """All 64 token spellings with their ids."""
    spellings = ["<pad>", "<eos>", "<bos>", *MARKS, "\n", *[mark + "\n" for mark in MARKS], *CELL_NAMES]
    spellings += ["<sep>", "<unk>"]
    spellings += [f"<unused{i}>" for i in range(IMAGE - len(spellings))]
    spellings += ["<image>", "<image_begin>", "<image_end>"]
    return {spelling: index for index, spelling in enumerate(spellings)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template. It adds no special tokens by itself: the template lays out everything."""
    vocab = vocabulary()
    backend = Tokenizer(BPE(vocab=vocab, merges=[(mark, "\n") for mark in MARKS], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()  # without one, decoding would put spaces between the cells
    special = [spelling for spelling in vocab if spelling.startswith("<")]
    backend.add_special_tokens([AddedToken(spelling, special=True, normalized=False) for spelling in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )
