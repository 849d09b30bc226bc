"""Plain sentences. The page never calls anything "safe": a defense is at most "not broken by" attackers who were shown to win."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.study.kept import KeptTraining, KeptUtility
from gradveil.study.measures import Share
from gradveil.study.results import CellResult, Utility
from gradveil.study.run_result import Run
from gradveil.verdict.level_words import power_words, view_words
from gradveil.verdict.levels import bar_of, level_of
from gradveil.verdict.numbers import NBSP, accuracy, count, db, interval, ms, percent, points, size, times
from gradveil.verdict.status import Headline, Status, cannot_tell, closer_than_null, listed, status_of, unlisted

__all__ = [
    "NULLS",
    "Trust",
    "blind_to",
    "costs",
    "headline_sentence",
    "identified_sentence",
    "judgement",
    "no_verdict",
    "progress_sentence",
    "sentence",
    "setting_words",
    "tested_words",
    "threat_sentences",
    "trust",
    "utility_words",
]

NULLS = {
    "grey": "a grey picture",
    "data_mean": "the mean of the data",
    "prior_only": "the attack's prior alone, without the update",
    "public_mean": "the mean of the public records, without the update",
    "derangement": "reconstructions of other records",
    "chance": "guessing",
}
SHARES = {
    "gradient": "sharing a gradient",
    "weights": "sharing weights",
    "embedding": "sharing an embedding",
}
PRIORS = {
    "same": "public records of the same data",
    "other": "public records of other data",
    "none": "no public records, a stationary law",
}
SEES = {"embedding": "an embedding is seen", "embedding_gradient": "an embedding and its gradient are seen"}


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The badge: how far to trust the first screen."""

    level: str
    title: str
    reasons: tuple[str, ...]


def sentence(text: str) -> str:
    """Return ``text`` with a full stop, if it has no end of its own."""
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def guessing(cell: CellResult) -> str:
    """Say what guessing would find."""
    return f"guessing would find 1 in {cell.distinct}" if cell.distinct else "the chance level is not recorded"


def identified_sentence(cell: CellResult) -> str:
    """Say how many records the strongest attacker identified, with interval and chance level."""
    share = cell.identified
    return (
        f"the strongest attacker identified {share.count} of {count(share.n, 'record')} "
        f"({percent(share.value)}, 95{NBSP}% interval {interval(share.low, share.high)}); {guessing(cell)}"
    )


def no_verdict(cell: CellResult) -> str:
    """Say why a cell has no verdict."""
    reasons = "; ".join(check.sentence.strip().rstrip(".") or check.name for check in cell.failures)
    return f"No verdict, because a check failed: {reasons}."


def _against_null(cell: CellResult) -> str:
    bar = bar_of(cell)
    best = f"the largest of {bar.draws} tries of the best null" if bar.draws > 1 else "the best null"
    return f"{best}, {NULLS.get(bar.null, bar.null)}, reaches {percent(bar.value)}"


