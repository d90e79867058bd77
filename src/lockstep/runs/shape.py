"""What a record of a run has, and of which kind each part is. Pure.

It is held to that when it is read (history.py), so that no code that shows a run has to expect anything else. Keys that
are not named here may be anything: a later version of lockstep may write more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class _Object:
    """An object with these keys; optional ones may be missing."""

    required: Mapping[str, _Kind]
    optional: Mapping[str, _Kind] = field(default_factory=dict)


@dataclass(frozen=True)
class _Named:
    """An object whose keys are names or numbers, and whose values are all of a kind."""

    each: _Kind


@dataclass(frozen=True)
class _Many:
    """A list whose elements are all of a kind."""

    each: _Kind


@dataclass(frozen=True)
class _OrNone:
    """What is of a kind, or null."""

    kind: _Kind


_Kind: TypeAlias = "tuple[type, ...] | _Object | _Named | _Many | _OrNone"

_NUMBER, _WHOLE, _TEXT, _FLAG = (int, float), (int,), (str,), (bool,)
_NUMBERS = _Named(_NUMBER)
_ERROR = _Object({}, dict.fromkeys(("type", "message", "code"), _OrNone(_TEXT)))
_FAILURE = _Object(
    {},
    {
        **dict.fromkeys(("code", "signal", "log"), _OrNone(_TEXT)),
        **dict.fromkeys(("rank", "step", "exit_code"), _OrNone(_WHOLE)),
        "error": _OrNone(_ERROR),
    },
)
_EVENT = _Object(
    {},
    {
        **dict.fromkeys(("kind", "text"), _TEXT),
        "at": _NUMBER,
        "code": _OrNone(_TEXT),
        **dict.fromkeys(("over", "again"), _OrNone(_FLAG)),
        **dict.fromkeys(("ranks", "waiting"), _OrNone(_Many(_WHOLE))),
        "failure": _OrNone(_FAILURE),
    },
)
_PASS = _Object(
    dict.fromkeys(("step", "epoch", "batch", "samples"), _WHOLE),
    {"first": _Many(_WHOLE), **dict.fromkeys(("steps", "batches", "again"), _WHOLE)},
)
_LOADER = _Object(
    {
        "loader": _WHOLE,
        "order": _TEXT,
        **dict.fromkeys(("length", "batch_size", "slices"), _OrNone(_WHOLE)),
        "seed": _WHOLE,
        "drop_last": _FLAG,
        "shares": _OrNone(_Many(_NUMBER)),
        "runs": _OrNone(_Many(_Many(_WHOLE))),
        **dict.fromkeys(("costs", "drawn_by"), _OrNone(_TEXT)),
        "dataset": _TEXT,
        "passes": _Many(_PASS),
    },
    {"until": _WHOLE},
)
_START = _Object(
    {"number": _WHOLE, "at": _NUMBER, "world_size": _WHOLE},
    {
        **dict.fromkeys(("series", "folder"), _TEXT),
        "trace": _OrNone(_TEXT),
        "ranks": _OrNone(_Named(_OrNone(_WHOLE))),
        "machines": _OrNone(_Many(_Many((str, int)))),
        **dict.fromkeys(("steps", "restarts"), _WHOLE),
        "before": _OrNone(_WHOLE),
        "loaders": _Many(_LOADER),
        "digests": _Named(_Many(_TEXT)),
    },
)
_RANKS = _Named(_Object({"seconds": _NUMBERS}, {"memory": _OrNone(_NUMBER)}))
_STRETCH = _Object(
    {"rank": _WHOLE, "phase": _OrNone(_TEXT), **dict.fromkeys(("from", "to", "lost"), _NUMBER)},
    {"pause": _FLAG},
)
_SUMMARY = _Object(
    {
        "step": _NUMBER,
        **dict.fromkeys(("headline", "verdict"), _TEXT),
        "remarks": _Many(_TEXT),
        "watched": _Object({"steps": _WHOLE, "seconds": _NUMBER}),
        "samples_per_second": _OrNone(_NUMBER),
        "ranks": _RANKS,
        "straggler": _OrNone(_Object({"rank": _WHOLE, "phase": _OrNone(_TEXT), "costs": _NUMBER})),
        "stretches": _Many(_STRETCH),
    },
    {
        **dict.fromkeys(("bottleneck", "next"), _TEXT),
        "code": _OrNone(_TEXT),
        "starting": _NUMBER,
        "useful": _OrNone(_Object({})),
        "parts": _Many(_Object({"ranks": _RANKS})),
    },
)
#: The summary of versions that summed up the last start alone; it is not shown, but computed again.
_EARLIER_SUMMARY = _Object({}, {"bottleneck": _TEXT})
_RECORD = _Object(
    {
        "program": _Many(_TEXT),
        "began": _NUMBER,
        "launcher": _WHOLE,
        "starts": _Many(_START),
        "events": _Many(_EVENT),
    },
    {
        **dict.fromkeys(("directory", "host", "lockstep"), _TEXT),
        "node": _WHOLE,
        "launcher_began": _OrNone(_NUMBER),
        "ended": _NUMBER,
        "exit_code": _WHOLE,
        "checkpoints": _Many(_Object({"at": _NUMBER, "step": _WHOLE})),
        **dict.fromkeys(("logs", "uncounted"), _Many(_TEXT)),
        "environment": _Object({}, {"variables": _Named(_TEXT)}),
        "end": _Object({}, dict.fromkeys(("code", "text"), _TEXT)),
        "left_out": _Object({**dict.fromkeys(("steps", "first", "last"), _WHOLE), "of": _TEXT}),
        "costs": _Object({"batches": _WHOLE, **dict.fromkeys(("by_number", "by_cost", "exact"), _NUMBER)}),
        "nonfinite": _Named(_Object({"first": _WHOLE, "since": _OrNone(_WHOLE)})),
    },
)


def check(about: Mapping[str, Any]) -> None:
    """Refuse a record whose parts are not what a launcher writes.

    Raises:
        TypeError: so it is; the message names the part.
    """
    _check(about, _RECORD, "")
    summary = about.get("summary")
    if summary is not None or "summary" in about:
        earlier = isinstance(summary, dict) and "step" not in summary
        _check(summary, _EARLIER_SUMMARY if earlier else _SUMMARY, "summary")


def _check(value: Any, kind: _Kind, where: str) -> None:
    match kind:
        case _OrNone():
            if value is not None:
                _check(value, kind.kind, where)
        case _Many():
            _refuse_unless(isinstance(value, list), value, where)
            for place, each in enumerate(value):
                _check(each, kind.each, f"{where}[{place}]")
        case _Named():
            _refuse_unless(isinstance(value, dict), value, where)
            for name, each in value.items():
                _check(each, kind.each, f"{where}.{name}")
        case _Object():
            _refuse_unless(isinstance(value, dict), value, where)
            missing = sorted(kind.required.keys() - value.keys())
            if missing:
                raise TypeError(" ".join(part for part in (where, ", ".join(missing), "missing") if part))
            for name, each in {**kind.required, **kind.optional}.items():
                if name in value:
                    _check(value[name], each, f"{where}.{name}" if where else name)
        case _:
            _refuse_unless(isinstance(value, kind), value, where)
            if isinstance(value, float) and not math.isfinite(value):
                raise TypeError(f"{where} is {value}")


def _refuse_unless(fits: bool, value: Any, where: str) -> None:
    if not fits:
        raise TypeError(f"{where} is a {type(value).__name__}")
