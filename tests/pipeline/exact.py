"""The shortest step there is, by trying everything: for tiny cases only, and without a line of the search's own code.

Microbatches are equal, so each stage takes them in order. A state is how often each stage did each kind; of two
ways into the same state, one that is nowhere later than the other is enough.
"""

KINDS = "FRIW"


class Exact:
    def __init__(self, placement, microbatches, costs, recompute=(), limits=None):
        self.placement, self.count, self.recompute = tuple(placement), microbatches, frozenset(recompute)
        self.stages, self.ranks = len(self.placement), max(self.placement) + 1
        self.limits = limits or [float("inf")] * self.ranks
        self.costs = costs
        self.cost = [{k: costs.at(k, s) for k in KINDS} for s in range(self.stages)]

    def held(self, rank, counts, lock):
        total = 0.0
        for s, (f, r, i, w) in enumerate(counts):
            if self.placement[s] == rank:
                saved, graph, waiting = (self.costs.at(name, s) for name in ("saved", "graph", "waiting"))
                again = s in self.recompute
                total += (f - r) * saved + (r - i) * graph if again else (f - i) * graph
                total += (i - w) * waiting
        return total

    def options(self, counts, lock):
        """(rank, stage, kind): kind G is an F whose I is the rank's next action, which saves the R."""
        for s, (f, r, i, w) in enumerate(counts):
            rank, again, last = self.placement[s], s in self.recompute, s == self.stages - 1
            gradient = f > i if last else counts[s + 1][2] > i
            if gradient and (not again or r > i) and lock[rank] in (-1, s):
                yield rank, s, "I"
            if lock[rank] >= 0:
                continue
            if f < self.count and (s == 0 or counts[s - 1][0] > f):
                yield rank, s, "F"
                if again and f == i:
                    yield rank, s, "G"
            if again and f > r:
                yield rank, s, "R"
            if i > w:
                yield rank, s, "W"

    def do(self, state, rank, s, kind):
        """The state after, or None when memory does not allow it. Times: (clocks, F's ends, I's ends) in order."""
        counts, lock, clocks, ends = state
        start = clocks[rank]
        f, r, i, w = counts[s]
        source = {"F": ("F", s - 1, f), "G": ("F", s - 1, f), "I": ("I", s + 1, i)}.get(kind)
        if kind == "I" and s == self.stages - 1:
            source = ("F", s, i)
        if source in ends:
            away = self.placement[source[1]] != rank
            start = max(start, ends[source] + (self.costs.comm if away else 0.0))
        end = start + self.cost[s]["F" if kind == "G" else kind]
        new = {"F": (f + 1, r, i, w), "G": (f + 1, r + 1, i, w), "R": (f, r + 1, i, w), "I": (f, r, i + 1, w)}
        counts = (*counts[:s], new.get(kind, (f, r, i, w + 1)), *counts[s + 1 :])
        lock = list(lock)
        if kind in "GI":
            lock[rank] = s if kind == "G" else -1
        clocks = list(clocks)
        clocks[rank] = end
        ends = {k: v for k, v in ends.items() if k != source}
        if kind in "FGI" and not (kind == "I" and s == 0):
            ends["F" if kind == "G" else kind, s, i if kind == "I" else f] = end
        if self.held(rank, counts, lock) > self.limits[rank] + 1e-9:
            return None
        return counts, tuple(lock), tuple(clocks), ends

    def rest(self, state):
        """No completion is faster than this."""
        counts, _, clocks, _ = state
        least = list(clocks)
        for s, (f, _, i, w) in enumerate(counts):
            c, n = self.cost[s], self.count
            least[self.placement[s]] += (n - f) * c["F"] + (n - i) * c["I"] + (n - w) * c["W"]
        return max(least)

    def times(self, state):
        """What counts of a state's times: an arrival before the clock of its rank is as good as one at it."""
        _, _, clocks, ends = state
        arrivals = []
        for (kind, s, _), end in sorted(ends.items()):
            to = s + 1 if kind == "F" else s - 1
            same = (to == self.stages and s) or to
            away = self.placement[same] != self.placement[s]
            arrivals.append(max(end + (self.costs.comm if away else 0.0), clocks[self.placement[same]]))
        return (*clocks, *arrivals)

    def optimum(self, upper=float("inf")):
        """The shortest step, or `upper` when none is shorter."""
        first = (((0, 0, 0, 0),) * self.stages, (-1,) * self.ranks, (0.0,) * self.ranks, {})
        layer, best = {0: [first]}, upper
        while layer:
            following = {}
            for states in layer.values():
                for state in states:
                    for rank, s, kind in self.options(state[0], state[1]):
                        after = self.do(state, rank, s, kind)
                        if after is None or self.rest(after) >= best - 1e-9:
                            continue
                        if all(w == self.count for *_, w in after[0]):
                            best = max(after[2])
                            continue
                        self.keep(following.setdefault((after[0], after[1]), []), after)
            layer = following
        return best

    def keep(self, states, after):
        mine = self.times(after)
        others = [(self.times(o), o) for o in states]
        if any(all(a <= b for a, b in zip(t, mine, strict=True)) for t, _ in others):
            return
        states[:] = [o for t, o in others if not all(a <= b for a, b in zip(mine, t, strict=True))] + [after]