def judgement(cell: CellResult, undefended: CellResult | None) -> str:
    """Say what the numbers allow us to say about one cell, given the undefended cell of its setting, and no more."""
    share, status = cell.identified, status_of(cell, undefended)
    if status is Status.NO_VERDICT:
        return no_verdict(cell)
    if status is Status.LISTED:
        return f"The information is there, our search did not get it: {view_words(level_of(cell, 'list'))}, {_few(cell)}."
    if status is Status.UNTESTED:
        return f"No verdict on this defense: nothing shows that {cell.ensemble} breaks even the undefended update."
    if status is Status.BROKEN:
        return f"Broken by {cell.ensemble}: clearly more than without the update ({_against_null(cell)})."
    if status is Status.CANNOT_TELL:
        return f"This run cannot tell: {cannot_tell(cell) or unlisted(cell)} ({_few(cell)})."
    if status in (Status.UNBROKEN, Status.UNPROVEN):
        told = f"by {cell.ensemble} ({share.count} of {share.n} identified; {_against_null(cell)}; {_as_high_as(cell)})"
        if status is Status.UNBROKEN:
            return f"Not broken {told}. {power_words(cell)}{_elsewhere(cell)}"
        unproven = "power not measured, so nothing shows that these attackers could have won"
        return f"Not identified {told}; {unproven}.{_elsewhere(cell)}"
    owner = level_of(cell, "owner")
    if owner.open:
        return f"Leaks whose records these are under {cell.ensemble}, if not which: {view_words(owner)}."
    if closer_than_null(cell) and cell.selected.psnr and cell.bar.psnr:
        pictures = f"{db(cell.selected.psnr.median)} against {db(cell.bar.psnr.value)}"
        return f"Leaks something under {cell.ensemble}: pictures come closer to the originals than the best null ({pictures})."
    return f"Unclear under {cell.ensemble}: {_against_null(cell)}, and {count(share.n, 'record')} are too few to tell them apart."


def blind_to(cell: CellResult, undefended: CellResult | None) -> str:
    """Return why attackers who rebuilt few pictures say little about pictures; empty where they do."""
    why = cannot_tell(cell)
    # A hit more than the null had makes the information no less there than none.
    if not why and listed(cell):
        named = view_words(level_of(cell, "list")).replace(NBSP, " ")
        return f"the information is there, our search did not get it: {named}"
    shown = cell.power is not None and cell.power.shown
    if why or shown or undefended is cell:
        return why
    if undefended is None:
        return "nothing shows that these attackers win anywhere; add --defense none, or --power"
    if status_of(undefended, undefended) is not Status.BROKEN:
        return "the same attackers do not clearly break the undefended update either"
    return ""


def _as_high_as(cell: CellResult) -> str:
    """Say how large the true share may be; records whose search failed may be among those others would find."""
    share, gap = cell.identified, cell.gap
    told = f"the true share may be as high as {percent(share.high)}"
    failed = gap.search_failed if gap is not None else None
    if failed is None or not failed.count or failed.count >= failed.n:
        return told
    worth = (share.effective or share.n) * (1 - failed.value)
    left = Share.of(share.count, share.n - failed.count, effective=min(worth, share.n - failed.count))
    return (
        f"the search failed for {failed.count} of {failed.n}; of the others the true share may be as high as {percent(left.high)}"
    )


def _elsewhere(cell: CellResult) -> str:
    """Say what gives records away where pictures do not: a verdict on pictures is easily read as one on all there is."""
    others = [view_words(view) for view in (level_of(cell, name) for name in ("list", "list_owner", "label")) if view.open]
    return f" That is about pictures alone: {'; '.join(others)}." if others else ""


def _few(cell: CellResult) -> str:
    return f"{cell.identified.count} of {cell.identified.n} identified; {_against_null(cell)}"


def headline_sentence(headline: Headline) -> str:
    """Say the verdict in one line."""
    cell, best = headline.undefended, headline.best
    if cell is None:
        return "The undefended update was not measured in this run"
    if cell.failures:
        return "No verdict: a check failed on the undefended update"
    share = cell.identified
    bare = f"Without a defense, the strongest attacker identified {share.count} of {count(share.n, 'record')}"
    if best is None:
        return bare
    after, named = best.identified, _by_list(cell, best)
    if not headline.helps:
        return f"{bare}; no defense of this run lowered that bound"
    told = f"{bare}; with the best defense of this run, {after.count} of {after.n}{named}"
    doubt = "; this run cannot tell whether that is the defense’s doing" if status_of(best, cell) is Status.CANNOT_TELL else ""
    return f"{told}{doubt}"


