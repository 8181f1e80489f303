"""Numbers for the page: floats of three bytes in base64, four characters each, so that any range can be cut out."""

import base64

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Pack", "unpack"]


class Pack:
    """Arrays behind each other in one text; each is found again by its offset and its length.

    A number is the upper 24 bits of its float32, rounded: 16 binary digits, a relative error of at most 2^-16.
    Three bytes are four characters of base64, so number i is at the characters 4i to 4i + 4, and the browser
    decodes only what it draws. A number that is not finite is a gap, NaN.

    >>> pack = Pack()
    >>> pack.add([1.0, 2.0]), pack.add([0.1])
    (0, 2)
    >>> unpack(pack.text(), 2, 1)
    array([0.10000038], dtype=float32)
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.length = 0

    def add(self, values: ArrayLike) -> int:
        """Append an array, flattened; its offset in numbers."""
        array = np.array(values, dtype=np.float32).ravel()
        array[~np.isfinite(array)] = np.nan
        bits = (array.view(np.uint32) + np.uint32(0x80)) >> np.uint32(8)
        three = np.ascontiguousarray(bits.astype("<u4")).view(np.uint8).reshape(-1, 4)[:, :3]
        self._parts.append(three.tobytes())
        offset = self.length
        self.length += array.size
        return offset

    def text(self) -> str:
        """Everything added so far."""
        return base64.b64encode(b"".join(self._parts)).decode("ascii")


def unpack(text: str, offset: int, length: int) -> np.ndarray:
    """The numbers that `Pack.add` packed: what the page's script does."""
    three = np.frombuffer(base64.b64decode(text[4 * offset : 4 * (offset + length)]), np.uint8).reshape(-1, 3)
    four = np.concatenate([np.zeros((len(three), 1), np.uint8), three], axis=1)
    return np.ascontiguousarray(four).view("<f4").ravel()
