"""Models, health, readiness and metrics."""

from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dgcompile.serving.openai.front import Front
from dgcompile.serving.openai.server import Server, bind, url
from dgcompile.serving.statistics import METRICS
from tests.serving.openai.helpers import CHAT, MODEL, Served, serving


def samples(served_url: str) -> dict[str, float]:
    """The metrics by the names of their samples."""
    response = httpx.get(f"{served_url}/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_models(served: Served) -> None:
    client = served.client()
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model


def test_a_name_with_slashes(bundle: Path) -> None:
    name = "google/diffusiongemma-26B-A4B-it"
    with serving(bundle, rows=1, model_name=name) as served:
        assert served.client().models.retrieve(name).id == name


def test_until_the_model_is_loaded_the_server_is_live_but_not_ready() -> None:
    listener = bind("127.0.0.1", 0)
    base = url(listener)
    with Server(Front(MODEL), listener):
        assert httpx.get(f"{base}/health").status_code == 200
        for response in (
            httpx.get(f"{base}/ready"),
            httpx.post(f"{base}/v1/chat/completions", json={"model": MODEL, "messages": CHAT}),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "loading"
            assert float(response.headers["retry-after"]) > 0
        assert httpx.get(f"{base}/v1/models").status_code == 200
        assert samples(base)["process_resident_memory_bytes"] > 0


def test_loaded_is_ready(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/ready").json() == {"status": "ready"}


def test_metrics_are_the_services_counts(served: Served) -> None:
    before = samples(served.url)
    answer = served.client().chat.completions.create(model=MODEL, messages=CHAT, seed=1)  # type: ignore[arg-type]
    after = samples(served.url)
    assert answer.usage is not None
    grown = {name: after[name] - value for name, value in before.items()}
    assert grown["dgcompile_requests_finished_total"] == 1
    assert grown["dgcompile_output_tokens_total"] == answer.usage.completion_tokens
    assert grown["dgcompile_first_canvas_seconds_count"] == 1
    assert grown["dgcompile_first_canvas_seconds_sum"] > 0
    assert after["dgcompile_rows"] == 4


def test_every_metric_is_there_by_its_name_and_kind(served: Served) -> None:
    text = httpx.get(f"{served.url}/metrics").text
    found = {name: family.type for family in text_string_to_metric_families(text) for name in _names(family)}
    for metric in METRICS:
        if metric.name.endswith(("_sum", "_count")):
            assert found[metric.name] == "summary"
        elif metric.kind == "counter":
            assert found[f"{metric.name}_total"] == "counter"
        else:
            assert found[metric.name] == "gauge"


def _names(family: object) -> list[str]:
    return [sample.name for sample in family.samples]  # type: ignore[attr-defined]
