"""Pipeline: an opened bundle that turns prompts into text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dgcompile.bundle import Bundle
from dgcompile.errors import RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.progress import Progress
from dgcompile.runtime.chat import ChatTemplate
from dgcompile.runtime.loop import GenerationResult, StepEvent, generate
from dgcompile.runtime.session import Session
from dgcompile.runtime.tokenizer import Tokenizer


class Pipeline:
    """A bundle, its session, and its tokenizer and chat template where it has them.

    Attributes:
        bundle: the opened bundle; ``bundle.generation`` holds the checkpoint's defaults.
        session: the loaded engines.
        tokenizer: None where the checkpoint had none; then only token ids go in and out.
        chat_template: None where the checkpoint had none; then only plain text goes in.
    """

    def __init__(
        self, bundle: Bundle, session: Session, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None
    ) -> None:
        self.bundle = bundle
        self.session = session
        self.tokenizer = tokenizer
        self.chat_template = chat_template

    @classmethod
    def open(cls, path: str | Path, threads: int | None = None, *, progress: Progress | None = None) -> Pipeline:
        """Opens and loads a bundle.

        Args:
            path: the bundle's folder.
            threads: threads of each engine call; None leaves the choice to the engine. A GPU does not need it.
            progress: told how far checking the files and loading the weights got.

        Raises:
            BundleError: the bundle is missing, damaged, or not for this machine.
            MissingDependencyError: the library that runs it is not installed.
            EngineError: the engine cannot load it, or the memory of the GPU does not suffice.
            RequestError: ``threads`` is below 1.
        """
        bundle = Bundle.open(path, progress=progress)
        tokenizer_file, template_file = bundle.tokenizer_file, bundle.chat_template_file
        tokenizer = Tokenizer(tokenizer_file) if tokenizer_file else None
        template = ChatTemplate.from_file(template_file) if template_file else None
        return cls(bundle, _open_session(bundle, threads, progress), tokenizer, template)

    def encode(self, prompt: str | Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: plain text, which is tokenized as it is (with the special tokens that the tokenizer adds by itself),
                or chat messages, which the chat template renders with the assistant's turn opened.
            **variables: further variables of the chat template, such as ``enable_thinking``.

        Raises:
            RequestError: no tokenizer or chat template, malformed messages, or a prompt without any token.
        """
        tokenizer = self._need_tokenizer()
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        else:
            # The template spells out the special tokens itself.
            ids = tokenizer.encode(self.render(prompt, **variables), add_special_tokens=False)
        if not ids:
            raise RequestError("the prompt is empty", expected="text that gives at least one token")
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text that the chat template makes of ``messages``.

        Raises:
            RequestError: no chat template, or malformed messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "the bundle has no chat template", expected="plain text", fix="give the prompt as plain text"
            )
        return self.chat_template.render(messages, **{**self._special_tokens(self.chat_template), **variables})

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig | None = None,
        seeds: Sequence[int] | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
    ) -> list[GenerationResult]:
        """Generates an answer to each prompt; see :func:`dgcompile.runtime.loop.generate`.

        Args:
            prompts: token ids.
            config: None for the checkpoint's defaults.
            seeds: None for 0, 1, 2 ...
            on_step: called after each denoising step.
        """
        return generate(
            self.session,
            prompts,
            self.bundle.generation if config is None else config,
            range(len(prompts)) if seeds is None else seeds,
            on_step,
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of generated tokens.

        Raises:
            RequestError: the bundle has no tokenizer.
        """
        return self._need_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "the bundle has no tokenizer.json",
                expected="token ids instead of text",
                fix="build from a checkpoint that has one",
            )
        return self.tokenizer

    def _special_tokens(self, template: ChatTemplate) -> dict[str, str]:
        """The variables bos_token, eos_token and pad_token, from the ids in generation_config.json.

        A template that uses one which is unknown is refused: jinja would render nothing in its place.
        """
        generation, tokenizer = self.bundle.generation, self._need_tokenizer()
        eos = generation.eos_token_ids[0] if generation.eos_token_ids else None
        ids = {"bos_token": generation.bos_token_id, "eos_token": eos, "pad_token": generation.pad_token_id}
        tokens = {name: text for name, token_id in ids.items() if (text := tokenizer.token(token_id)) is not None}
        for name in ids:
            if name in template.variables and name not in tokens:
                raise RequestError(
                    f"the chat template uses {name}, which generation_config.json does not give",
                    expected=f"{name}_id in generation_config.json",
                    fix="complete the checkpoint and build again, or give the prompt as plain text",
                )
        return tokens


def _open_session(bundle: Bundle, threads: int | None, progress: Progress | None) -> Session:
    """Loads a bundle's engines with what its target needs; nothing else is imported."""
    if bundle.target.backend == "onnxruntime":
        from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession

        return OnnxRuntimeSession.open(bundle, threads)
    from dgcompile.runtime.tensorrt_session import TensorRTSession

    return TensorRTSession.open(bundle, progress)
