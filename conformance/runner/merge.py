"""Joins the documents of all shards of a run into the document of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.errors import UsageError
from conformance.runner.verdicts import conclude, summarise
from conformance.specification import Specification

_ALIKE = ("schema_version", "suite", "spec", "candidate", "environment")
_SETTINGS = ("budget", "seed", "level", "expectations", "clauses", "profiles", "time_limit")


def merge_documents(
    documents: Sequence[dict[str, Any]], specification: Specification
) -> dict[str, Any]:
    """One document with the results of every shard, in the order of the specification.

    Raises UsageError for shards that are missing, doubled, incomplete or of unlike runs.
    """
    if not documents:
        raise UsageError("nothing to merge")
    first = documents[0]
    shards: dict[int, dict[str, Any]] = {}
    for document in documents:
        for key in _ALIKE:
            if document[key] != first[key]:
                raise UsageError(f"unlike runs: {key} is {first[key]} and {document[key]}")
        for key in _SETTINGS:
            one, other = first["settings"].get(key), document["settings"].get(key)
            if one != other:
                raise UsageError(f"unlike runs: {key} is {one} and {other}")
        text = document["settings"]["shard"]
        if text is None:
            raise UsageError("one of the runs is no shard")
        index, count = (int(part) for part in text.split("/"))
        if count != int(first["settings"]["shard"].split("/")[1]):
            raise UsageError(f"unlike runs: shard {first['settings']['shard']} and {text}")
        if index in shards:
            raise UsageError(f"shard {text} is there twice")
        if not document["complete"]:
            raise UsageError(f"shard {text} is not complete")
        shards[index] = document
    missing = [f"{i}/{count}" for i in range(1, count + 1) if i not in shards]
    if missing:
        raise UsageError(f"shard {', '.join(missing)} is missing")
    order = {clause.id: place for place, clause in enumerate(specification.clauses)}
    results = [result for document in shards.values() for result in document["results"]]
    results.sort(key=lambda result: order.get(result["clause"], len(order)))
    names = [result["clause"] for result in results]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{name} has a result in more than one shard")
    declared = first["candidate"]["capabilities"]["declared"]
    verdict, code = conclude(
        results, level=first["settings"].get("level", "must"), declared=declared
    )
    return first | {
        "settings": first["settings"] | {"shard": None},
        "started": min(document["started"] for document in documents),
        "finished": max(document["finished"] for document in documents),
        "complete": True,
        "summary": summarise(results) | {"verdict": verdict, "exit_code": code},
        "results": results,
    }
