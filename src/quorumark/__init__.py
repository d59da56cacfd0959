"""quorumark: shared, provable ownership of a jointly trained model.

K organisations train one model; a secret key is woven into its weights while they train; any t of them
can later prove that a suspect model is theirs. The public modules are `field`, `shamir`, `codec`, `layout`
and `errors`. Importing this package imports none of them, so that `quorumark --help` stays quick.
"""

__version__ = "0.1.0.dev0"
