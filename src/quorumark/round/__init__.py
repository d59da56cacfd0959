"""Rounds of training: secure sums of the members' vectors, with the mark in them (docs/secagg.md, docs/federation.md).

group        who may take part
memory       what a member must not do twice
statements   what members sign so that the others may go on
secagg       one secure sum: the member's side and the server's
sums         tags by which members see that what a server announces is what they summed
history      the models that were accepted: the state that a round starts from
member       a member in a round, without its training
server       the server's side of a run
"""

from quorumark.round import sums
from quorumark.round.group import Group, group_of
from quorumark.round.memory import FolderState, MemoryState, State
from quorumark.round.secagg import Plan, SecAggMember, SecAggServer, Upload, pack, unpack
from quorumark.round.statements import Turn

__all__ = [
    "FolderState",
    "Group",
    "MemoryState",
    "Plan",
    "SecAggMember",
    "SecAggServer",
    "State",
    "Turn",
    "Upload",
    "group_of",
    "pack",
    "sums",
    "unpack",
]
