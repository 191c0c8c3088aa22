"""The failing script: one file that imports torch and the candidate, runs the program plainly and
checkpointed, prints both and exits 1 where they differ."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from conformance.programs.compare import Difference
from conformance.programs.language import Language
from conformance.programs.model import Program
from conformance.programs.prelude import DEFINITIONS
from conformance.programs.render import Cut, Rendered, noted, render

_PLAIN = {
    "GraphExecGroup": "contextlib.nullcontext",
    "set_checkpoint_early_stop": "lambda enable: contextlib.nullcontext()",
    "set_checkpoint_debug_enabled": "lambda enabled: contextlib.nullcontext()",
    "CheckpointPolicy": "None",
    "create_selective_checkpoint_contexts": "None",
    "checkpoint_sequential": "lambda functions, segments, input, **options: "
    "torch.nn.Sequential(*functions)(input)",
}


@dataclass(frozen=True)
class Failure:
    """A program on which a candidate does not do what the plain run does."""

    program: Program
    difference: Difference
    candidate: str
    language: Language
    trace: str = ""


def script_source(failure: Failure) -> str:
    """The text of the script."""
    difference = failure.difference
    cut = _cut(failure)
    rendered = render(failure.program, cut)
    imports = {"torch"}
    for word in ("contextlib", "dataclasses", "functools"):
        text = rendered.source + "".join(DEFINITIONS[name] for name in rendered.definitions)
        if f"{word}." in text:
            imports.add(word)
    names = rendered.names or ("checkpoint",)
    others = [name for name in names if name != "checkpoint"]
    if any("contextlib" in _PLAIN[name] for name in others):
        imports.add("contextlib")
    head = [f'"""{_title(failure)}"""', ""]
    lines_of_candidate = import_lines(failure.candidate, names)
    if "import sys" in lines_of_candidate:
        lines_of_candidate.remove("import sys")
        imports.add("sys")
    more = _IMPORTS.get(difference.kind, [])
    imports.update(line.split()[1] for line in more if line.startswith("import"))
    head += [f"import {name}" for name in sorted(imports)]
    head += [line for line in more if line.startswith("from")]
    head += ["", *lines_of_candidate]
    for name in rendered.definitions:
        head += ["", DEFINITIONS[name].rstrip()]
    body = ["", "", rendered.source.rstrip()]
    plain = ["", ""]
    if "checkpoint" in names:
        plain.append(_plain(rendered))
    arguments = ["checkpoint=plain", *(f"{name}={_PLAIN[name]}" for name in others)]
    real = [f"{name}={name}" for name in names]
    if "checkpoint" not in names:
        arguments = arguments[1:]
    lines = head + body + plain
    if difference.kind == "exception":
        lines += _exception_ending(arguments, real)
    elif difference.kind in _ENDINGS:
        lines += _filled(difference, real, arguments)
    else:
        lines += _value_ending(arguments, real)
    return "\n".join(lines) + "\n"


def import_lines(candidate: str, names: tuple[str, ...]) -> list[str]:
    """The lines that import ``names`` from a candidate spelled as on the command line."""
    target, _, attribute = candidate.partition(":")
    if not target.endswith(".py") and "/" not in target:
        if not attribute:
            return [f"from {target} import {', '.join(names)}"]
        lines = [f"import {target} as module"]
    else:
        path = Path(target).resolve()
        lines = [
            "import sys",
            f"sys.path.insert(0, {str(path.parent)!r})",
        ]
        if not attribute:
            return [*lines, f"from {path.stem} import {', '.join(names)}"]
        lines.append(f"import {path.stem} as module")
    holder = f"module.{attribute}"
    if names == ("checkpoint",):
        return [*lines, f'checkpoint = getattr({holder}, "checkpoint", {holder})']
    return [*lines, *(f"{name} = {holder}.{name}" for name in names)]


def write_script(failure: Failure, path: Path) -> Path:
    """Write the script to ``path`` and give the path back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script_source(failure), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Reproduction:
    """What a fresh process made of a script."""

    reproduced: bool
    output: str


def reproduce(path: Path, *, timeout: float = 120) -> Reproduction:
    """Run the script in a fresh process. It reproduces where it prints both sides and exits 1.

    A candidate beside the working directory is importable there as it is here.
    """
    search = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "PYTHONPATH": search},
        )
    except subprocess.TimeoutExpired:
        return Reproduction(False, f"no end after {timeout:g} s")
    output = (done.stdout + done.stderr).strip()
    return Reproduction(done.returncode == 1 and "observed" in done.stdout, output)


def _title(failure: Failure) -> str:
    text = str(failure.difference).replace("\\", "\\\\").replace('"""', "'''")
    return f"{failure.candidate} on torch {torch.__version__.split('+')[0]}: {text[:300]}"


def _cut(failure: Failure) -> Cut:
    difference = failure.difference
    if difference.kind == "state":
        return Cut(difference.name, _STATE.get(difference.path.strip(), "torch.get_rng_state()"))
    if difference.kind == "memory" and difference.name != "at the end":
        return Cut(difference.name, f"[{', '.join(noted(failure.program))}]")
    if difference.kind in ("exception", "runs", "warning", "memory", "operators") or (
        difference.name == "observations"
    ):
        return Cut("end", "None")
    expression = _expression(failure)
    if difference.kind == "structure":
        expression = f"repr({expression})"
    return Cut(
        difference.name,
        expression + difference.path
        if difference.kind != "structure"
        else f"str(type({_expression(failure)}{difference.path}))",
    )


