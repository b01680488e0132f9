"""Inputs and outputs of the model in Triton's terms: one table for the configuration, its check and the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """One input or output.

    Attributes:
        name: in capitals, as in all of Triton's own examples.
        data_type: Triton's. Integers and numbers are wide enough that Triton wraps and rounds none.
        dims: -1 is any number of elements.
        help: one sentence.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]
    help: str


INPUTS = (
    Tensor("TEXT", "TYPE_STRING", (1,), "A user's message; the chat template makes the prompt."),
    Tensor("MESSAGES", "TYPE_STRING", (1,), "A chat as a JSON list of objects with role and content."),
    Tensor("PROMPT", "TYPE_STRING", (1,), "Plain text, given to the model as it is."),
    Tensor("INPUT_IDS", "TYPE_INT64", (-1,), "Token ids, given to the model as they are."),
    Tensor("MAX_TOKENS", "TYPE_INT64", (1,), "Tokens to generate at most."),
    Tensor("SEED", "TYPE_UINT64", (1,), "The same seed gives the same text; without one, one is drawn."),
    Tensor("T_MIN", "TYPE_FP64", (1,), "Temperature of the last denoising step."),
    Tensor("T_MAX", "TYPE_FP64", (1,), "Temperature of the first denoising step."),
    Tensor("ENTROPY_BOUND", "TYPE_FP64", (1,), "Entropy, in nats, of the tokens accepted in one step together."),
    Tensor("MAX_DENOISING_STEPS", "TYPE_INT64", (1,), "Denoising steps per canvas at most."),
    Tensor("STOP", "TYPE_STRING", (-1,), "The text ends before the first of these strings."),
    Tensor("STREAM", "TYPE_BOOL", (1,), "A response for each canvas, in place of one for all."),
)
"""All are optional for Triton; the model wants exactly one of the first four."""

OUTPUTS = (
    Tensor("TEXT", "TYPE_STRING", (1,), "What this response adds to the text."),
    Tensor("TOKEN_IDS", "TYPE_INT64", (-1,), "What this response adds to the token ids."),
    Tensor("FINISH_REASON", "TYPE_STRING", (1,), "eos, length or stop. This and what follows: in the last response."),
    Tensor("PROMPT_TOKENS", "TYPE_INT64", (1,), "Tokens read."),
    Tensor("OUTPUT_TOKENS", "TYPE_INT64", (1,), "Tokens generated."),
    Tensor("DENOISING_STEPS", "TYPE_INT64", (1,), "Denoising steps, over all canvases."),
    Tensor("QUEUE_MS", "TYPE_FP64", (1,), "Milliseconds until the request got a row of the batch."),
    Tensor("FIRST_CANVAS_MS", "TYPE_FP64", (1,), "Milliseconds until the first canvas."),
    Tensor("TOTAL_MS", "TYPE_FP64", (1,), "Milliseconds until the end."),
    Tensor("SEED", "TYPE_UINT64", (1,), "The seed given or drawn."),
)