def _by_list(bare: CellResult, best: CellResult) -> str:
    """Say what a list adds, which a defense of pictures may not touch."""
    views = [(view, view.share) for view in (level_of(bare, "list"), level_of(best, "list"))]
    told = [f"{share.count} of {share.n}" for _, share in views if share is not None]
    size = views[-1][0].size
    held = f"a list of {size} candidates" if size else "a list of candidates"
    return f"; who holds {held} points out {' without it and '.join(told)} with it" if len(told) == len(views) else ""


def costs(cell: CellResult, undefended: CellResult | None) -> list[tuple[str, str]]:
    """Return what a defense costs: bytes, client time, accuracy; and what is proved, for a whole training if there was one."""
    ratio = cell.bytes_ratio
    sent = size(cell.bytes.up) if cell.bytes.up is not None else "not measured in this run"
    if ratio is not None:
        sent += ", as many as undefended" if abs(ratio - 1) < 0.005 else f", {times(ratio)} an undefended update"
    taken = "not measured in this run"
    if cell.timing.defense_ms is not None:
        against = f", {times(cell.timing.ratio)} undefended" if cell.timing.ratio is not None else ""
        taken = f"{ms(cell.timing.defense_ms)}{against}"
    trained = "not measured in this run"
    if cell.utility is not None:
        trained = _accuracy_words(cell.utility)
        trained += f"; on {tested_words(cell.settings.weights)}" if cell.settings.weights else ""
        if cell.utility.time_ratio is not None:
            taken += f"; {times(cell.utility.time_ratio)} for a whole local training"
    proved = (cell.utility.guarantee if cell.utility is not None else None) or cell.defense.guarantee
    return [
        *(("Bytes per update", sent), ("Client time per update", taken), ("Accuracy", trained)),
        *([("Differential privacy", proved.sentence)] if proved is not None else []),
        *([("Certificate", cell.certificate.sentence)] if cell.certificate is not None else []),
    ]


def _accuracy_words(utility: Utility) -> str:
    told = f"{accuracy(utility.accuracy)}, {count(utility.accuracy.n, 'seed')}"
    if utility.undefended is not None:
        told += f"; undefended {accuracy(utility.undefended)}"
    if utility.difference is not None:
        told += f"; {points(utility.difference)} points by paired seeds"
    return told


def tested_words(weights: str) -> str:
    """Say on which records accuracy is measured; of weights that were given, nobody here knows what they have seen."""
    if weights:
        return "records that this training did not use; whether the given weights saw them is not known"
    return "records nobody trained on"


def utility_words(settings: KeptTraining | KeptUtility) -> str:
    """Say how the federation trained that accuracy, bytes and time come from."""

    def value(name: str) -> str:
        return "?" if settings.said(name) is None else str(settings.said(name))

    # 0 records per step means all of them, and a number of steps wins over passes.
    size = "all records in every step" if settings.minibatch == 0 else f"minibatches of {value('minibatch')}"
    local = f"{size}, learning rate {value('learning_rate')}"
    if settings.cut:
        passes = "1 pass" if value("local_epochs") == "1" else f"{value('local_epochs')} passes"
        together = f"the parties ({value('parts')}, model cut at {value('cut')}) step together in {value('rounds')} rounds"
        return f"{together} of {passes} over the records, {local}"
    every = f"{value('clients_per_round')} of {value('clients')} clients in each of {value('rounds')} rounds"
    unit = "step" if settings.local_steps else "epoch"
    many = value(f"local_{unit}s")
    long = f"{many} local {unit}" if many == "1" else f"{many} local {unit}s"
    return f"{every}, records dealt out {value('partition')}, {long}, {local}, {value('aggregation')}"


