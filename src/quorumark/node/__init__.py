"""What a federated learning engine calls: the stages of setup, rounds and verification (docs/engines.md).

`member.MemberNode` is a member on its own machine; `round.server.RoundServer` and `ceremony.CeremonyServer` are the
server's side. Both take and return strings, numbers and arrays; transport is the engine's concern (`quorumark.flower`
is one). `queries` packs a verification query with its files; `signer` is a process that keeps a member's secrets away
from an engine's code.
"""
