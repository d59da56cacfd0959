"""The room: a server where members meet, the agent beside each member's keys, and their pages (docs/room.md).

The server's side (`codes`, `requests`, `store`, `limits`, `server`, `pages`) imports neither numpy nor numba nor torch:
it passes on what members sign, and computes nothing.
"""
