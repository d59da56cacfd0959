"""Makes v1/records.json: canonical bytes, digests, numbers as records round them, keys from passphrases.

It uses none of quorumark's code, no JSON library for the bytes, and other methods for the numbers: more digits, and the
series of the normal distribution where quorumark takes a continued fraction.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal, localcontext
from pathlib import Path
from typing import Any

ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}

# --- bytes ------------------------------------------------------------------------------------------------


def text_of(value: Any) -> str:
    """Canonical JSON, written out character by character."""
    if isinstance(value, str):
        shown = (ESCAPES.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value)
        return '"' + "".join(shown) + '"'
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].encode())  # the order of UTF-8 is that of code points
        return "{" + ",".join(f"{text_of(k)}:{text_of(v)}" for k, v in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(int(value))


EXAMPLE = "example/v1"


def accepted() -> list[dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {
        "the order of code points, which is not that of UTF-16": {"\U0001f600": 1, "\uff5e": 2, "z": 3, "Z": 4, "": 5},
        "a name and its beginning": {"ab": 1, "a": 2, "a\u0000": 3, "A": 4},
        "escapes": {"text": '"\\/\b\t\n\f\r\u0000\u001f\u007f\u0085\u2028\ufeffü\U0001f600'},
        "composed and decomposed are two": {"\u00fc": 1, "u\u0308": 2},
        "large integers": {"numbers": [2**53, 2**53 + 1, -(2**63) - 1, 2**124, 10**100]},
        "the rest": {"list": [[], {}, None, True, False, 0, -1, ""], "deep": {"b": {"d": 1, "c": 2}, "a": []}},
    }
    found = []
    for why, value in values.items():
        record = {"format": EXAMPLE, **value}
        found.append({"why": why, "value": value, "bytes": text_of(record).encode().hex()})
    return found


def refused() -> list[dict[str, str]]:
    """Bytes that other readers may take for the first line's record, or for a record at all."""
    good = '{"a":1,"b":"\u00fc","format":"example/v1"}'
    texts = {
        "fields out of order": '{"b":"\u00fc","a":1,"format":"example/v1"}',
        "the order of UTF-16": '{"format":"example/v1","\U0001f600":1,"\uff5e":2}',
        "a space": '{"a": 1,"b":"\u00fc","format":"example/v1"}',
        "a line feed at the end": good + "\n",
        "a space in front": " " + good,
        "a character escaped for nothing": '{"a":1,"b":"\\u00fc","format":"example/v1"}',
        "a slash escaped": '{"a":1,"b":"\\/","format":"example/v1"}',
        "an escape in capitals": '{"a":1,"b":"\\u001F","format":"example/v1"}',
        "an escape by number that has a letter": '{"a":1,"b":"\\u000a","format":"example/v1"}',
        "a field twice": '{"a":1,"a":1,"format":"example/v1"}',
        "a fraction": '{"a":1.5,"format":"example/v1"}',
        "a fraction that is an integer": '{"a":1.0,"format":"example/v1"}',
        "an exponent": '{"a":1e3,"format":"example/v1"}',
        "minus nothing": '{"a":-0,"format":"example/v1"}',
        "a leading zero": '{"a":01,"format":"example/v1"}',
        "not a number": '{"a":NaN,"format":"example/v1"}',
        "infinity": '{"a":-Infinity,"format":"example/v1"}',
        "half of a surrogate pair": '{"a":"\\ud800","format":"example/v1"}',
        "a comma too many": '{"a":1,"format":"example/v1",}',
        "two values": good + "{}",
        "another format": '{"a":1,"format":"example/v2"}',
        "no format": '{"a":1}',
        "a list": "[]",
        "a control character as it is": '{"a":"\u0001","format":"example/v1"}',
        "a line feed as it is": '{"a":"\n","format":"example/v1"}',
    }
    found = [{"why": why, "bytes": text.encode().hex()} for why, text in texts.items()]
    raw = {
        "a byte order mark": b"\xef\xbb\xbf" + good.encode(),
        "UTF-16, little-endian": good.encode("utf-16-le"),
        "UTF-16, big-endian": good.encode("utf-16-be"),
        "UTF-16 with its mark": b"\xff\xfe" + good.encode("utf-16-le"),
        "UTF-32, little-endian": good.encode("utf-32-le"),
        "UTF-32, big-endian": good.encode("utf-32-be"),
        "Latin-1": good.encode("latin-1"),
        "an overlong spelling": good.encode().replace(b"a", b"\xc1\xa1"),
        "half of a surrogate pair in UTF-8": b'{"a":"\xed\xa0\x80","format":"example/v1"}',
        "nothing": b"",
        "cut short": good.encode()[:-1],
    }
    return found + [{"why": why, "bytes": data.hex()} for why, data in raw.items()]


def digests() -> list[dict[str, Any]]:
    found = []
    for domain, parts in [("terms", []), ("terms", [b""]), ("größe", [b"a", b"bc"]), ("größe", [b"ab", b"c"])]:
        data = b"quorumark/v1"
        for part in (domain.encode(), *parts):
            data += len(part).to_bytes(8, "big") + part
        found.append({"domain": domain, "parts": [p.hex() for p in parts], "digest": hashlib.sha256(data).hexdigest()})
    return found


