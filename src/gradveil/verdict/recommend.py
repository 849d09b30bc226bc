"""Choose a defense by limits: the one that leaks least among those that cost no more than allowed, or none and why.

Leaking is judged like everywhere: by the upper bound of what the strongest attacker got, of pictures unless another level is
asked for. A defense measured in several settings counts with its worst one, and one that leaks no less than no defense is never
recommended. Where the numbers do not allow a choice, nothing is: an attacker who cannot even break the undefended update, a
federation that learned nothing, a failed trust check, and a level or an accuracy nobody measured are no evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.errors import Unreliable, UsageError, suggest
from gradveil.study.cell import HORIZONTAL
from gradveil.study.measures import Share
from gradveil.study.results import CellResult
from gradveil.study.run_result import Run
from gradveil.verdict.candidates import Candidate, Requirements
from gradveil.verdict.level_words import view_words
from gradveil.verdict.levels import View, level_of, levels_of
from gradveil.verdict.numbers import count, interval, percent, points, times
from gradveil.verdict.status import Setting, Status, at_the_null, settings_of, status_of
from gradveil.verdict.words import blind_to

__all__ = ["Candidate", "Recommendation", "Requirements", "recommend"]

MOST_NAMED = 3
FEW_SEEDS = 4
"""Below this many, an interval may be wide because of the seeds alone."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The answer.

    Attributes:
        chosen: The defense to use, or None where none qualifies.
        sentence: The answer and its reason in one line.
        notes: What to know before relying on it.
        candidates: Every defense of the run, in order of preference.
    """

    chosen: Candidate | None
    sentence: str
    notes: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "recommended": self.chosen.spelling if self.chosen else None,
            "sentence": _plain(self.sentence),
            "notes": [_plain(note) for note in self.notes],
            "candidates": [candidate.as_dict() for candidate in self.candidates],
        }


def recommend(run: Run, asked: Requirements) -> Recommendation:
    """Choose among the defenses of a run.

    Args:
        run: What the run measured, with utility.
        asked: What a defense may cost.

    Raises:
        UsageError: Utility was not measured, or no defense was.
        Unreliable: Nothing shows that the attackers can win, the federation learned nothing, or no defense can be judged.
    """
    chosen_rows = _rows(run, asked)
    settings = settings_of(chosen_rows)
    _check_evidence(settings, asked.level, unfinished=bool(run.missing))
    candidates = sorted(_candidates(settings, asked), key=Candidate.rank)
    judged = [candidate for candidate in candidates if not candidate.doubts]
    if not judged:
        why = "; ".join(f"{each.spelling}: {each.doubts[0]}" for each in candidates[:MOST_NAMED])
        raise Unreliable(f"nothing can be recommended, because no defense can be judged ({why})")
    notes = _common_notes(run, candidates, chosen_rows)
    fit = [candidate for candidate in judged if candidate.qualifies]
    if not fit:
        return Recommendation(
            chosen=None, sentence=_refusal(judged, asked.level), notes=tuple(notes), candidates=tuple(candidates)
        )
    chosen = fit[0]
    notes = [*_notes_on(chosen, fit[1:], settings, asked), *notes]
    sentence = _answer(chosen, fit, judged, asked.level)
    return Recommendation(chosen=chosen, sentence=sentence, notes=tuple(notes), candidates=tuple(candidates))


def _rows(run: Run, asked: Requirements) -> list[CellResult]:
    """Return the rows to judge: updates and embeddings are defended by different means, so they are not weighed together."""
    cuts = list(dict.fromkeys(cell.settings.cut for cell in run.cells))
    if asked.cut:
        known = [cut or HORIZONTAL for cut in cuts]
        if asked.cut not in known:
            raise UsageError(f"there is no row with cut {asked.cut!r} in this run{suggest(asked.cut, known)}")
        return [cell for cell in run.cells if (cell.settings.cut or HORIZONTAL) == asked.cut]
    rows = [[cell for cell in run.cells if bool(cell.settings.cut) is vertical] for vertical in (False, True)]
    # Without a defense among them, horizontal rows are there for comparison alone.
    return next((side for side in rows if any(not cell.defense.is_none for cell in side)), rows[0] or rows[1])


def _check_evidence(settings: Sequence[Setting], level: str, *, unfinished: bool) -> None:
    cells = [cell for setting in settings for cell in setting.defended]
    if not cells:
        raise UsageError(
            'no defense was measured in these rows; name some in the plan, as in defense = ["none", "pruning:ladder"]'
        )
    if all(cell.utility is None for cell in cells):
        raise UsageError(
            "accuracy was not measured in this run, so nothing can be recommended; add a [utility] section to the plan, or run "
            "`gradveil audit` again with --utility 20 and the same --out"
        )
    for setting in settings:
        bare = setting.undefended
        if bare is None:
            cure = "let the audit end: the same command goes on" if unfinished else 'add "none" to the plan'
            why = f"the undefended update was not measured, so nothing shows that these attackers can win; {cure}"
            raise Unreliable(f"nothing can be recommended: {why}")
        if bare.failures:
            raise Unreliable(f"nothing can be recommended: a check failed on the undefended update ({_failure(bare)})")
        view = level_of(bare, level)
        if view.share is None:
            raise Unreliable(f"nothing can be recommended: {view.name} was not measured ({view.reason})")
        if at_the_null(bare) if level == "picture" else not view.open:
            raise Unreliable(f"nothing can be recommended: {bare.ensemble} does not break even the undefended update")
    for cell in cells:
        _check_learned(cell)


def _check_learned(cell: CellResult) -> None:
    utility = cell.utility
    if utility is None or utility.undefended is None or utility.chance is None:
        return
    reached = utility.undefended.value if utility.undefended.low is None else utility.undefended.low
    if reached > utility.chance:
        return
    mean, few = utility.undefended, utility.undefended.value > utility.chance and utility.undefended.n < FEW_SEEDS
    over = f" ({interval(mean.low, mean.high)} over {mean.n} seeds)" if mean.low is not None and mean.high is not None else ""
    cure = "ask for more seeds, or train longer" if few else "train longer, or with another learning_rate"
    raise Unreliable(
        f"nothing can be recommended: without a defense the federation reached {percent(mean.value)} accuracy{over}, not clearly "
        f"more than the {percent(utility.chance)} of naming one class always; {cure}"
    )


def _candidates(settings: Sequence[Setting], asked: Requirements) -> list[Candidate]:
    spellings = dict.fromkeys(cell.defense.spelling for setting in settings for cell in setting.defended)
    return [_candidate(spelling, settings, asked) for spelling in spellings]


def _candidate(spelling: str, settings: Sequence[Setting], asked: Requirements) -> Candidate:
    cells = [cell for setting in settings for cell in setting.defended if cell.defense.spelling == spelling]
    differences = [cell.utility.difference for cell in cells if cell.utility is not None and cell.utility.difference is not None]
    worst = min(differences, key=lambda each: each.value, default=None)
    found = Candidate(
        spelling=spelling,
        identified=max((_leak(cell, asked.level) for cell in cells), key=lambda share: share.high),
        accuracy=min((cell.accuracy for cell in cells if cell.accuracy is not None), key=lambda each: each.value, default=None),
        difference=worst,
        time=_worst([cell.time_ratio for cell in cells]),
        sent=_worst([cell.sent_ratio for cell in cells]),
        doubts=tuple(_doubts(cells, len(settings), asked)),
        excess=(),
    )
    bare = max((_leak(s.undefended, asked.level) for s in settings if s.undefended is not None), key=lambda share: share.high)
    idle = (
        [(f"leaks no less than no defense ({bare.count} of {bare.n})", 1.0)] if found.identified.high >= bare.high - 1e-9 else []
    )
    return Candidate(**{**vars(found), "excess": (*idle, *_excess(found, asked))})


def _leak(cell: CellResult, level: str) -> Share:
    """Return what the strongest attacker got at a level; everything where nobody looked, which is a doubt as well."""
    return level_of(cell, level).share or Share.of(cell.n or 1, cell.n or 1)


def _worst(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) and known else None


def _doubts(cells: Sequence[CellResult], settings: int, asked: Requirements) -> list[str]:
    failed = next((cell for cell in cells if cell.failures), None)
    doubts = [f"a trust check failed ({_failure(failed)})"] if failed is not None else []
    if len(cells) < settings:
        doubts.append(f"measured in {len(cells)} of {settings} settings")
    views = [level_of(cell, asked.level) for cell in cells]
    doubts += [f"{view.name} was not measured ({view.reason})" for view in views if view.share is None][:1]
    if any(cell.utility is None or cell.utility.difference is None for cell in cells):
        doubts.append("accuracy was not measured")
    if asked.max_time is not None and _worst([cell.time_ratio for cell in cells]) is None:
        doubts.append("client time was not measured")
    if asked.max_bytes_ratio is not None and _worst([cell.sent_ratio for cell in cells]) is None:
        doubts.append("bytes were not measured")
    if asked.strict and any(cell.utility and cell.utility.difference and cell.utility.difference.low is None for cell in cells):
        doubts.append("one seed gives no interval for --strict")
    return doubts


def _failure(cell: CellResult) -> str:
    check = cell.failures[0]
    return check.sentence.strip().rstrip(".") or check.name


def _excess(found: Candidate, asked: Requirements) -> list[tuple[str, float]]:
    """Return the limits that are broken, in words, and by how much of the limit."""
    broken = []
    if asked.max_accuracy_drop is not None and found.difference is not None:
        low = found.difference.low
        drop = -100 * (low if asked.strict and low is not None else found.difference.value)
        words = f"{'may lose' if asked.strict else 'loses'} {drop:.1f} points of accuracy (limit {asked.max_accuracy_drop:g})"
        broken.append((words, drop, asked.max_accuracy_drop, 1.0))
    if asked.max_time is not None and found.time is not None:
        broken.append((f"takes {times(found.time)} client time (limit {asked.max_time:g}×)", found.time, asked.max_time, 1.0))
    if asked.max_bytes_ratio is not None and found.sent is not None:
        limit = asked.max_bytes_ratio
        broken.append((f"sends {times(found.sent)} bytes (limit {limit:g}×)", found.sent, limit, 0.1))
    if asked.max_identified is not None:
        high, limit = found.identified.high, asked.max_identified
        done = View(name=asked.level).done
        broken.append((f"may let {percent(high)} be {done} (limit {percent(limit)})", high, limit, 0.05))
    return [(words, (value - limit) / max(limit, least)) for words, value, limit, least in broken if value > limit + 1e-9]


def _measured(found: Candidate, level: str) -> str:
    share, view = found.identified, View(name=level)
    found_out = f"{percent(share.value)}, 95 % interval {interval(share.low, share.high)}"
    told = f"{share.count} of {count(share.n, view.unit)} {view.done} ({found_out})"
    if found.difference is not None:
        told += f", accuracy {points(found.difference)} points over {count(found.difference.n, 'paired seed')}"
    told += f", {times(found.time)} client time" if found.time is not None else ""
    return told + (f", {times(found.sent)} bytes up" if found.sent is not None else "")


def _answer(chosen: Candidate, fit: Sequence[Candidate], judged: Sequence[Candidate], level: str) -> str:
    if len(judged) == 1:
        return f"use {chosen.spelling}: it is within the limits, and no other defense was judged; {_measured(chosen, level)}"
    of = f"{len(judged)} defenses within the limits"
    why = f"it leaks least of the {len(fit)} of {of}" if len(fit) > 1 else f"it is the only one of {of} that leaks less than none"
    return f"use {chosen.spelling}: {why}; {_measured(chosen, level)}"


def _refusal(judged: Sequence[Candidate], level: str) -> str:
    nearest = min(judged, key=lambda candidate: (max(over for _, over in candidate.excess), candidate.rank()))
    limits = " and ".join(words for words, _ in nearest.excess)
    who = f"of {count(len(judged), 'defense')}, {nearest.spelling} comes nearest, but"
    return f"none qualifies: {who} {limits}; {_measured(nearest, level)}"


def _notes_on(chosen: Candidate, others: Sequence[Candidate], settings: Sequence[Setting], asked: Requirements) -> list[str]:
    """Say what the numbers behind a choice do not show."""
    share, notes = chosen.identified, []
    same = [other.spelling for other in others if share.low <= other.identified.value <= share.high]
    if same:
        named = ", ".join(same[:MOST_NAMED]) + (f" and {len(same) - MOST_NAMED} more" if len(same) > MOST_NAMED else "")
        notes.append(f"the difference in leakage to {named} lies inside the interval; more records would tell them apart")
    for setting in settings:
        bare = setting.undefended
        cell = next((each for each in setting.defended if each.defense.spelling == chosen.spelling), None)
        if bare is None or cell is None:
            continue
        proved = cell.utility.guarantee if cell.utility is not None else None
        if proved is not None and proved.epsilon is not None:
            notes.append(f"differential privacy of the whole training: {proved.sentence}")
        if cell.informed is None:
            notes.append(f"no attacker of {cell.ensemble} knew this defense; one who does may find more")
        if _leak(cell, asked.level).high >= _leak(bare, asked.level).low:
            notes.append("its interval overlaps that of no defense, so these records do not show that it leaks less")
        notes += _notes_on_levels(cell, asked.level)
        if status_of(cell, bare) is Status.BROKEN:
            notes.append(
                f"it is broken all the same: {cell.ensemble} identifies clearly more records than can be had without the update"
            )
        elif asked.level == "picture" and (why := blind_to(cell, bare)):
            notes.append(f"that few pictures were rebuilt may not be its doing: {why}")
    return list(dict.fromkeys([*notes, *_notes_on_accuracy(chosen, asked)]))


def _notes_on_levels(cell: CellResult, level: str) -> list[str]:
    """Say what attackers get at the other levels, and whether they were shown to be strong."""
    others = [view for view in levels_of(cell) if view.name != level and view.open]
    notes = [f"it is about {level}s alone: {view_words(view)}" for view in others]
    # A curve that shows no power is said as a reason to doubt.
    curve = cell.power is not None and (cell.power.ladder or cell.power.planted or cell.power.shown)
    if status_of(cell, None) is not Status.BROKEN and not curve:
        notes.append("power was not measured, so nothing shows how strong these attackers are against it")
    return notes


def _notes_on_accuracy(chosen: Candidate, asked: Requirements) -> list[str]:
    difference = chosen.difference
    if difference is None or asked.max_accuracy_drop is None:
        return []
    if difference.low is None:
        return ["accuracy comes from one seed, so there is no interval"]
    if -100 * difference.low > asked.max_accuracy_drop + 1e-9:
        reach = f"the interval of its accuracy reaches a drop of {-100 * difference.low:.1f} points, beyond the limit"
        return [f"{reach}; more seeds would narrow it, and --strict insists on it"]
    return []


def _common_notes(run: Run, candidates: Sequence[Candidate], judged: Sequence[CellResult]) -> list[str]:
    notes = [f"{each.spelling} was left out: {'; '.join(each.doubts)}" for each in candidates if each.doubts]
    if run.missing:
        notes.append(f"{count(len(run.missing), 'cell is', 'cells are')} not done yet, so the answer may change")
    others = list(dict.fromkeys(cell.settings.cut or HORIZONTAL for cell in run.cells if cell not in judged))
    if others:
        options = " or ".join(f"--cut {cut}" for cut in others)
        notes.append(f"{count(len(run.cells) - len(judged), 'row', 'rows')} of other cuts left out; ask for them with {options}")
    return notes


def _plain(text: str) -> str:
    return text.replace("\u00a0", " ")
