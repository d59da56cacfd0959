"""Secure aggregation: a server learns the sum of its members' vectors, and nothing else (docs/secagg.md).

Vectors are of field elements (mod 2^61−1). Each member runs a `SecAggMember`, the server a `SecAggServer`; every stage
takes bytes and gives bytes. Transport is the caller's concern.

    ready    a key of this round, signed                                            member → server
    plan     the set U who take part, with their keys (the *announcement*)          server → each
    upload   the vector under pairwise masks, which cancel over U, and a mask of
             the member's own, whose seed is shared among U in sealed boxes         member → server
    unmask   every member of U has uploaded: the shares of all seeds                server → each → server

It is all or nothing: if one of U is missing, nothing of this attempt is ever opened; the others upload again for a
smaller U. T = ⌊(n+t−1)/2⌋+1 answers open a sum. Any two sets of T among n members have t in common, so that one of
them is honest, and an honest member answers in one round from each *state* and purpose:
no two sums from one state are ever opened. A state is what a round starts from, named by the digest `origin`; without
one, every round is a state of its own. Everything that members must agree on is in ctx, which enters every key: members
who were told different things share no masks, and cannot open each other's boxes.

What a member must not do twice it writes to disk before anything is sent (`FolderState`).
"""
