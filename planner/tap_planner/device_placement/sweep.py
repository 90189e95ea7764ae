"""Dynamic programming over the ends of segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tap_planner.device_placement.segments import FAR, FAR_ENOUGH, Cut, Segments

__all__ = ["Sweep"]


class Sweep:
    """One pass over the ends of segments, which keeps for all starts that are still open what crosses."""

    def __init__(
        self, segments: Segments, rows: Sequence[int], limit_ns: int | None, below_ns: int = FAR_ENOUGH
    ) -> None:
        self.segments, self.limit, self.below = segments, limit_ns, below_ns
        num_devices, count = len(segments.devices), segments.count
        used = sorted(set(rows))
        self.weight_ns = np.ascontiguousarray(segments.steps.weight_ns[:, used])
        self.row_of = {row: place for place, row in enumerate(used)}
        self.traffic = np.zeros((len(used), count), dtype=np.int64)
        self.base = np.zeros((len(used), 1), dtype=np.int64)  # belongs to the traffic of every start
        self.extra = np.zeros(count, dtype=np.int64)  # shared parameters that segments hold
        self.before = np.full((num_devices + 1, count + 1), FAR, dtype=np.int64)  # best up to a position, by devices
        self.before[:, 0] = 0
        self.best = np.full((num_devices, count + 1), FAR, dtype=np.int64)  # the same with the last device in use
        self.origin = np.zeros((num_devices, count + 1), dtype=np.int64)
        self.open = np.full((num_devices, count), FAR, dtype=np.int64)  # what a start begins with
        too_few = segments.left_bytes[:, None] > segments.room_after  # [num_groups + 1, num_devices]
        if limit_ns is not None:
            too_few |= -(-segments.rest_ns[:, None] // segments.devices_after) > limit_ns
        self.too_few = too_few  # the device and those after it, for what is left from a position on
        self.low = [0] * num_devices  # first start that is still open
        self.room = np.empty((3, num_devices * count), dtype=np.int64)

    def total(self) -> Cut | None:
        """The least sum."""
        segments = self.segments
        for place in range(segments.count):
            known = self.before[:-1, place]
            fresh = known - segments.compute_ns[:, place]
            if self.below < FAR_ENOUGH:
                fresh[known + segments.rest_ns[place] > self.below] = FAR
            devices, low = self._open(place, fresh)
            if devices.start >= devices.stop:
                return None
            window = slice(low, place + 1)
            found = self._space(0, devices, window)
            traffic, base = self._rows(segments.total_row, devices, window)
            np.add(traffic, self.open[devices, window], out=found)
            if self.limit is not None:
                found[self._lengths(devices, window) > self.limit] = FAR
            self._close(found, devices, window, segments.compute_ns[devices, place + 1] + base[:, 0])
        return self._cut()

    def busiest(self) -> Cut | None:
        """The least longest segment, if it is within the limit."""
        for place in range(self.segments.count):
            devices, low = self._open(place, self.before[:-1, place])
            if devices.start >= devices.stop:
                return None
            window = slice(low, place + 1)
            lengths = self._lengths(devices, window)
            np.maximum(lengths, self.open[devices, window], out=lengths)
            if self.limit is not None:
                lengths[lengths > self.limit] = FAR
            self._close(lengths, devices, window, 0)
        return self._cut()

    def _lengths(self, devices: slice, window: slice) -> np.ndarray:
        """By device and open start, what the segment takes with all that it receives and sends."""
        compute, lengths = self.segments.compute_ns, self._space(1, devices, window)
        traffic, base = self._rows(self.segments.busy_row, devices, window)
        np.subtract(compute[devices, window.stop : window.stop + 1] + base, compute[devices, window], out=lengths)
        return np.add(lengths, traffic, out=lengths)

    def _space(self, number: int, devices: slice, window: slice) -> np.ndarray:
        rows, width = devices.stop - devices.start, window.stop - window.start
        return self.room[number, : rows * width].reshape(rows, width)

    def _rows(self, which: list[int], devices: slice, window: slice) -> tuple[np.ndarray, np.ndarray]:
        """Traffic of open starts in two parts to be added: by start, and the rest; by device or for all of them."""
        rows = [self.row_of[row] for row in which[devices]]
        if rows.count(rows[0]) == len(rows):
            return self.traffic[rows[0], window], self.base[rows[:1]]
        traffic = np.take(self.traffic[:, window], rows, axis=0, out=self._space(2, devices, window))
        return traffic, self.base[rows]

    def _open(self, place: int, fresh: np.ndarray) -> tuple[slice, int]:
        """A group joins all open segments, and one starts with it.

        Returns:
            The devices with open segments (and those between them), and the first start that is open on any.
        """
        self._exchange(place, min(self.low))
        if self.segments.shared is not None:
            for first, stop, num_bytes in self.segments.shared[place]:
                self.extra[first:stop] += num_bytes
        fresh = np.where(self.too_few[place], FAR, fresh)
        self.open[:, place] = fresh
        refused = () if self.segments.refused is None else self.segments.refused[place]
        active: list[int] = []
        for device, value in enumerate(fresh.tolist()):
            if value >= FAR_ENOUGH and self.low[device] == place:
                self.low[device] = place + 1
                continue
            self._advance(device, place, device in refused)
            if self.low[device] <= place:
                active.append(device)
        if not active:
            return slice(0, 0), place + 1
        return slice(active[0], active[-1] + 1), min(self.low)

    def _exchange(self, place: int, low: int) -> None:
        """Traffic changes as a group joins; where that concerns most of the open starts, the others are changed."""
        steps, traffic, base = self.segments.steps, self.traffic, self.base
        end = place + 1
        traffic[:, place : place + 1] = -base
        for change in range(steps.offsets[place], steps.offsets[end]):
            first, stop = steps.first[change], steps.stop[change]
            if stop <= low:
                continue
            weight = self.weight_ns[change]
            if first <= low and end - stop < stop - low:
                base += weight
                if stop < end:
                    others = traffic[:, stop:end]
                    others -= weight
            else:
                concerned = traffic[:, max(first, low) : stop]
                concerned += weight

    def _advance(self, device: int, place: int, refused: bool) -> None:
        """Close starts from which the device does not reach beyond a place, neither now nor later."""
        low, end = self.low[device], place + 1
        new = end if refused else self._reach(device, low, end)
        starts = self.open[device]
        while new < end and starts[new] >= FAR_ENOUGH:
            new += 1
        if new > low:
            starts[low:new] = FAR
            self.low[device] = new

    def _reach(self, device: int, low: int, end: int) -> int:
        """The first start, from ``low`` on, whose segment until ``end`` fits in the memory and the limit."""
        segments = self.segments
        held, most = segments.held, segments.held[end] - segments.capacity[device]
        if segments.shared is None:
            while low < end and held[low] < most:
                low += 1
        else:
            while low < end and held[low] - int(self.extra[low]) < most:
                low += 1
        if self.limit is not None:
            compute = segments.compute_of[device]
            least = compute[end] - self.limit
            while low < end and compute[low] < least:
                low += 1
        return low

    def _close(self, found: np.ndarray, devices: slice, window: slice, added: np.ndarray | int) -> None:
        """Keep the best start of segments that end where the window does."""
        end = window.stop
        where = found.argmin(axis=1)
        value = found[np.arange(len(found)), where]
        self.best[devices, end] = np.where(value >= FAR_ENOUGH, FAR, value + added)
        self.origin[devices, end] = where + window.start
        np.minimum.accumulate(self.best[:, end], out=self.before[1:, end])

    def _cut(self) -> Cut | None:
        """Read the best cut backwards; of equal ones, that with fewer devices in use, then longer last segments."""
        end, device = self.segments.count, len(self.segments.devices) - 1
        objective = int(self.before[-1, end])
        if objective >= FAR_ENOUGH:
            return None
        starts: list[tuple[int, int]] = []
        while end:
            while self.before[device, end] <= self.best[device, end]:
                device -= 1
            end = int(self.origin[device, end])
            starts.append((self.segments.devices[device], end))
            device -= 1
        return Cut(objective_ns=objective, starts=tuple(reversed(starts)))