_STATE = {
    "rng": "torch.get_rng_state()",
    "python_rng": "random.getstate()",
    "grad_enabled": "torch.is_grad_enabled()",
    "inference": "torch.is_inference_mode_enabled()",
    "default_dtype": "torch.get_default_dtype()",
    "default_device": "torch.get_default_device()",
    "autocast": 'torch.is_autocast_enabled("cpu")',
    "autocast_cache": "torch.is_autocast_cache_enabled()",
}


def _expression(failure: Failure) -> str:
    """The Python expression of the observation that differs."""
    name = failure.difference.name
    if name.startswith("output "):
        return noted(failure.program)[int(name.split()[1]) - 1]
    if name.startswith("hook on "):
        return "seen"
    return name


def _plain(rendered: Rendered) -> str:
    options = ["use_reentrant=None"]
    for name in (
        "preserve_rng_state",
        "context_fn",
        "determinism_check",
        "debug",
        "early_stop",
        "respect_saved_tensors_hooks",
    ):
        if f"{name}=" in rendered.source:
            options.append(f"{name}=None")
    text = f"def plain(function=None, *args, {', '.join(options)}, **kwargs):\n"
    if ")(region_" in rendered.source:
        text += "    if function is None:\n        return lambda function: function\n"
    return text + "    return function(*args, **kwargs)\n"


def _value_ending(arguments: list[str], real: list[str]) -> list[str]:
    return [
        "",
        f"expected = program({', '.join(arguments)})",
        f"observed = program({', '.join(real)})",
        'print("expected", expected)',
        'print("observed", observed)',
        "if isinstance(expected, torch.Tensor) and isinstance(observed, torch.Tensor):",
        "    raise SystemExit(int(not torch.equal(expected, observed)))",
        "raise SystemExit(int(expected is not observed and expected != observed))",
    ]


def _exception_ending(arguments: list[str], real: list[str]) -> list[str]:
    return [
        "",
        f"program({', '.join(arguments)})",
        'print("expected no exception")',
        "try:",
        f"    program({', '.join(real)})",
        "except Exception as error:",
        '    print(f"observed {type(error).__name__}: {error}")',
        "    raise SystemExit(1)",
    ]


_ENDINGS = {
    "runs": """
runs = 0


def counting(function, *args, **options):
    def counted(*args, **kwargs):
        global runs
        runs += function.__name__ == "NAME"
        return function(*args, **kwargs)

    return checkpoint(counted, *args, **options)


program(COUNTING)
print("expected EXPECTED runs of NAME, observed", runs)
raise SystemExit(int(not BOUNDS))
""",
    "warning": """
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    program(PLAIN)
    expected = len(seen)
    program(REAL)
print("expected no other warnings than the plain run's, observed", *seen[expected:])
raise SystemExit(int(len(seen) > 2 * expected))
""",
    "operators": """
runs, inside = [], False


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if inside and func is not torch.ops.aten.detach.default:
            runs[-1].append(str(func))
        return func(*args, **(kwargs or {}))


def counting(function, *args, **options):
    def logged(*args, **kwargs):
        global inside
        if inside := function.__name__ == "NAME":
            runs.append([])
        try:
            return function(*args, **kwargs)
        finally:
            inside = False

    return checkpoint(logged, *args, **options)


with Operators():
    program(COUNTING)
wanted = WANTED
print("expected recomputation to run no more than", wanted)
print("observed", *runs[1:])
raise SystemExit(int(any(run != wanted[: len(run)] for run in runs[1:])))
""",
    "memory": """
alive, known = {}, set()


class Made(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known.update(t.untyped_storage()._cdata for t in tensors((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tensors(result)):
            if storage._cdata not in known and storage._cdata not in alive:
                alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, alive.pop, storage._cdata, None)
        known.clear()
        return result


def tensors(value):
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]


def counting(function, *args, **options):
    def watched(*args, **kwargs):
        with Made():
            result = function(*args, **kwargs)
        for returned in tensors(result):
            alive.pop(returned.untyped_storage()._cdata, None)
        return result

    return checkpoint(watched, *args, **options)


held = program(COUNTING)
print("expected 0 bytes made inside regions alive, observed", sum(alive.values()))
raise SystemExit(int(bool(alive)))
""",
}
_IMPORTS = {
    "warning": ["import warnings"],
    "operators": ["from torch.utils._python_dispatch import TorchDispatchMode"],
    "memory": [
        "import weakref",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.utils._pytree import tree_leaves",
    ],
}


def _filled(difference: Difference, real: list[str], plain: list[str]) -> list[str]:
    counting = ["checkpoint=counting" if text.startswith("checkpoint=") else text for text in real]
    words = {
        "COUNTING": ", ".join(counting),
        "REAL": ", ".join(real),
        "PLAIN": ", ".join(plain),
        "NAME": difference.name,
        "EXPECTED": difference.expected,
        "BOUNDS": _bounds(difference.expected),
        "WANTED": difference.expected[difference.expected.find("[") :],
    }
    text = _ENDINGS[difference.kind]
    for word, value in words.items():
        text = text.replace(word, value)
    return text.rstrip().split("\n")


def _bounds(expected: str) -> str:
    low, _, high = expected.partition(" to ")
    return f"{low} <= runs <= {high or low}"