# --- numbers ----------------------------------------------------------------------------------------------


def six_decimals(value: int, squared: int) -> str:
    """value/√squared to the nearest multiple of 10^-6, halves away from 0, by bisection on exact squares."""
    low, high = 0, 2 * 10**6 * abs(value) + 2  # the largest k with (k − 1/2)² ≤ value²·10^12/squared
    while high - low > 1:
        middle = (low + high) // 2
        if (2 * middle - 1) ** 2 * squared <= 4 * value * value * 10**12:
            low = middle
        else:
            high = middle
    text = f"{low // 10**6}.{low % 10**6:06d}"
    return f"-{text}" if value < 0 and low else text


def quotients() -> list[dict[str, Any]]:
    cases = [
        (0, 1, 5), (1, 10**12, 5), (1, 4 * 10**12, 5), (-1, 4 * 10**12, 5), (1, 4 * 10**12 + 1, 5), (3, 4 * 10**12, 7),
        (-3, 4 * 10**12, 7), (21_374_512, 10**12, 2_560_000), (-21_374_512, 10**12 + 7, 2_560_000), (5, 3, 11),
        (2**60 - 1, 2**119, 2**31), (-(2**60) + 1, 3, 1), (7, 2, 2),
    ]  # fmt: skip
    return [
        {
            "value": str(value),
            "norm2": str(norm2),
            "coordinates": d,
            "z": six_decimals(value, norm2),
            "cosine": six_decimals(value, norm2 * d),
        }
        for value, norm2, d in cases
    ]


def rounded(value: Decimal, places: str, rounding: str) -> str:
    found = value.quantize(Decimal(places), rounding=rounding)
    return f"{found if found else abs(found):f}"


def thresholds() -> dict[str, Any]:
    with localcontext() as context:
        context.prec = 120
        alphas = ["0.5", "0.05", "1e-9", "1E-9", "2.5e-10", "0.000000001", "1e-300", ".1", "0.99", "1e-999999"]
        from_alpha = {a: rounded((-2 * Decimal(a).ln()).sqrt(), "0.000001", ROUND_CEILING) for a in alphas}
        raised = [
            [z, failed, rounded(Decimal(z) + Decimal(failed).sqrt(), "0.000001", ROUND_CEILING)]
            for z, failed in [("6", 0), ("6", 1), ("6", 2), ("6.5", 63), ("7.123456", 0), ("7.1234561", 0), ("6.0", 4)]
        ]
    return {"alpha": from_alpha, "raised": raised}


def tails() -> list[dict[str, str]]:
    """log10 P(Z ≥ z) by 1/2 − φ(z)·(z + z³/3 + z⁵/15 + …), with as many digits as the difference needs."""
    found = []
    with localcontext() as context:
        context.prec = 1500
        pi = machin()
        for text in ("-13.5", "-3", "-0.000001", "0.000000", "1", "2.999999", "3", "3.000001", "6", "21.374512", "60"):
            z = Decimal(text)
            term = total = z
            k = 1
            while abs(term) > Decimal("1e-1400"):
                k += 2
                term = term * z * z / k
                total += term
            tail = Decimal("0.5") - (-z * z / 2).exp() / (2 * pi).sqrt() * total
            bound = -(max(z, Decimal(0)) ** 2) / 2 / Decimal(10).ln()
            shown = {name: rounded(v, "0.01", ROUND_HALF_EVEN) for name, v in (("p", tail.log10()), ("bound", bound))}
            found.append({"z": text, "log10_p": shown["p"], "log10_bound": shown["bound"]})
    return found


def machin() -> Decimal:
    """π = 16·arctan(1/5) − 4·arctan(1/239)."""

    def arctan(n: int) -> Decimal:
        power = total = Decimal(1) / n
        k, sign = 1, 1
        while power > Decimal("1e-1490"):
            power /= n * n
            k, sign = k + 2, -sign
            total += sign * power / k
        return total

    return 16 * arctan(5) - 4 * arctan(239)


# --- passphrases ------------------------------------------------------------------------------------------


def passphrases() -> list[dict[str, Any]]:
    found = []
    for text in ("correct horse", "Schl\u00fcssel", "Schlu\u0308ssel", "\U0001f511" * 8, " spaces count "):
        salt = hashlib.sha256(b"salt of " + text.encode()).digest()
        secret = hashlib.scrypt(text.encode(), salt=salt, n=2**10, r=8, p=1, dklen=32)
        pieces = [b"sealed file", salt]
        info = b"quorumark/v1" + b"".join(len(p).to_bytes(8, "big") + p for p in pieces)
        extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
        key = hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()
        settings = {"kind": "scrypt", "salt": salt.hex(), "n": 2**10, "r": 8, "p": 1}
        found.append({"passphrase": text, "utf8": text.encode().hex(), "settings": settings, "key": key.hex()})
    return found


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "v1"
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": EXAMPLE,
        "accepted": accepted(),
        "refused": refused(),
        "digests": digests(),
        "quotients": quotients(),
        "thresholds": thresholds(),
        "tails": tails(),
        "passphrases": passphrases(),
    }
    # escaped, so that no editor normalises a character
    (folder / "records.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
