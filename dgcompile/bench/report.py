"""What came out of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from dgcompile.bench.floor import Floor
from dgcompile.bench.job import Contender, Settings
from dgcompile.bench.machine import Machine, Memory
from dgcompile.bench.stamps import Run
from dgcompile.bench.turns import Figure
from dgcompile.bench.variant import Probe


class Load(BaseModel):
    """One start of a contender's process, in seconds.

    Attributes:
        import_seconds: from the process's first line to its libraries being imported.
        open_seconds: from there to being ready to generate.
        first_step_seconds: the first ``generate`` then: a short prompt and one denoising step.
        whole_seconds: all of it, with the start of the interpreter, as the process that asked saw it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    import_seconds: float
    open_seconds: float
    first_step_seconds: float
    whole_seconds: float


class ContenderReport(BaseModel):
    """The figures of one contender. Ratios are to the first contender: above 1 is more seconds, bytes or tokens.

    Attributes:
        label: "A", "B", ...
        name, kind, title: see :class:`~dgcompile.bench.job.Contender`.
        step_seconds: by past, the denoising step at batch 1 with its sampler and loop; each sample is the median of a
            turn's first canvas.
        above_floor: by past, the median step in floors of this machine; empty for a GPU.
        encoder_seconds: of the prompt.
        encoder_seconds_per_token: of the prompt.
        generate_seconds: end to end.
        tokens_per_second: end to end.
        import_seconds, open_seconds, first_step_seconds, load_seconds: see :class:`Load`.
        memory: of an end-to-end ``generate``, run once more for it with fewer steps.
        memory_ratio: of its peak, to that of the first contender.
        has_torch: whether torch was loaded in its process.
        turns: by turn and task, the raw times.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    name: str
    kind: str
    title: str
    step_seconds: dict[int, Figure]
    above_floor: dict[int, float]
    encoder_seconds: Figure
    encoder_seconds_per_token: Figure
    generate_seconds: Figure
    tokens_per_second: Figure
    import_seconds: Figure
    open_seconds: Figure
    first_step_seconds: Figure
    load_seconds: Figure
    memory: Memory
    memory_ratio: float | None
    has_torch: bool
    turns: tuple[tuple[Run, ...], ...]


class BenchReport(BaseModel):
    """All of it.

    Attributes:
        machine: this one.
        settings: what was measured.
        contenders: in the order of their turns.
        probes: what trying the variants of transformers gave.
        floor: of this machine; None where nobody ran on its CPU.
        others_processors: processors that other programs kept busy during the turns; None where that is not known.
        warnings: what makes the figures doubtful.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: Machine
    settings: Settings
    contenders: tuple[ContenderReport, ...]
    probes: tuple[Probe, ...]
    floor: Floor | None
    others_processors: float | None
    warnings: tuple[str, ...]


class Measured(BaseModel):
    """The raw times of one contender.

    Attributes:
        loads: one for each start of its process.
        turns: by turn, a run for each task.
        memory: of one ``generate``.
        has_torch: whether torch was loaded then.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    loads: tuple[Load, ...]
    turns: tuple[tuple[Run, ...], ...]
    memory: Memory
    has_torch: bool


def contender_reports(
    contenders: Sequence[Contender], measured: Sequence[Measured], settings: Settings, floor: Floor | None
) -> tuple[ContenderReport, ...]:
    """The figures of each contender from the raw times."""
    samples = [_samples(one, settings) for one in measured]
    return tuple(
        _report(index, contenders, measured, settings, floor, samples[index], samples[0])
        for index in range(len(contenders))
    )


def _report(
    index: int,
    contenders: Sequence[Contender],
    measured: Sequence[Measured],
    settings: Settings,
    floor: Floor | None,
    samples: Mapping[str, list[float]],
    first: Mapping[str, list[float]],
) -> ContenderReport:
    contender, mine = contenders[index], measured[index]
    alone = len(contenders) == 1
    figures = {name: Figure.of(samples[name], None if alone else first[name]) for name in samples}
    steps = {past: figures.pop(_step_name(past)) for past in settings.pasts}
    on_cpu = floor if contender.on_cpu else None
    peak, first_peak = mine.memory.peak_rss, measured[0].memory.peak_rss
    return ContenderReport(
        label=label_of(index),
        name=contender.name,
        kind=contender.kind,
        title=contender.title,
        step_seconds=steps,
        above_floor={past: step.median / on_cpu.seconds(past) for past, step in steps.items()} if on_cpu else {},
        memory=mine.memory,
        memory_ratio=peak / first_peak if peak and first_peak and not alone else None,
        has_torch=mine.has_torch,
        turns=mine.turns,
        **figures,
    )


def _samples(measured: Measured, settings: Settings) -> dict[str, list[float]]:
    """By figure, one sample a turn (or a load)."""
    whole = [turn[0] for turn in measured.turns]  # the end-to-end task comes first
    found = {
        "encoder_seconds": [run.prompt_seconds for run in whole],
        "encoder_seconds_per_token": [run.prompt_seconds / settings.prompt_tokens for run in whole],
        "generate_seconds": [run.seconds for run in whole],
        "tokens_per_second": [run.tokens / run.seconds for run in whole],
        "import_seconds": [load.import_seconds for load in measured.loads],
        "open_seconds": [load.open_seconds for load in measured.loads],
        "first_step_seconds": [load.first_step_seconds for load in measured.loads],
        "load_seconds": [load.whole_seconds for load in measured.loads],
    }
    others = [past for past in settings.pasts if past != settings.prompt_tokens]
    for past in settings.pasts:
        task = 0 if past == settings.prompt_tokens else 1 + others.index(past)
        found[_step_name(past)] = [turn[task].first_canvas_step for turn in measured.turns]
    return found


def _step_name(past: int) -> str:
    return f"step at past {past}"


def label_of(index: int) -> str:
    """A, B, ..., Z, A2, B2, ..."""
    letter = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[index % 26]
    return letter if index < 26 else f"{letter}{index // 26 + 1}"
