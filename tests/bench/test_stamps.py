"""What the calls of encoder and denoiser say."""

from __future__ import annotations

from dgcompile.bench.stamps import Event, canvases_of, run_of

# A prompt in two chunks, a canvas of three steps, its commit, a canvas of two steps.
EVENTS = [
    Event("encode", 1.0),
    Event("encoded", 2.0),
    Event("encode", 2.5),
    Event("encoded", 4.5),
    Event("denoise", 5.0),
    Event("denoise", 6.0),
    Event("denoise", 8.0),
    Event("encode", 20.0),
    Event("encoded", 20.25),
    Event("denoise", 30.0),
    Event("denoise", 31.5),
]


def test_a_run_in_full() -> None:
    run = run_of(EVENTS, 40.0, 12)
    assert run.prompt_seconds == 1.0 + 2.0
    assert run.commit_seconds == (0.25,)
    # The last step of a canvas has no next one.
    assert run.step_seconds == ((1.0, 2.0), (1.5,))
    assert run.steps_per_canvas == [3, 2]
    assert run.first_canvas_step == 1.5
    assert (run.seconds, run.tokens) == (40.0, 12)


def test_a_canvas_that_is_under_way() -> None:
    assert canvases_of(EVENTS[:5]) == [()]
    assert canvases_of(EVENTS[:6]) == [(1.0,)]
    assert canvases_of(EVENTS[:2]) == []
