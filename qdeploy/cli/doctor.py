"""`qdeploy doctor`: what can this machine run, and why?"""

from __future__ import annotations

import dataclasses

from rich.table import Table

from qdeploy.cli.console import print_json, run, stdout
from qdeploy.cli.options import Json

_STYLES = {"ok": "green", "warn": "yellow", "missing": "red"}


def doctor(as_json: Json = False) -> None:
    """Check this machine and say which backends it can run, and why."""

    def body() -> None:
        from qdeploy.doctor import diagnose

        findings = diagnose()
        if as_json:
            print_json({"findings": [dataclasses.asdict(finding) for finding in findings]})
            return
        table = Table("check", "status", "detail", "next step")
        for finding in findings:
            status = f"[{_STYLES[finding.status]}]{finding.status}"
            table.add_row(finding.name, status, finding.detail, finding.next_step)
        stdout.print(table)

    run(body)
