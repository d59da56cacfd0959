"""What a federated learning engine calls: the stages of setup, rounds and verification (docs/engines.md).

`member.MemberNode` is a member on its own machine, `server.RoundServer` and `server.CeremonyServer` are the other
side. Both take and give texts, numbers and arrays; how those travel is the engine's business (`quorumark.flower` is
one). `signer` puts a process between an engine's code and a member's secrets.
"""
