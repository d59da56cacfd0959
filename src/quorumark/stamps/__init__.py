"""Dates that nobody can backdate: time stamps by outside authorities (RFC 3161), kept beside what they date.

    tokens    one response of an authority: asking for it, and checking it against bytes and the reader's roots
    record    all stamps of one file, by several authorities, with renewals (docs/format.md, "Stamps")
    fetch     asking an authority by HTTP: the only place of the package that opens a connection by itself

By a stamp an authority that is no member says: these bytes existed at this time. It does not say who made them.
"""
