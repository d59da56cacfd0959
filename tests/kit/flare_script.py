"""A client script as users write them, for the model of `tests.kit.flowers`. It knows nothing of quorumark but for the
seed and the rate of a run that can be repeated. With `--die SITE:ROUND` that site's machine fails in that round."""

from __future__ import annotations

import os
import signal
import sys

import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel

from tests.kit.flowers import SHAPES, train


def main() -> None:
    flare.init()
    dies = sys.argv[sys.argv.index("--die") + 1] if "--die" in sys.argv else ""
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        if dies == f"{flare.get_site_name()}:{received.current_round + 1}":
            os.kill(os.getpid(), signal.SIGKILL)
        meta = received.meta
        params = {name: received.params[name] for name in (*SHAPES, "steps")}  # as the random numbers are drawn
        made = train(params, 0.01, meta.get("quorumark-seed", 1), meta.get("quorumark-rate", 1.0))
        flare.send(FLModel(params=made, metrics={"moved": 1.0}))


main()
