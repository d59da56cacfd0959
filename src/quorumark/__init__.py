"""quorumark: shared, provable ownership of a jointly trained model.

K organisations train one model; a secret key is woven into its weights while they train; any t of them can later prove
that a suspect model is theirs. `import quorumark as qm` gives the names below, each loaded when it is first used, so
that `quorumark --help` stays quick. `quorumark.flower` wraps a Flower app; `quorumark.errors` has every error.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorumark.api import Certificate, Federation, Home, Reference, Terms, derive_groups

__all__ = ["Certificate", "Federation", "Home", "Reference", "Terms", "derive_groups"]
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        from quorumark import api

        return getattr(api, name)
    raise AttributeError(f"module 'quorumark' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
