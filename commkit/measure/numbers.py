"""Element types under nccl-tests' names, and which numbers they hold exactly."""

from __future__ import annotations

from dataclasses import dataclass

from commkit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Number:
    """An element type.

    exact      every integer from 0 to this one is representable (at most 2**24: enough here)
    exponent   3 * 2**exponent is representable (at most 20)
    smallest   2**-smallest is representable; 0 for integers
    roundoff   half the gap between 1 and the next larger number; 0 for integers
    """

    name: str
    torch_name: str
    size: int  # bytes
    exact: int
    exponent: int
    smallest: int = 0
    roundoff: float = 0.0

    @property
    def floating(self) -> bool:
        return self.roundoff > 0


_MANY = 2**24

#: In nccl-tests' order.  Ranges of the float types: IEEE 754; bfloat16 is float's upper half;
#: f8e4m3 (largest 448) and f8e5m2 (largest 57344) as in the OCP 8-bit floating point document.
NUMBERS: dict[str, Number] = {
    number.name: number
    for number in (
        Number("int8", "int8", 1, 127, 5),
        Number("uint8", "uint8", 1, 255, 6),
        Number("int32", "int32", 4, _MANY, 20),
        Number("uint32", "uint32", 4, _MANY, 20),
        Number("int64", "int64", 8, _MANY, 20),
        Number("uint64", "uint64", 8, _MANY, 20),
        Number("half", "float16", 2, 2048, 14, 24, 2**-11),
        Number("float", "float32", 4, _MANY, 20, 149, 2**-24),
        Number("double", "float64", 8, _MANY, 20, 1074, 2**-53),
        Number("bfloat16", "bfloat16", 2, 256, 20, 133, 2**-8),
        Number("f8e4m3", "float8_e4m3fn", 1, 16, 7, 9, 2**-4),
        Number("f8e5m2", "float8_e5m2", 1, 8, 14, 16, 2**-3),
    )
}

REDOPS: tuple[str, ...] = ("sum", "prod", "max", "min", "avg")


def numbers_named(text: str) -> tuple[Number, ...]:
    """`text` is a type's name, or `all`.  Raises UsageError for another name."""
    if text == "all":
        return tuple(NUMBERS.values())
    if text not in NUMBERS:
        raise UsageError(f"-d {text}: expected one of {', '.join(NUMBERS)}, or all")
    return (NUMBERS[text],)


def redops_named(text: str) -> tuple[str, ...]:
    """`text` is a reduction's name, or `all`.  Raises UsageError for another name."""
    if text == "all":
        return REDOPS
    if text not in REDOPS:
        raise UsageError(f"-o {text}: expected one of {', '.join(REDOPS)}, or all")
    return (text,)