def trust(headline: Headline, run: Run) -> Trust:
    """Return the badge for the first screen."""
    shown = [cell for cell in (headline.undefended, headline.best) if cell is not None]
    failed = headline.undefended if headline.undefended is not None and headline.undefended.failures else None
    others = [cell for cell in run.cells if cell.failures and cell is not failed]
    more = count(len(others), "other cell has", "other cells have")
    elsewhere = [f"{more} no verdict either; see the checks."] if others else []
    if failed is not None:
        reasons = [sentence(check.sentence or check.name) for check in failed.failures]
        return Trust(level="fail", title="No verdict", reasons=(*reasons, *elsewhere))
    if headline.undefended is None:
        reason = "Without an undefended update to compare with, nothing shows that these attackers can win at all."
        return Trust(level="fail", title="No verdict", reasons=(reason, *elsewhere))
    reasons = list(dict.fromkeys(sentence(check.sentence or check.name) for cell in shown for check in cell.warnings))
    if status_of(headline.undefended, headline.undefended) is not Status.BROKEN:
        reasons.insert(0, "Even the undefended update was not clearly broken, so the defenses were hardly put to the test.")
    reasons += [line.replace(" either", "") for line in elsewhere]
    if run.missing:
        reasons.append(f"{count(len(run.missing), 'cell is', 'cells are')} not measured yet, so the best defense may change.")
    if reasons:
        return Trust(level="warn", title="Read with care", reasons=tuple(reasons))
    passed = sum(len(cell.checks) for cell in shown)
    if not passed:
        return Trust(level="warn", title="Not checked", reasons=("This run recorded no trust checks.",))
    fine = "No check gave a reason to doubt the numbers above."
    return Trust(level="ok", title=f"{count(passed, 'check')} passed", reasons=(fine,))


def threat_sentences(cells: Sequence[CellResult]) -> list[str]:
    """Return who attacks and what they see, each sentence once, in order."""
    return list(dict.fromkeys(sentence(line) for cell in cells for line in cell.threat.sentences if line.strip()))


def progress_sentence(run: Run) -> str:
    """Say how much of the run is done; empty when all of it is."""
    if not run.missing:
        return ""
    total = len(run.keys)
    return f"This run is not finished: {len(run.cells)} of {count(total, 'cell')} are done. The same command continues it."


def setting_words(cell: CellResult, fields: Sequence[str] = ()) -> str:
    """Describe a setting: data, model and training; with ``fields``, only those."""
    settings = cell.settings
    plain = {name: f"{name.replace('_', ' ')} {value}" for name, value in settings.as_dict().items()}
    spelled = {
        "data": settings.data,
        "model": settings.model,
        "state": settings.state,
        "batch_size": f"batch of {settings.batch_size}",
        "local_steps": count(settings.local_steps, "local step"),
        "local_epochs": count(settings.local_epochs, "local epoch"),
        "minibatch": f"minibatches of {settings.minibatch}",
        "shuffle": "shuffled" if settings.shuffle else "in one order",
        "dropout": f"dropout {'on' if settings.dropout else 'off'}",
        "clients": "one client’s update" if settings.clients == 1 else f"aggregate of {settings.clients} clients",
        "rounds": count(settings.rounds, "round"),
        "cut": f"vertical, {settings.cut}" if settings.cut else "horizontal",
        "parts": settings.parts if settings.cut else "",
        "party": f"party {settings.party}" if settings.cut else "",
        "sees": SEES[settings.sees] if settings.cut else "",
        "shares": SHARES[settings.shares],
        "prior": PRIORS.get(settings.prior, ""),
    }
    several = ("rounds",) if settings.rounds > 1 else ()
    counted = ("local_epochs",) if settings.local_epochs else ("local_steps",)
    used = tuple(name for name in ("minibatch", "shuffle", "momentum", "dropout") if getattr(settings, name))
    learned = ("prior",) if settings.prior != "same" else ()
    horizontal = ("data", "model", "state", "batch_size", *counted, *used, "shares", "clients", *several, *learned)
    vertical = ("data", "model", "cut", "parts", "party", "state", "batch_size", "sees", *learned)
    chosen = fields or (vertical if settings.cut else horizontal)
    told = plain | {name: text for name, text in spelled.items() if settings.said(name) is not None}
    return " · ".join(told[name] for name in chosen if told.get(name))
