"""All records of a run: the JSON file, the tables for people, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dgcompile.files import write_atomically

FORMAT_VERSION = 1

_LISTS = {"check": "checks", "timing": "timings", "info": "info", "skipped": "skipped", "error": "errors"}


class Results:
    """What the parts reported so far.

    Args:
        settings: what the run was asked for; goes into the file.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.device: dict[str, Any] = {}
        self.records: dict[str, list[dict[str, Any]]] = {name: [] for name in _LISTS.values()}

    def add(self, record: dict[str, Any], part: str) -> None:
        """Take in one record of a part."""
        fields = {key: value for key, value in record.items() if key != "kind"}
        if record["kind"] == "device":
            self.device = {key: value for key, value in fields.items() if key != "name"}
        else:
            self.records[_LISTS[record["kind"]]].append({"part": part, **fields})

    @property
    def failures(self) -> list[str]:
        """Why the run did not pass: failed checks, crashed parts, numeric parts that did not finish."""
        missed = self._list("check", passed=False)
        failed = [f"{check['name']}: {check['error']}, the bound is {check['bound']}" for check in missed]
        failed += [f"{error['part']}: {error['message']}" for error in self.records["errors"]]
        failed += [f"{skipped['part']}: {skipped['reason']}" for skipped in self._list("skipped", numeric=True)]
        if not self.records["checks"]:
            failed.append("no numeric check ran")
        return failed

    def _list(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        return [
            record
            for record in self.records[_LISTS[kind]]
            if all(record.get(key) == value for key, value in wanted.items())
        ]

    def write(self, path: Path) -> None:
        """Write the JSON file; called after each part, so that an interrupted run leaves what it had."""
        content = {
            "format_version": FORMAT_VERSION,
            "passed": not self.failures,
            "settings": self.settings,
            "device": self.device,
            **self.records,
        }
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())

    def tables(self) -> str:
        """What a person reads."""
        lines = ["", "numeric checks", *_table(self._check_rows(), left=1)]
        if self.records["timings"]:
            lines += ["", "timings (median)", *_table(self._timing_rows(), left=1)]
        for record in self.records["info"]:
            text = record.get("how", "")
            if "estimated_tokens_per_s" in record:
                text = f"{record['estimated_tokens_per_s']:.0f} tokens/s, an ESTIMATE: {text}"
            lines.append(f"{record['name']}: {text}")
        if self.records["skipped"]:
            lines += ["", "left out"]
            lines += [f"  {record['name']}: {record['reason']}" for record in self.records["skipped"]]
        if self.failures:
            lines += ["", f"FAILED ({len(self.failures)})"]
            lines += [f"  {failure}" for failure in self.failures]
        return "\n".join(lines)

    def _check_rows(self) -> list[list[str]]:
        rows = [["part", "checks", "failed", "worst error / bound", "of"]]
        for part in dict.fromkeys(check["part"] for check in self.records["checks"]):
            checks = self._list("check", part=part)
            bounded = [check for check in checks if check["bound"] and check["error"] is not None]
            worst = max(bounded, key=lambda check: check["error"] / check["bound"], default=None)
            failed = sum(not check["passed"] for check in checks)
            share, name = (f"{worst['error'] / worst['bound']:.2f}", worst["name"]) if worst else ("-", "-")
            rows.append([part, str(len(checks)), str(failed), share, name])
        return rows

    def _timing_rows(self) -> list[list[str]]:
        rows = [["what", "ms", "floor ms", "of floor", "GB/s", "TFLOPS"]]
        for record in self.records["timings"]:
            rows.append(
                [
                    record["name"],
                    f"{record['ms']:.3f}",
                    f"{record['floor_ms']:.3f}",
                    f"{record['share_of_floor']:.0%}",
                    f"{record['bytes_per_s'] / 1e9:.0f}",
                    f"{record['flops_per_s'] / 1e12:.1f}",
                ]
            )
        return rows


def _table(rows: list[list[str]], left: int) -> list[str]:
    """Rows as aligned text, the first ``left`` columns and the last of text to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = {column for column in range(len(widths)) if column < left or rows[0][column] == "of"}
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column in text else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
