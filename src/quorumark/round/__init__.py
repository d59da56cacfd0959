"""Rounds of training: secure sums of the members' vectors, with the mark in them (docs/secagg.md, docs/federation.md).

group        who may take part
memory       what a member must not do twice
statements   what members sign so that the others may go on
secagg       one secure sum: the member's side and the server's
checked_sums tags by which members see that what a server announces is what they summed
movement     how far a model moved, exactly
units        in which units updates are packed
amplitudes   how strong the mark is, weight by weight
mark         what a member adds for it, and what it refuses
dither       noise beside the mark
continuity   no mark where a model jumped
forecast     the z that a verification would give, without any key
survival     what training left of the mark, by the members' own noise
outlook      both together: the z to count on, and where a run is going
survey       where members say that they are
past         earlier rounds from one state, and what settles them
history      the models that were accepted: the state that a round starts from
member       a member in a round, without its training
server       the server's side of a run
"""
