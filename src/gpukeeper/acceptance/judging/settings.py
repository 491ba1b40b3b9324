"""Settings that hold a healthy GPU back: a lowered power limit, fixed clocks. From what the driver answers; pure.

Nothing here changes a setting. A power limit can be read. Application clocks and locked clocks show in the driver's
reasons for the clocks; where it gives none, a clock that stays at one value far below the maximum, with power and heat
to spare, is one that was fixed by a setting.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpukeeper.acceptance.check import CheckContext, CheckRun
from gpukeeper.model.gpu import Fact, Gpu, Health, Reading

LOADED = 50.0  # percent of use
FIXED_CLOCKS = 0x2  # the driver's bit for clocks that an application or an admin set
HELD_BY_LOAD = 0x4 | 0x8 | 0x20 | 0x40 | 0x80  # power cap, slowdowns: the clock would be low without any setting
LOW = 0.95  # of the highest clock: a healthy GPU with power to spare comes nearer
FLAT_MHZ = 15.0  # a step of the clock: one that is fixed does not move
LEAST = 3  # readings under load
POWER_TO_SPARE = 0.90  # of its limit


def held_back(uuid: str, trial: CheckRun, context: CheckContext) -> str:
    """The setting that explains a slow figure and the command that undoes it, without a full stop; empty: none.
    By all readings of the run so far: a setting stays, and a short check alone has too few."""
    gpu = context.gpu(uuid)
    reading = next((one[uuid] for one in reversed(trial.around) if uuid in one), context.before.get(uuid))
    if reading is None:
        return ""
    loaded = [one for one in context.readings if one.uuid == uuid and (one.utilisation or 0.0) >= LOADED]
    return power_limited(gpu, reading) or clocks_fixed(gpu, reading, loaded) or memory_clock_fixed(gpu, reading, loaded)


def power_limited(gpu: Gpu, reading: Health) -> str:
    limit, usual = number(reading.states.get("power_limit_w")), number(reading.states.get("power_default_w"))
    if limit is None or usual is None or limit >= usual - 0.5:
        return ""
    return (
        f"Its power limit is set to {limit:.0f} W, the default is {usual:.0f} W. To reset it: nvidia-smi -i"
        f" {gpu.index} -pl {usual:.0f}; then test again"
    )


def clocks_fixed(gpu: Gpu, reading: Health, loaded: Sequence[Reading]) -> str:
    undo = f"nvidia-smi -i {gpu.index} -rgc (application clocks: nvidia-smi -i {gpu.index} -rac)"
    if any((one.reasons or 0) & FIXED_CLOCKS for one in loaded):
        return f"Its clocks are locked by a setting. To reset it: {undo}; then test again"
    most, limit = number(reading.states.get("sm_mhz_max")), number(reading.states.get("power_limit_w"))
    clocks = [one.sm_mhz for one in loaded if one.sm_mhz is not None]
    watts = [one.power_w for one in loaded if one.power_w is not None]
    free = all(one.reasons is not None and not one.reasons & HELD_BY_LOAD for one in loaded)
    if most is None or limit is None or len(clocks) < LEAST or not watts or not free:
        return ""
    flat = max(clocks) - min(clocks) <= FLAT_MHZ and max(clocks) < LOW * most
    if not flat or max(watts) > POWER_TO_SPARE * limit:
        return ""
    return (
        f"Its clock stays at {max(clocks):.0f} MHz of {most:.0f} MHz below its power limit, as if locked by a"
        f" setting. To reset it: {undo}; then test again"
    )


def memory_clock_fixed(gpu: Gpu, reading: Health, loaded: Sequence[Reading]) -> str:
    most = number(reading.states.get("memory_mhz_max"))
    seen = [one.memory_mhz for one in loaded if one.memory_mhz is not None]
    if most is None or not seen or max(seen) >= 0.98 * most:
        return ""
    return (
        f"Its memory runs at {max(seen):.0f} MHz of {most:.0f} MHz under load, as if locked by a setting. To reset"
        f" it: nvidia-smi -i {gpu.index} -rmc (application clocks: nvidia-smi -i {gpu.index} -rac); then test again"
    )


def number(value: Fact) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
