"""NVIDIA FLARE: two changed lines in an existing recipe or job (docs/nvflare.md; needs the extra `nvflare`).

    from quorumark.nvflare import watermarked
    recipe = watermarked(recipe, "/srv/consortium/consortium.json")

or, for members who agreed on sums alone, without a key

    recipe = secure(recipe, "/srv/consortium/consortium.json")

and for the key ceremony and verification over FLARE

    key_ceremony("/srv/consortium/terms.json").run(env)
    verification("/srv/consortium/consortium.json", "/srv/suspect.safetensors").run(env)

A site that lets no plain weights out, whatever a job says, has `quorumark.nvflare.NoPlainWeights` in its
local/privacy.json. The stages themselves are `quorumark.node`'s; here they become FLARE's tasks.
"""

from quorumark.errors import MissingDependencyError

try:
    import nvflare  # noqa: F401
except ImportError:
    raise MissingDependencyError("quorumark[nvflare]", "the NVIDIA FLARE integration") from None

from quorumark.nvflare.controller import QuorumarkController
from quorumark.nvflare.job import key_ceremony, secure, verification, watermarked
from quorumark.nvflare.site import JoinRound, KeepResult, NoPlainWeights, QuorumarkExecutor

__all__ = [
    "JoinRound",
    "KeepResult",
    "NoPlainWeights",
    "QuorumarkController",
    "QuorumarkExecutor",
    "key_ceremony",
    "secure",
    "verification",
    "watermarked",
]
