"""The tuning database: measurements of chains and verdicts on them, shared by many processes and moved between machines as data."""
from svod.tune.db.claims import Claim, Holder
from svod.tune.db.moving import Merged
from svod.tune.db.records import (
    Chain,
    FormTimes,
    KernelRecord,
    Measurement,
    OriginRecord,
    PairTimes,
    PlanTimes,
    Record,
    RecordError,
    Rounding,
    Search,
    TargetFacts,
    Verdict,
)
from svod.tune.db.schema import LAYER_NAMES, OWN, SHIPPED, TEAM
from svod.tune.db.store import TuningDB, described, origins_of
from svod.tune.db.transfer import Skipped
from svod.tune.db.why import Explanation, explain
from svod.tune.db.winners import Winner, derive_winner, rank_winners

__all__ = [
    "LAYER_NAMES",
    "OWN",
    "SHIPPED",
    "TEAM",
    "Chain",
    "Claim",
    "Explanation",
    "FormTimes",
    "Holder",
    "KernelRecord",
    "Measurement",
    "Merged",
    "OriginRecord",
    "PairTimes",
    "PlanTimes",
    "Record",
    "RecordError",
    "Rounding",
    "Search",
    "Skipped",
    "TargetFacts",
    "TuningDB",
    "Verdict",
    "Winner",
    "derive_winner",
    "described",
    "explain",
    "origins_of",
    "rank_winners",
]
