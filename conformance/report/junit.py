"""The run as JUnit XML: one case per clause, one suite per profile."""

from __future__ import annotations

import re
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold; a candidate's message may contain any."""


def render_junit(document: dict[str, Any]) -> str:
    """XML text. Unsupported, not-applicable, not-run and expected-fail are *skipped*; what the
    suite itself got wrong is an *error*."""
    xml = JUnitXml(f"checkpoint-conformance {document['candidate']['name']}")
    suites: dict[str, TestSuite] = {}
    for result in document["results"]:
        profile = result["profile"]
        if profile not in suites:
            suites[profile] = TestSuite(profile)
        case = TestCase(result["clause"], classname=profile, time=result["seconds"])
        outcome = _outcome(result)
        if outcome is not None:
            case.result = [outcome]
        suites[profile].add_testcase(case)
    for suite in suites.values():
        xml.add_testsuite(suite)
    xml.update_statistics()
    return str(xml.tostring().decode("utf-8"))


def _outcome(result: dict[str, Any]) -> Any:
    verdict, message = result["verdict"], _ILLEGAL.sub("�", result["message"])
    if verdict == "pass":
        return None
    if verdict in ("error", "inconclusive"):
        return Error(message, verdict)
    if verdict in ("fail", "crash", "timeout", "unexpected-pass"):
        return Failure(message, verdict)
    return Skipped(f"{verdict}: {message}", verdict)
