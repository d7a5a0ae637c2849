"""The schedules of the papers, one function each: on looped placements, and on a V."""
